"""Build an engine from its configuration: checkpoint, model, drafter, caches, start-up checks.

Everything `auto` is resolved here, once; the values in force are in Engine.ready() and in the log.
"""

import logging
import os
import time
from collections.abc import Callable

import torch

from twining.cache.pool import CachePool
from twining.checkpoint.hf_config import Glm5NextConfig, parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.config import PAGE_SIZE, EngineConfig
from twining.drafters.make import make_drafter, resolve_name, tap_layers
from twining.engine.core import Engine
from twining.engine.grammar import GrammarVocab
from twining.engine.invariance import check_row_invariance
from twining.engine.partition import parse_partition, resolve_partition
from twining.engine.pipeline import Pipeline
from twining.errors import ConfigError
from twining.models.glm5_next.model import Glm5Next

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Load everything and check it. The default factory of the engine process.

    clock: seconds, for fairness and timings.

    Sets torch's thread count for the whole process. Raises ConfigError, CheckpointError, or
    EngineError when the machine fails the row-invariance check.
    """
    began_s = time.monotonic()
    torch.set_num_threads(config.threads or default_threads())
    ckpt = Checkpoint.open(config.model_dir)
    model_config = parse_glm5_next(ckpt.config)
    max_seq_len = resolve_max_seq_len(config, model_config)
    num_pages = resolve_num_pages(config, max_seq_len)
    taps = tap_layers(config.draft)
    if config.partition:
        parse_partition(config.partition)  # refused before the load as well
    if config.draft.drafter == "dflash2":
        resolve_name(config.draft, has_mtp=True)  # a missing folder is refused before the load
    model = Glm5Next.load(ckpt, model_config, tap_layers=taps)
    schedule = config.schedule
    drafter = make_drafter(
        config.draft, model, max_seqs=schedule.max_seqs, max_chunk=schedule.max_batched_tokens
    )
    num_draft = min(config.draft.num_draft_tokens, drafter.max_draft)
    partition = resolve_partition(
        config.partition,
        config.stages,
        model.layer_bytes,
        first_cost=model.embedding.nbytes,
        last_cost=model.head_bytes,
    )
    pool = _make_pool(config, model, num_pages, num_draft, partition)
    pipeline = Pipeline(model, config.stages)
    check_row_invariance(
        pipeline,
        pool,
        vocab_size=model_config.vocab_size,
        max_seq_len=max_seq_len,
        max_draft=num_draft,
    )
    grammar_vocab = GrammarVocab.load(
        config.model_dir,
        vocab_size=model_config.vocab_size,
        end_ids=model_config.eos_token_ids,
    )
    load_s = time.monotonic() - began_s
    log.info(
        "loaded %s in %.1f s: max_seq_len %d, %d pages, %d sequences, drafter %s with %d drafts,"
        " layers per stage %s",
        config.model_dir.name,
        load_s,
        max_seq_len,
        num_pages,
        schedule.max_seqs,
        drafter.name,
        num_draft,
        ",".join(map(str, partition)),
    )
    return Engine(
        pipeline,
        drafter,
        pool,
        vocab_size=model_config.vocab_size,
        max_seq_len=max_seq_len,
        num_draft_tokens=num_draft,
        adaptive_draft=config.draft.adaptive_draft,
        schedule=schedule,
        grammar_vocab=grammar_vocab,
        cache=config.cache,
        load_s=load_s,
        clock=clock,
    )


def default_threads() -> int:
    """CPUs this process may use, rounded down to a power of two (design.md P1)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 << max(0, (count or 1).bit_length() - 1)


def resolve_max_seq_len(config: EngineConfig, model_config: Glm5NextConfig) -> int:
    """Tokens of the longest sequence. Raises ConfigError for more than the model was made for."""
    limit = model_config.max_position_embeddings
    if config.max_seq_len > limit:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len} exceeds the model's {limit} positions;"
            f" use {limit} or less"
        )
    if config.max_seq_len == 1:
        raise ConfigError("max_seq_len=1 leaves no room for output; use 2 or more")
    return config.max_seq_len or limit


def resolve_num_pages(config: EngineConfig, max_seq_len: int) -> int:
    """Pages of the pool. Raises ConfigError if they cannot hold one sequence of max_seq_len."""
    per_sequence = -(-max_seq_len // PAGE_SIZE)
    num_pages = config.cache.max_pages or per_sequence * config.schedule.max_seqs
    if num_pages < per_sequence:
        raise ConfigError(
            f"max_pages={num_pages} holds {num_pages * PAGE_SIZE} tokens, less than"
            f" max_seq_len={max_seq_len}; use max_pages={per_sequence} or a smaller max_seq_len"
        )
    return num_pages


def _make_pool(
    config: EngineConfig,
    model: Glm5Next,
    num_pages: int,
    num_draft: int,
    partition: tuple[int, ...],
) -> CachePool:
    try:
        return model.make_pool(
            num_pages=num_pages,
            max_seqs=config.schedule.max_seqs,
            max_draft=num_draft,
            latent_format=config.cache.latent_format,
            partition=partition,
        )
    except (RuntimeError, MemoryError) as err:
        raise ConfigError(
            f"a cache of {num_pages} pages and {config.schedule.max_seqs} sequences does not fit"
            " into memory; lower max_seq_len, max_seqs or max_pages"
        ) from err
