"""Runs of the real engine around one loaded model, and what two runs must have in common:
everything.

A run is a drafter, a draft length, limits of batching, and an order of arrival. None of these may
show in any token, log-probability or end of any request.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.config import CacheConfig, DraftConfig, ScheduleConfig
from twining.drafters.base import Drafter, DraftItem
from twining.drafters.make import make_drafter, tap_layers
from twining.engine.core import Engine
from twining.engine.grammar import GrammarVocab
from twining.engine.offline import Result
from twining.engine.pipeline import Pipeline
from twining.engine.request import Request
from twining.models.glm5_next.model import Glm5Next


@dataclass
class Bench:
    """A model loaded once, with the taps of its DFlash2 drafter, and engines around it."""

    model: Glm5Next
    drafter_dir: Path | None
    max_seq_len: int
    grammar_vocab: GrammarVocab | None = None

    @classmethod
    def load(cls, model_dir: Path, drafter_dir: Path | None, max_seq_len: int) -> "Bench":
        ckpt = Checkpoint.open(model_dir)
        config = parse_glm5_next(ckpt.config)
        taps = tap_layers(DraftConfig(drafter="auto", drafter_dir=drafter_dir))
        return cls(Glm5Next.load(ckpt, config, tap_layers=taps), drafter_dir, max_seq_len)

    def engine(
        self,
        drafter: str | Drafter = "none",
        num_draft: int = 0,
        *,
        max_seqs: int = 1,
        num_pages: int = 0,
        latent_format: str = "fp32",
        partition: tuple[int, ...] = (),
        adaptive_draft: bool = False,
        cache: CacheConfig | None = None,
        **schedule: float,
    ) -> Engine:
        limits = ScheduleConfig(max_seqs=max_seqs, queue_timeout_s=1e9, **schedule)
        if isinstance(drafter, str):
            config = DraftConfig(
                drafter=drafter,
                drafter_dir=self.drafter_dir if drafter == "dflash2" else None,
                num_draft_tokens=num_draft,
                ngram_min=1,
            )
            drafter = make_drafter(
                config, self.model, max_seqs=max_seqs, max_chunk=limits.max_batched_tokens
            )
        pages = num_pages or -(-self.max_seq_len // 256) * max_seqs
        pool = self.model.make_pool(
            num_pages=pages,
            max_seqs=max_seqs,
            max_draft=num_draft,
            latent_format=latent_format,
            partition=partition,
        )
        return Engine(
            Pipeline(self.model, max(1, len(partition))),
            drafter,
            pool,
            vocab_size=self.model.config.vocab_size,
            max_seq_len=self.max_seq_len,
            num_draft_tokens=num_draft,
            adaptive_draft=adaptive_draft,
            schedule=limits,
            grammar_vocab=self.grammar_vocab,
            cache=cache,
        )


class ReplayDrafter:
    """Proposes the known continuation with mistakes, so that every accept length 0 .. K occurs."""

    name, needs_taps, needs_hidden = "replay", False, False
    plane_names, rewrites_last_page = (), False

    def __init__(self, known: dict[tuple[int, ...], list[int]], max_draft: int, seed: int) -> None:
        self.known, self.max_draft, self.random = known, max_draft, random.Random(seed)

    def open(self, state) -> None: ...
    def close(self, state) -> None: ...
    def extend(self, state, start, ids, rows) -> None: ...
    def restore(self, state, planes, length) -> None: ...

    def snapshot(self, state, length):
        return {}

    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        return [self._draft(list(item.tokens), item.num_draft) for item in items]

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        for prompt, output in self.known.items():
            whole = [*prompt, *output]
            if tuple(tokens[: len(prompt)]) == prompt and whole[: len(tokens)] == tokens:
                right = whole[len(tokens) : len(tokens) + self.random.randint(0, count)]
                if right and self.random.random() < 0.5:
                    right[self.random.randrange(len(right))] = self.random.randrange(100)
                return right
        return []


def run(
    engine: Engine, requests: Sequence[Request], arrival: Callable[[], bool] = lambda: True
) -> dict[str, Result]:
    """All requests to their end; `arrival` says before each step whether the next one arrives."""
    waiting = list(requests)
    results = {r.id: Result(request_id=r.id) for r in requests}
    while waiting or engine.has_work:
        while waiting and engine.num_open < 64 and (arrival() or not engine.has_work):
            engine.submit(waiting.pop(0))
        for delta in engine.step():
            results[delta.request_id].add(delta)
        engine.audit()
    return results


def content(result: Result) -> tuple:
    """What must not depend on anything but the request."""
    assert result.code == "", result.message
    return (
        result.token_ids,
        result.finish_reason,
        result.stop_id,
        result.logprobs,
        result.prompt_logprobs,
    )


def assert_equal_runs(want: dict[str, Result], got: dict[str, Result], what: str) -> None:
    for name, result in got.items():
        assert content(result) == content(want[name]), f"{what}: request {name} differs"


DRAFTER_CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 100,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "target_layer_ids": [1, 5],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
}


def write_random_drafter(folder: Path, *, hidden: int, vocab: int, num_layers: int) -> Path:
    """A DFlash2 checkpoint with random weights that fits the target."""
    config = json.loads(json.dumps(DRAFTER_CONFIG))
    config |= {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": num_layers}
    flash = config["dflash_config"]
    flash["mask_token_id"] = vocab - 1
    width, dim = config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps, groups = flash["conv_kernel_size"], hidden // flash["conv_group_size"]
    rank = flash["selector_rank"]
    shapes = {
        "fc.weight": (hidden, len(flash["target_layer_ids"]) * hidden),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        for site in ("attention_conv", "mlp_conv"):
            layer[f"{site}.base_kernel"] = (2, taps, hidden)
            layer[f"{site}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
