"""`twining serve`: the HTTP server. Options become two configs, which are printed at start."""

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from twining.cli.options import (
    CACHE,
    DEMO,
    DRAFT,
    ENGINE,
    SCHEDULE,
    SERVER,
    AdaptiveOption,
    AdmissionOption,
    CheckpointGibOption,
    DrafterDirOption,
    DrafterOption,
    LatentOption,
    MaxPagesOption,
    MaxSeqLenOption,
    MaxSeqsOption,
    NumDraftOption,
    PartitionOption,
    ReuseOption,
    StagesOption,
    ThreadsOption,
    engine_config,
    note,
    read_keys,
    resolve_model,
)
from twining.config import (
    CacheConfig,
    Effort,
    SamplingDefaults,
    ScheduleConfig,
    ServerConfig,
    ThinkingOff,
)
from twining.config_file import read_config
from twining.engine.request import EngineReady
from twining.errors import ConfigError


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, or `demo`.")] = DEMO,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with every setting, in place of other options.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = SERVER.host,
    port: Annotated[int, typer.Option(help="Port to bind.")] = SERVER.port,
    drafter: DrafterOption = DRAFT.drafter,
    drafter_dir: DrafterDirOption = DRAFT.drafter_dir,
    num_draft_tokens: NumDraftOption = DRAFT.num_draft_tokens,
    adaptive_draft: AdaptiveOption = DRAFT.adaptive_draft,
    stages: StagesOption = ENGINE.stages,
    partition: PartitionOption = ENGINE.partition,
    max_seqs: MaxSeqsOption = SCHEDULE.max_seqs,
    max_seq_len: MaxSeqLenOption = ENGINE.max_seq_len,
    max_queue: Annotated[int, typer.Option(help="Waiting requests.")] = SCHEDULE.max_queue,
    queue_timeout: Annotated[
        float, typer.Option(help="Seconds a request may wait.")
    ] = SCHEDULE.queue_timeout_s,
    threads: ThreadsOption = ENGINE.threads,
    latent_format: LatentOption = CACHE.latent_format,
    max_pages: MaxPagesOption = CACHE.max_pages,
    reuse: ReuseOption = CACHE.reuse,
    checkpoint_gib: CheckpointGibOption = CACHE.checkpoint_gib,
    admission: AdmissionOption = SCHEDULE.admission,
    model_id: Annotated[str | None, typer.Option(help="Id of the model in the API.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Further id; repeatable.")] = None,
    any_model: Annotated[
        bool, typer.Option(help="Accept any model id in requests.")
    ] = SERVER.any_model,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one API key a line; empty = no key needed.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin or *; repeatable.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further Host name on a loopback bind; repeatable.")
    ] = None,
    default_effort: Annotated[
        Effort, typer.Option(help="Reasoning effort of requests that name none.")
    ] = SERVER.default_effort,
    thinking_off: Annotated[
        ThinkingOff, typer.Option(help="What a request to think not at all does.")
    ] = SERVER.thinking_off,
    tool_guard: Annotated[
        bool, typer.Option(help="Keep calls to declared names and keys while sampling.")
    ] = SERVER.tool_guard,
    temperature: Annotated[
        float, typer.Option(help="Default temperature.")
    ] = SERVER.sampling.temperature,
    top_p: Annotated[float, typer.Option(help="Default top-p.")] = SERVER.sampling.top_p,
    max_n: Annotated[int, typer.Option(help="Most choices per request.")] = SERVER.max_n,
    max_body_mib: Annotated[int, typer.Option(help="Largest body.")] = SERVER.max_body_mib,
    heartbeat: Annotated[
        float, typer.Option(help="Seconds of silence before a keep-alive; 0 = off.")
    ] = SERVER.heartbeat_s,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get at shutdown.")
    ] = SERVER.drain_timeout_s,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    if config is not None:
        _only_config(ctx)
        _run(*read_config(config))
        return
    paths = resolve_model(model, drafter_dir)
    engine = engine_config(
        paths,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        adaptive_draft=adaptive_draft,
        stages=stages,
        partition=partition,
        max_seq_len=max_seq_len,
        threads=threads,
        cache=CacheConfig(
            latent_format=latent_format,
            max_pages=max_pages,
            reuse=reuse,
            checkpoint_gib=checkpoint_gib,
        ),
        schedule=ScheduleConfig(
            max_seqs=max_seqs,
            max_queue=max_queue,
            queue_timeout_s=queue_timeout,
            admission=admission,
        ),
    )
    server = ServerConfig(
        host=host,
        port=port,
        api_keys=read_keys(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        model_id=model_id or paths.model_id or SERVER.model_id,
        aliases=tuple(alias or ()),
        any_model=any_model,
        default_effort=default_effort,
        thinking_off=thinking_off,
        tool_guard=tool_guard,
        max_n=max_n,
        max_body_mib=max_body_mib,
        heartbeat_s=heartbeat,
        drain_timeout_s=drain_timeout,
        sampling=SamplingDefaults(temperature=temperature, top_p=top_p),
    )
    _run(engine, server)


def _only_config(ctx: typer.Context) -> None:
    """Refuse settings beside a file of settings, so that the file says everything."""
    given = [
        name
        for name in ctx.params
        if name != "config" and getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} beside --config: a file holds every setting; put it there"
        )


def _run(engine: Any, server: ServerConfig) -> None:
    from twining.serving.server import run_server

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    where = f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"

    def on_bound() -> None:
        for line in describe(engine) + describe(server):
            note(line)
        note(f"loading {engine.model_dir}; {where} answers 503 until it is ready")

    def on_ready(ready: EngineReady) -> None:
        note(
            f"ready on {where}/v1 after {ready.load_s:.1f} s: model {server.model_id}, context"
            f" {ready.max_seq_len} tokens, {ready.max_seqs} sequences, drafter {ready.drafter}"
            f" with {ready.num_draft_tokens} tokens"
        )

    run_server(engine, server, on_bound=on_bound, on_ready=on_ready)


def describe(config: Any, prefix: str = "") -> list[str]:
    """Effective settings, one `name = value` a line; keys only by their number."""
    lines: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            lines += describe(value, f"{prefix}{item.name}.")
        elif item.name == "api_keys":
            lines.append(f"{prefix}api_keys = {len(value)} set")
        else:
            lines.append(f"{prefix}{item.name} = {value}")
    return lines
