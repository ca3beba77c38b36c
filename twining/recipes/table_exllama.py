"""Table A: flags and variables of the ExLlamaV3 launcher, one handler each.

Source: spec/recipes.md 4.1, 4.4 (last row). Handlers set neutral values and return a verdict line;
they raise BadValue for a value that does not parse.
"""

from collections.abc import Mapping
from typing import Final

from twining.config import PAGE_SIZE
from twining.recipes.settings import (
    BadValue,
    Context,
    Flag,
    Given,
    Handler,
    Line,
    approximate,
    assigned,
    equivalent,
    exact,
    inert,
    number_list,
    refused,
    whole,
)

PREFILL_ALIGN: Final = 64
DRAFTS: Final = {"dflash2": 7, "mtp": 2}  # the only pairs the launcher accepts


def model_dir(given: Given, ctx: Context) -> Line:
    if not given.value:
        raise BadValue("a folder is needed")
    text = assigned(ctx.settings, model_dir=given.value, weights_format="exl3")
    return exact(given, text, "the folder that you name; declared bits are compared with the pin")


def cache_tokens(given: Given, ctx: Context) -> Line:
    tokens = whole(given.value, 1, 1 << 31)
    if tokens % PAGE_SIZE or tokens < 2 * PAGE_SIZE:
        fix = max(2, tokens // PAGE_SIZE) * PAGE_SIZE
        return refused(given, f"cache sizes are whole pages of {PAGE_SIZE} tokens; use {fix}")
    limit = min(ctx.can.model_limit, tokens - PAGE_SIZE)
    text = assigned(ctx.settings, cache_tokens=tokens)
    ctx.settings.max_seq_len = limit
    return exact(given, text, f"max_seq_len {limit}, one page of {PAGE_SIZE} kept back")


def cache_format(given: Given, ctx: Context) -> Line:
    bits = whole((given.value or "").split(",")[0], 2, 8)
    name = f"q{bits}"
    if name not in ctx.can.cache_formats:
        known = ", ".join(f for f in ctx.can.cache_formats if f.startswith("q"))
        return refused(given, f"there is no {bits}-bit latent cache; use one of {known}")
    text = assigned(ctx.settings, cache_format=name)
    note = "groups of 32 values with one fp16 scale; changes numerics against 16 bits"
    if "," in (given.value or ""):
        note += "; the second number has no effect, there is one latent"
    return exact(given, text, note)


def budgets(given: Given, ctx: Context) -> Line:
    values = number_list(given.value, 0.5, 4096)
    text = assigned(ctx.settings, device_budgets_gib=values)
    if ctx.can.num_devices == 1:
        return inert(given, text, "this run uses one device; the planner uses its memory")
    if ctx.can.num_devices > len(values):
        return refused(
            given, f"{len(values)} budgets for {ctx.can.num_devices} devices; give one for each"
        )
    return exact(given, text, "ceiling of the planner, in GiB per device")


def _needs_q8(given: Given, ctx: Context) -> Line | None:
    if (ctx.given.get("-cq") or "").split(",")[0] == "8":
        return None
    return refused(given, "it needs an 8-bit cache; add -cq 8 or drop it")


def q8_staging(given: Given, ctx: Context) -> Line:
    if (fault := _needs_q8(given, ctx)) is not None:
        return fault
    if ctx.given.get("--autosplit_max_batch_size", "1") != "1":
        return refused(given, "it needs --autosplit_max_batch_size 1")
    text = assigned(ctx.settings, staging_tile_tokens=32768, workspace_batch=1, append_rows=2048)
    return inert(given, text, "packed pages are read in place, no copy of the pool is ever made")


def q8_head(given: Given, ctx: Context) -> Line:
    if (fault := _needs_q8(given, ctx)) is not None:
        return fault
    if "-dm" in ctx.given:
        text = assigned(ctx.settings, head_device=0, draft_device=0)
    else:
        text = assigned(ctx.settings, head_device=0)
    if ctx.can.num_devices == 1:
        return inert(given, "head_device=0", "this run uses one device")
    return exact(given, text, "reserved before the layers are placed")


def fp16_draft_cache(given: Given, ctx: Context) -> Line:
    if (fault := _needs_q8(given, ctx)) is not None:
        return fault
    text = assigned(ctx.settings, draft_cache_format="fp16")
    return refused(given, "the own head shares the format of the latent cache; drop it", text)


def drafter(given: Given, ctx: Context) -> Line:
    if not given.value:
        raise BadValue("a folder is needed")
    if "--mtp" in ctx.given:
        return refused(given, "two ways of drafting at once; keep either -dm or --mtp")
    text = assigned(ctx.settings, draft_method="dflash2", draft_dir=given.value)
    return exact(given, text, "the folder that you name; drafting never changes the output")


def own_head(given: Given, ctx: Context) -> Line:
    if "-dm" in ctx.given:
        return refused(given, "two ways of drafting at once; keep either -dm or --mtp")
    text = assigned(ctx.settings, draft_method="mtp")
    return exact(given, text, "refused at load if the checkpoint lacks the block")


def num_draft(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 1, 255)
    method = "dflash2" if "-dm" in ctx.given else "mtp" if "--mtp" in ctx.given else None
    if method is None:
        return refused(given, "nothing drafts; add -dm or --mtp, or drop it")
    if count > ctx.can.max_draft:
        text = assigned(ctx.settings, num_draft_tokens=ctx.can.max_draft)
        return approximate(given, text, f"at most {ctx.can.max_draft}; output same, speed differs")
    text = assigned(ctx.settings, num_draft_tokens=count)
    if count != DRAFTS[method]:
        return exact(given, text, f"the launcher itself accepts only {DRAFTS[method]} here")
    return exact(given, text)


def prefix_cache(given: Given, ctx: Context) -> Line:
    if "-dm" not in ctx.given:
        return refused(given, "it needs a DFlash2 drafter; add -dm or drop it")
    if ctx.given.get("GLM53_PREFIX_CACHE") == "0":
        assigned(ctx.settings, prefix_reuse="off")
        return inert(given, "prefix_reuse=off", "GLM53_PREFIX_CACHE=0 drops it")
    text = assigned(ctx.settings, prefix_reuse="previous_request")
    if ctx.can.has_prefix_reuse:
        return equivalent(given, text, "any earlier prefix is reused, warm output equals cold")
    return equivalent(
        given, "prefix_reuse=off", "this version runs every prompt cold: same output, later start"
    )


def chunk(given: Given, ctx: Context) -> Line:
    size = whole(given.value, 1, 1 << 20)
    if size % PREFILL_ALIGN:
        rounded = max(PREFILL_ALIGN, size // PREFILL_ALIGN * PREFILL_ALIGN)
        text = assigned(ctx.settings, prefill_chunk=rounded)
        return approximate(given, text, f"chunks are multiples of {PREFILL_ALIGN}: smaller, slower")
    return exact(given, assigned(ctx.settings, prefill_chunk=size))


def batch_size(given: Given, ctx: Context) -> Line:
    size = whole(given.value, 1, 256)
    text = assigned(ctx.settings, max_running=size)
    return exact(given, text, "more requests wait in the queue")


def port(given: Given, ctx: Context) -> Line:
    text = assigned(ctx.settings, port=whole(given.value, 1, 65535))
    return exact(given, f"{text}, host=127.0.0.1", "loopback only")


def port_variable(given: Given, ctx: Context) -> Line:
    value = whole(given.value, 1, 65535)
    if "--port" in ctx.given and whole(ctx.given["--port"], 1, 65535) != value:
        return inert(given, "", "--port on the command line wins")
    return exact(given, f"{assigned(ctx.settings, port=value)}, host=127.0.0.1", "loopback only")


def margin(given: Given, ctx: Context) -> Line:
    if given.value is None:
        return equivalent(given, "margin_mib=256", "no value given; the planner keeps its own")
    text = assigned(ctx.settings, margin_mib=whole(given.value, 0, 1 << 20))
    return equivalent(given, text, "the planner keeps the larger of this and its own margin")


def models_folder(given: Given, ctx: Context) -> Line:
    if given.value is not None:
        assigned(ctx.settings, models_dir=given.value)
    return inert(given, "models_dir", "only folders that you name are read")


def build_arch(given: Given, ctx: Context) -> Line:
    text = assigned(ctx.settings, build_arch=given.value or "(none)")
    return inert(given, text, f"nothing is compiled for it; this run uses {ctx.can.device_kind}")


def prefix_variable(given: Given, ctx: Context) -> Line:
    if given.value not in (None, "0", "1"):
        raise BadValue("0 or 1 is needed")
    if given.value == "0":
        return exact(given, assigned(ctx.settings, prefix_reuse="off"))
    return inert(given, "", "leaves --dflash-prefix-cache as it is")


def plumbing(reason: str) -> Handler:
    """A variable without effect here."""

    def handler(given: Given, ctx: Context) -> Line:
        return inert(given, "", reason)

    return handler


def offline(given: Given, ctx: Context) -> Line:
    return exact(given, "", "serving never goes online and tokenises in its own threads")


FLAGS: Final[Mapping[str, Flag]] = {
    "-m": Flag(model_dir),
    "-cs": Flag(cache_tokens),
    "-cq": Flag(cache_format),
    "-gs": Flag(budgets),
    "--q8-staging": Flag(q8_staging, takes_value=False),
    "--q8-head-gpu0": Flag(q8_head, takes_value=False),
    "--fp16-draft-cache": Flag(fp16_draft_cache, takes_value=False),
    "-dm": Flag(drafter),
    "-ndt": Flag(num_draft),
    "--mtp": Flag(own_head, takes_value=False),
    "--dflash-prefix-cache": Flag(prefix_cache, takes_value=False),
    "-chunk_size": Flag(chunk),
    "--autosplit_max_batch_size": Flag(batch_size),
    "--port": Flag(port),
}

_HCFUSE: Final = "kernels.stream_mix: the reference kernel runs, same results, slower"
VARIABLES: Final[Mapping[str, Handler]] = {
    "EXL3_AUTOSPLIT_MARGIN_MB": margin,
    "GLM53_MODELS_DIR": models_folder,
    "GLM53_VENV": plumbing("a folder of the launcher"),
    "GLM53_PORT": port_variable,
    "GLM53_CUDA_ARCH": build_arch,
    "TORCH_CUDA_ARCH_LIST": build_arch,
    "GLM53_PREFIX_CACHE": prefix_variable,
    "GLM53_K_HCFUSE": plumbing(_HCFUSE),
    "GLM53_K_HCFUSE_CHECK": plumbing("the fused kernel that it checks is not used"),
    "HF_HUB_OFFLINE": offline,
    "TOKENIZERS_PARALLELISM": offline,
    "DRAFT_QUANT_KERNEL_PROJ": plumbing("converted and bf16 drafters are both read, per module"),
    "DRAFT_QUANT_FC": plumbing("converted and bf16 drafters are both read, per module"),
}
