"""Every setting of the configuration explained: unit and effect, by its key in a config file.

`twining config explain KEY` prints these; a test keeps the table and config.py in step. Types and
defaults are read from the dataclasses themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """unit: "" for words and switches."""

    unit: str
    effect: str


_D = SettingDoc
ENGINE_DOCS: Final[Mapping[str, SettingDoc]] = {
    "model_dir": _D("folder", "The model: config.json, tokenizer and safetensors files."),
    "max_seq_len": _D("tokens", "Longest prompt plus output; 0 = what the model was made for."),
    "threads": _D("threads", "CPU threads, a power of two; 0 = all cores, rounded down to one."),
    "device": _D("", "Where the model runs; this version runs on cpu."),
    "stages": _D("stages", "Devices the layers are divided over; never changes the output."),
    "partition": _D("", "Layers of each stage, as 23,22; empty = balanced by bytes."),
    "cache.latent_format": _D(
        "", "How attention latents are stored; fp32 is exact, q8 to q4 take less and round."
    ),
    "cache.max_pages": _D(
        "pages of 256 tokens", "Cache shared by all sequences; 0 = all of them at full length."
    ),
    "cache.reuse": _D(
        "",
        "Prefixes of earlier prompts: exact never changes the output, fast resumes from decode-made"
        " state too, off keeps nothing.",
    ),
    "cache.checkpoint_gib": _D("GiB", "Host memory for the planes of reusable prefixes."),
    "cache.checkpoint_every": _D("tokens", "Prompt tokens between two checkpoints."),
    "draft.drafter": _D("", "Who proposes tokens; never changes the output. auto picks the best."),
    "draft.drafter_dir": _D("folder", "A DFlash2 drafter, needed for drafter = dflash2."),
    "draft.num_draft_tokens": _D("tokens", "Drafts verified per step; 0 turns drafting off."),
    "draft.adaptive_draft": _D(
        "", "Drafts per step by what is accepted and what steps cost; never changes the output."
    ),
    "draft.ngram_min": _D("tokens", "Shortest repeated suffix that the n-gram drafter follows."),
    "schedule.max_seqs": _D("sequences", "Requests running at once; more wait in the queue."),
    "schedule.max_batched_tokens": _D("tokens", "Prompt tokens per step; a multiple of 64."),
    "schedule.prefill_tokens_with_decodes": _D(
        "tokens", "The same while others decode: bounds the pause of running streams."
    ),
    "schedule.decode_share": _D("share", "Engine time that running streams keep in a prefill."),
    "schedule.max_queue": _D("requests", "Waiting requests; more are refused with 429."),
    "schedule.admission": _D(
        "",
        "reserved holds the pages of the worst case; optimistic takes them as needed and moves"
        " requests to host memory when they run out.",
    ),
    "schedule.queue_timeout_s": _D("seconds", "Longest wait before a request ends with 503."),
}
SERVER_DOCS: Final[Mapping[str, SettingDoc]] = {
    "server.host": _D("", "Address to bind; a recipe never changes it."),
    "server.port": _D("", "Port to bind."),
    "server.api_keys": _D("", "Accepted keys; none = no key is asked for."),
    "server.cors_origins": _D("", "Origins that browsers may call from; * = any."),
    "server.allowed_hosts": _D("", "Further Host names on a loopback address without keys."),
    "server.model_id": _D("", "Id of the model in the API."),
    "server.aliases": _D("", "Further ids for the same model."),
    "server.any_model": _D("", "Accept whatever model id a request names."),
    "server.default_effort": _D("", "Reasoning effort of requests that name none."),
    "server.thinking_off": _D("", "What a request not to think gets: low, prefill, or reject."),
    "server.tool_guard": _D("", "Calls keep their structure and declared names while sampling."),
    "server.max_n": _D("choices", "Most choices per request."),
    "server.max_body_mib": _D("MiB", "Largest request body."),
    "server.heartbeat_s": _D("seconds", "Silence before a keep-alive line; 0 = off."),
    "server.drain_timeout_s": _D("seconds", "What running requests get at shutdown."),
    "server.sampling.temperature": _D("", "Default of requests that leave it out; 0 = greedy."),
    "server.sampling.top_p": _D("share", "Default of requests that leave it out."),
    "server.sampling.top_k": _D("tokens", "Default of requests that leave it out; 0 = off."),
    "server.sampling.min_p": _D("share", "Default of requests that leave it out; 0 = off."),
}
ALL_DOCS: Final[Mapping[str, SettingDoc]] = {**ENGINE_DOCS, **SERVER_DOCS}
