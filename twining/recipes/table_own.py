"""Flags of our own `serve` command, so that documents published by us resolve like any other.

`launch_of` writes what this table reads. Handlers set neutral values and return a verdict line.
"""

from collections.abc import Mapping
from typing import Final, get_args

from twining.config import PAGE_SIZE, EngineConfig, ReuseMode, ServerConfig
from twining.recipes.settings import (
    BadValue,
    Context,
    Flag,
    Given,
    Line,
    approximate,
    assigned,
    exact,
    refused,
    whole,
)
from twining.recipes.table_vllm import MODEL, host, max_len, model, port, served_name


def latent_format(given: Given, ctx: Context) -> Line:
    if given.value not in ctx.can.cache_formats:
        return refused(given, f"unknown format; use one of {', '.join(ctx.can.cache_formats)}")
    return exact(given, assigned(ctx.settings, cache_format=given.value))


def max_pages(given: Given, ctx: Context) -> Line:
    pages = whole(given.value, 1, 1 << 24)
    return exact(given, assigned(ctx.settings, cache_tokens=pages * PAGE_SIZE))


def max_seqs(given: Given, ctx: Context) -> Line:
    return exact(given, assigned(ctx.settings, max_running=whole(given.value, 1, 256)))


def drafter(given: Given, ctx: Context) -> Line:
    if given.value not in ("none", "ngram", "mtp", "dflash2"):
        raise BadValue("none, ngram, mtp or dflash2 is needed")
    return exact(given, assigned(ctx.settings, draft_method=given.value))


def drafter_dir(given: Given, ctx: Context) -> Line:
    ctx.settings.draft_dir = given.value
    return exact(given, "draft_dir", "the folder that you name")


def num_draft(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 0, 255)
    if count > ctx.can.max_draft:
        text = assigned(ctx.settings, num_draft_tokens=ctx.can.max_draft)
        return approximate(given, text, f"at most {ctx.can.max_draft}; output same, speed differs")
    return exact(given, assigned(ctx.settings, num_draft_tokens=count))


def stages(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 1, 64)
    if count > ctx.can.max_stages:
        return refused(given, f"this version runs at most {ctx.can.max_stages} stages")
    return exact(given, assigned(ctx.settings, pipeline_stages=count))


def partition(given: Given, ctx: Context) -> Line:
    parts = tuple(whole(part, 1, 1 << 16) for part in (given.value or "").split(","))
    return exact(given, assigned(ctx.settings, layers_per_stage=parts))


def reuse(given: Given, ctx: Context) -> Line:
    if given.value not in get_args(ReuseMode):
        raise BadValue(f"one of {', '.join(get_args(ReuseMode))} is needed")
    return exact(given, assigned(ctx.settings, own_reuse=given.value))


FLAGS: Final[Mapping[str, Flag]] = {
    MODEL: Flag(model),
    "--host": Flag(host),
    "--port": Flag(port),
    "--model-id": Flag(served_name),
    "--max-seq-len": Flag(max_len),
    "--max-seqs": Flag(max_seqs),
    "--max-pages": Flag(max_pages),
    "--latent-format": Flag(latent_format),
    "--stages": Flag(stages),
    "--partition": Flag(partition),
    "--reuse": Flag(reuse),
    "--drafter": Flag(drafter),
    "--drafter-dir": Flag(drafter_dir),
    "--num-draft-tokens": Flag(num_draft),
}


def launch_of(engine: EngineConfig, server: ServerConfig, *, drafter_name: str) -> list[str]:
    """The argv of a run. drafter_name: the one in effect. Folders appear as placeholders."""
    words = ["twining", "serve", "MODEL", "--host", "127.0.0.1", "--port", str(server.port)]
    words += ["--model-id", server.model_id, "--latent-format", engine.cache.latent_format]
    words += ["--max-seqs", str(engine.schedule.max_seqs)]
    if engine.max_seq_len:
        words += ["--max-seq-len", str(engine.max_seq_len)]
    if engine.cache.max_pages:
        words += ["--max-pages", str(engine.cache.max_pages)]
    if engine.stages > 1:
        words += ["--stages", str(engine.stages)]
    if engine.partition:
        words += ["--partition", engine.partition]
    words += ["--reuse", engine.cache.reuse, "--drafter", drafter_name]
    if drafter_name == "dflash2":
        words += ["--drafter-dir", "DRAFTER"]
    if drafter_name != "none":
        words += ["--num-draft-tokens", str(engine.draft.num_draft_tokens)]
    return words
