"""Tables B and C: flags of `vllm serve` and variables of the vLLM fork, one handler each.

Source: spec/recipes.md 4.2, 4.4. Handlers set neutral values and return a verdict line; they raise
BadValue for a value that does not parse.
"""

from collections.abc import Mapping
from typing import Any, Final

from twining.config import PAGE_SIZE
from twining.errors import ConfigError
from twining.recipes.document import parse_json, plain
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
    number,
    refused,
    whole,
    whole_list,
)
from twining.recipes.table_exllama import PREFILL_ALIGN, offline, plumbing

MODEL: Final = "MODEL"  # name under which the positional word is given


def _json(given: Given) -> dict[str, Any]:
    try:
        value = parse_json(given.value or "", "value")
    except ConfigError as err:
        raise BadValue(str(err)) from None
    if not isinstance(value, dict):
        raise BadValue("a JSON object is needed")
    return value


def model(given: Given, ctx: Context) -> Line:
    text = assigned(ctx.settings, model_dir=given.value or "")
    return exact(given, text, "the folder that you name; declared bits are compared with the pin")


def host(given: Given, ctx: Context) -> Line:
    reason = "a recipe never widens the listener"
    if given.value in ("127.0.0.1", "localhost", "::1"):
        return exact(given, "host=127.0.0.1")
    return equivalent(given, "host=127.0.0.1", f"loopback only: {reason}")


def port(given: Given, ctx: Context) -> Line:
    return exact(given, assigned(ctx.settings, port=whole(given.value, 1, 65535)))


def served_name(given: Given, ctx: Context) -> Line:
    if not given.value or len(given.value) > 200 or not given.value.isprintable():
        raise BadValue("a printable name of at most 200 characters is needed")
    return exact(given, assigned(ctx.settings, served_name=given.value))


def weights_format(given: Given, ctx: Context) -> Line:
    if given.value != "exl3":
        return refused(given, "only EXL3 packs are mapped; use exl3")
    return exact(given, assigned(ctx.settings, weights_format="exl3"))


def dtype(given: Given, ctx: Context) -> Line:
    name = given.value or ""
    if name not in ("bfloat16", "float16", "half", "auto", "float32", "float"):
        raise BadValue("bfloat16, float16, float32 or auto is needed")
    text = assigned(ctx.settings, dtype=name)
    if name == ctx.can.activations:
        return exact(given, text)
    return approximate(
        given, f"dtype={ctx.can.activations}", f"activations are {ctx.can.activations}, not {name}"
    )


def stages(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 1, 64)
    text = assigned(ctx.settings, pipeline_stages=count)
    if count <= ctx.can.max_stages:
        return exact(given, text)
    if ctx.can.num_devices == 1:
        return equivalent(given, text, "1 stage: one device holds the whole model, or none does")
    return refused(given, f"at most {ctx.can.max_stages} stages; lower it or use one device", text)


def tensor_ranks(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 1, 64)
    text = assigned(ctx.settings, tensor_ranks=count)
    if count > 1:
        return refused(given, "layers are never cut across devices; use 1", text)
    return exact(given, text)


def vision_parallel(given: Given, ctx: Context) -> Line:
    if given.value not in ("data", "weights"):
        raise BadValue("data or weights is needed")
    return inert(given, assigned(ctx.settings, vision_parallel=given.value), "there is one rank")


def max_len(given: Given, ctx: Context) -> Line:
    length = whole(given.value, 2, 1 << 31)
    if length > ctx.can.model_limit:
        return refused(given, f"the model has {ctx.can.model_limit} positions; use that or less")
    text = assigned(ctx.settings, max_seq_len=length)
    return exact(given, text, f"{length - 1} prompt tokens + 1 fit, {length} are refused")


def max_seqs(given: Given, ctx: Context) -> Line:
    count = whole(given.value, 1, 1 << 16)
    if count > 256:
        text = assigned(ctx.settings, max_running=256)
        return approximate(given, text, "at most 256 sequences run at once, more wait")
    return exact(given, assigned(ctx.settings, max_running=count), "more requests wait")


def _aligned(given: Given, ctx: Context, setting: str) -> Line:
    size = whole(given.value, 1, 1 << 20)
    if size % PREFILL_ALIGN:
        size = max(PREFILL_ALIGN, size // PREFILL_ALIGN * PREFILL_ALIGN)
        text = assigned(ctx.settings, **{setting: size})
        return approximate(given, text, f"chunks are multiples of {PREFILL_ALIGN}: smaller, slower")
    return exact(given, assigned(ctx.settings, **{setting: size}))


def token_budget(given: Given, ctx: Context) -> Line:
    return _aligned(given, ctx, "token_budget")


def chunk_with_decodes(given: Given, ctx: Context) -> Line:
    return _aligned(given, ctx, "prefill_chunk_when_decoding")


def block_size(given: Given, ctx: Context) -> Line:
    size = whole(given.value, 1, 1 << 20)
    text = assigned(ctx.settings, page_size=size)
    if size == PAGE_SIZE:
        return exact(given, text)
    held = -(-size // PAGE_SIZE)
    return equivalent(given, text, f"pages of {PAGE_SIZE}; {held} pages hold one block")


def memory_fraction(given: Given, ctx: Context) -> Line:
    share = number(given.value, 0.01, 1.0)
    text = assigned(ctx.settings, device_memory_fraction=share)
    if ctx.can.device_kind == "cpu":
        return inert(given, text, "caches have a fixed size on a CPU; the planner uses the share")
    return exact(given, text)


def tool_format(given: Given, ctx: Context) -> Line:
    return _format(given, ctx, "tool_format")


def reasoning_format(given: Given, ctx: Context) -> Line:
    return _format(given, ctx, "reasoning_format")


def _format(given: Given, ctx: Context, setting: str) -> Line:
    if given.value != "glm47":
        return refused(given, "unknown format; use glm47")
    return exact(given, assigned(ctx.settings, **{setting: "glm47"}))


def auto_tools(given: Given, ctx: Context) -> Line:
    return exact(given, "tool_choice=auto", "tool calls are always parsed")


def prompt_details(given: Given, ctx: Context) -> Line:
    return exact(given, assigned(ctx.settings, report_cached_tokens=True), "always on")


def compilation(given: Given, ctx: Context) -> Line:
    config = _json(given)
    mode = config.get("cudagraph_mode")
    known = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    if mode not in known:
        raise BadValue(f"cudagraph_mode must be one of {', '.join(known)}")
    graph_mode = {"NONE": "off", "FULL_DECODE_ONLY": "decode"}.get(mode, "all")
    text = assigned(ctx.settings, graph_mode=graph_mode)
    extra = [key for key in config if key != "cudagraph_mode"]
    note = f"; {len(extra)} other keys have no effect" if extra else ""
    if graph_mode == "off" or (ctx.can.has_step_graphs and graph_mode == "decode"):
        return exact(given, text, note[2:])
    return inert(given, text, f"no step graphs in this run: same results, slower{note}")


def drafting(given: Given, ctx: Context) -> Line:
    config = _json(given)
    method, count = config.get("method"), config.get("num_speculative_tokens")
    known = {"dflash": "dflash2", "mtp": "mtp", "ngram": "ngram"}
    if not isinstance(method, str) or method not in known:
        return refused(given, "unknown method; use dflash, mtp or ngram")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 255:
        raise BadValue("num_speculative_tokens in 1..255 is needed")
    if config.get("quantization") not in (None, "exl3"):
        return refused(given, "drafters are bf16 or EXL3; set quantization to null")
    load = config.get("draft_load_config")
    if load is not None and (
        not isinstance(load, dict) or load.get("load_format") not in (None, "auto", "safetensors")
    ):
        return refused(given, "drafters are read from safetensors; change draft_load_config")
    used = {"method", "model", "num_speculative_tokens", "quantization", "draft_load_config"}
    extra = sorted(set(config) - used)
    if extra:
        return refused(given, f"key {plain(extra[0], 40)!r} is not known here; remove it")
    folder = config.get("model")
    if folder is not None and not isinstance(folder, str):
        raise BadValue("model must be a folder")
    kept = min(count, ctx.can.max_draft)
    text = assigned(ctx.settings, draft_method=known[method], num_draft_tokens=kept)
    ctx.settings.draft_dir = folder
    if known[method] == "dflash2":
        text += ", " + assigned(ctx.settings, draft_weights=config.get("quantization") or "bf16")
    if kept < count:
        return approximate(given, text, f"at most {kept}; output same, speed differs")
    return exact(given, text, "from the drafter folder that you name; never changes the output")


def overrides(given: Given, ctx: Context) -> Line:
    config = _json(given)
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    others = [k for k in config if k != "text_config"] + [
        k for k in inner if k != "aux_hidden_state_tensor"
    ]
    if others:
        return refused(
            given, f"{plain(others[0], 40)!r} changes the model; edit its config.json instead"
        )
    tap = inner.get("aux_hidden_state_tensor")
    if tap != "stream_mean":
        return refused(
            given, "the drafter reads the mean over the streams; another tap ruins acceptance"
        )
    return exact(given, assigned(ctx.settings, draft_tap="stream_mean"))


def instrumentation(given: Given, ctx: Context) -> Line:
    return inert(given, "", "own timings are always on")


FLAGS: Final[Mapping[str, Flag]] = {
    MODEL: Flag(model),
    "--model": Flag(model),
    "--host": Flag(host),
    "--port": Flag(port),
    "--served-model-name": Flag(served_name),
    "--quantization": Flag(weights_format),
    "--load-format": Flag(weights_format),
    "--dtype": Flag(dtype),
    "--pipeline-parallel-size": Flag(stages),
    "--tensor-parallel-size": Flag(tensor_ranks),
    "--mm-encoder-tp-mode": Flag(vision_parallel),
    "--max-model-len": Flag(max_len),
    "--max-num-seqs": Flag(max_seqs),
    "--max-num-batched-tokens": Flag(token_budget),
    "--prefill-chunk-with-decodes": Flag(chunk_with_decodes),
    "--block-size": Flag(block_size),
    "--gpu-memory-utilization": Flag(memory_fraction),
    "--enable-auto-tool-choice": Flag(auto_tools, takes_value=False),
    "--tool-call-parser": Flag(tool_format),
    "--reasoning-parser": Flag(reasoning_format),
    "--enable-prompt-tokens-details": Flag(prompt_details, takes_value=False),
    "--compilation-config": Flag(compilation),
    "--speculative-config": Flag(drafting),
    "--hf-overrides": Flag(overrides),
    "--enable-per-request-metrics": Flag(instrumentation, takes_value=False),
    "--cudagraph-metrics": Flag(instrumentation, takes_value=False),
}


def partition(given: Given, ctx: Context) -> Line:
    parts = whole_list(given.value, 1, 1024)
    text = assigned(ctx.settings, layers_per_stage=parts, draft_stage=-1)
    if ctx.can.max_stages == 1:
        return inert(given, text, "this run has one stage")
    return exact(given, text, "the drafter is on the last stage")


def spread(given: Given, ctx: Context) -> Line:
    wanted = _switch(given)
    text = assigned(ctx.settings, spread_decodes=wanted)
    if ctx.can.max_stages == 1:
        return inert(given, text, "this run has one stage")
    if not wanted:
        return equivalent(given, text, "always spread over the stages; outputs unaffected")
    return exact(given, text)


def homogeneous(given: Given, ctx: Context) -> Line:
    mixed = not _switch(given)
    text = assigned(ctx.settings, mixed_steps=mixed)
    if mixed:
        return equivalent(given, text, "a step never mixes prompts and decodes; outputs unaffected")
    return exact(given, text)


def _switch(given: Given) -> bool:
    if given.value not in ("0", "1"):
        raise BadValue("0 or 1 is needed")
    return given.value == "1"


def kernel(name: str) -> Handler:
    """A kernel hint: it may change speed and rounding, not the contract."""

    def handler(given: Given, ctx: Context) -> Line:
        return inert(given, name, "a hint; the reference kernel runs, same results, slower")

    return handler


def cache_folder(given: Given, ctx: Context) -> Line:
    assigned(ctx.settings, compile_cache_dir=given.value or "")
    return equivalent(given, "compile_cache_dir", "nothing is compiled, no folder is written")


def visible_devices(given: Given, ctx: Context) -> Line:
    text = assigned(ctx.settings, devices=whole_list(given.value, 0, 4095))
    return equivalent(given, text, f"the engine's own device setting: {ctx.can.device_kind}")


def home(given: Given, ctx: Context) -> Line:
    return equivalent(given, "", "no home folder is needed")


_GEMM, _GEMV = "kernels.trellis_gemm", "kernels.trellis_gemv"
VARIABLES: Final[Mapping[str, Handler]] = {
    "VLLM_PP_LAYER_PARTITION": partition,
    "VLLM_PP_SPREAD_DECODES": spread,
    "VLLM_PP_HOMOGENEOUS_STEPS": homogeneous,
    "VLLM_SM80_KDA_PREFILL": kernel("kernels.kda_prefill"),
    "VLLM_EXL3_MOE_PREFILL_TC": kernel(_GEMM),
    "VLLM_EXL3_DENSE_PREFILL_TC": kernel(_GEMM),
    "VLLM_EXL3_DENSE_PREFILL_ONE_PRODUCT": plumbing(
        "meaning not documented; products are accumulated in float32"
    ),
    "VLLM_EXL3_MOE_DECODE_TC": kernel(_GEMV),
    "VLLM_EXL3_MOE_DECODE_TC_MODE": kernel(_GEMV),
    "VLLM_EXL3_DENSE_DECODE_TC": kernel(_GEMV),
    "VLLM_EXL3_DENSE_DECODE_TC_FAMILIES": kernel(_GEMV),
    "VLLM_EXL3_DENSE_DECODE_SPLITK": kernel("kernels.split_k"),
    "VLLM_EXL3_DECODE_VARIANT": plumbing("an alternative kernel that stays off"),
    "VLLM_CACHE_ROOT": cache_folder,
    "TRITON_CACHE_DIR": cache_folder,
    "CUDA_CACHE_PATH": cache_folder,
    "VLLM_KV_PLAN_LOG": instrumentation,
    "HF_HUB_OFFLINE": offline,
    "CUDA_VISIBLE_DEVICES": visible_devices,
    "HOME": home,
}
