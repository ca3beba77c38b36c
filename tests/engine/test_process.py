"""The engine process: start, streams, cancel, death, stall, restart, drain, and death of the
parent.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.engine import fake_loop
from twining.config import EngineConfig
from twining.engine.process import EngineClient, EngineState
from twining.engine.request import Delta, Request, SamplingParams
from twining.errors import CheckpointError, ConfigError, EngineError

FACTORY = f"{Path(fake_loop.__file__)}:make_loop"
REPO = Path(__file__).resolve().parents[2]


def client(name: str = "ok", **options: float) -> EngineClient:
    options.setdefault("first_pause_s", 0.05)
    return EngineClient(EngineConfig(model_dir=Path(name)), factory=FACTORY, **options)


def request(name: str, first: int = 5, max_tokens: int = 3) -> Request:
    return Request(id=name, prompt_ids=[first], sampling=SamplingParams(), max_tokens=max_tokens)


async def collect(stream) -> list[Delta]:
    return [delta async for delta in stream]


def tokens(deltas: list[Delta]) -> list[int]:
    return [i for d in deltas for i in d.token_ids]


async def until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_streams_of_several_requests():
    async def run():
        engine = client()
        ready = await engine.start()
        assert ready.max_seqs == 4 and engine.healthy and engine.state is EngineState.READY
        streams = [engine.submit(request(f"r{n}", 10 * n, 5)) for n in range(6)]
        results = await asyncio.gather(*(collect(s) for s in streams))
        for n, deltas in enumerate(results):
            assert tokens(deltas) == [10 * n + i for i in range(5)]
            assert deltas[0].kind == "admitted" and deltas[-1].finish_reason == "length"
        assert engine.num_open == 0
        pid = engine.pid
        await engine.close()
        assert gone(pid) and engine.state is EngineState.STOPPED and not engine.healthy

    asyncio.run(run())


def test_cancel_and_abandoned_iterator():
    async def run():
        engine = client()
        await engine.start()
        stream = engine.submit(request("a", 0, 10**6))
        async for delta in stream:
            if delta.token_ids:
                engine.cancel("a")
            if delta.kind == "finished":
                assert delta.finish_reason == "cancelled"
        engine.cancel("a")  # over: nothing happens
        stream = engine.submit(request("b", 0, 10**6))
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.num_open == 0)
        await engine.close()

    asyncio.run(run())


def test_duplicate_id_is_refused():
    async def run():
        engine = client()
        await engine.start()
        first = engine.submit(request("a", 0, 50))
        (error,) = await collect(engine.submit(request("a")))
        assert error.code == "invalid_value"
        assert len(tokens(await collect(first))) == 50
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("bad_config", ConfigError, "max_pages=1 is too few; use 9"),
        ("bad_checkpoint", CheckpointError, "x.safetensors is truncated"),
        ("bug", EngineError, "ValueError: two lines"),
        ("die", EngineError, "ended while it loaded"),
    ],
)
def test_failed_start_is_one_line(name, kind, words):
    async def run():
        engine = client(name)
        with pytest.raises(kind, match=words) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)
        assert not engine.healthy and engine.state is EngineState.FAILED
        (error,) = await collect(engine.submit(request("a")))
        assert error.code == "engine_failed"
        await engine.close()

    asyncio.run(run())


def test_factory_that_does_not_exist():
    async def run():
        engine = EngineClient(EngineConfig(model_dir=Path("x")), factory="twining.nothing:make")
        with pytest.raises(EngineError, match=r"twining\.nothing:make"):
            await engine.start()
        await engine.close()

    asyncio.run(run())


def test_refused_before_and_while_loading_and_after_close():
    async def run():
        engine = client("slow")
        (error,) = await collect(engine.submit(request("a")))
        assert error.code == "shutting_down"
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.state is EngineState.LOADING and engine.pid)
        (error,) = await collect(engine.submit(request("a")))
        assert error.code == "model_loading"
        await engine.close()
        with pytest.raises(EngineError, match="closed while it loaded"):
            await start
        (error,) = await collect(engine.submit(request("a")))
        assert error.code == "shutting_down"

    asyncio.run(run())


@pytest.mark.parametrize("how", ["kill", fake_loop.DIE, fake_loop.RAISE])
def test_death_ends_requests_and_restarts(how):
    async def run():
        engine = client()
        await engine.start()
        for _ in range(2):
            pid = engine.pid
            streams = [engine.submit(request(f"r{n}", n, 10**6)) for n in range(3)]
            results = [asyncio.create_task(collect(s)) for s in streams]
            if how == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                results.append(asyncio.create_task(collect(engine.submit(request("x", how)))))
            for result in results:
                last = (await asyncio.wait_for(result, 10))[-1]
                assert (last.kind, last.code) == ("error", "engine_failed")
                assert last.finish_reason == "error"
            assert not engine.healthy
            await until(lambda: engine.healthy)
            assert engine.pid != pid
            assert tokens(await collect(engine.submit(request("again", 7)))) == [7, 8, 9]
        assert engine.num_restarts == 2
        await engine.close()

    asyncio.run(run())


def test_stall_is_noticed_but_long_prefill_is_not():
    async def run():
        engine = client(stall_timeout_s=0.8)
        await engine.start()
        slow = await collect(engine.submit(request("slow", fake_loop.SLOW, 1)))
        assert len(tokens(slow)) == 1 and engine.num_restarts == 0
        (*_, last) = await collect(engine.submit(request("hang", fake_loop.HANG)))
        assert last.code == "engine_failed" and "no sign of life" in engine.failure
        await until(lambda: engine.healthy)
        await engine.close()

    asyncio.run(run())


def test_idle_engine_keeps_its_heartbeat():
    async def run():
        engine = client(stall_timeout_s=2.0)
        await engine.start()
        await asyncio.sleep(3.0)
        assert engine.healthy and engine.num_restarts == 0
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("drain_s", [30.0, 0.1])
def test_close_drains(drain_s):
    async def run():
        engine = client()
        await engine.start()
        short = asyncio.create_task(collect(engine.submit(request("a", 0, 300))))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(engine.close(drain_s))
        await asyncio.sleep(0)
        (refused,) = await collect(engine.submit(request("b")))
        assert refused.code == "shutting_down"
        last = (await short)[-1]
        assert (last.finish_reason, last.code) == (
            ("length", "") if drain_s > 1 else ("error", "shutting_down")
        )
        await closing
        assert engine.pid is None

    asyncio.run(run())


def test_close_twice_at_once_and_again():
    async def run():
        engine = client()
        await engine.start()
        pending = asyncio.create_task(collect(engine.submit(request("a", 0, 10**6))))
        await asyncio.sleep(0.05)
        await asyncio.gather(engine.close(0.2), engine.close(0.0))
        assert (await pending)[-1].code == "shutting_down"
        await engine.close()
        assert engine.state is EngineState.STOPPED

    asyncio.run(run())


def test_child_ignores_terminal_signals_and_dies_with_its_parent(tmp_path):
    script = f"""
    import asyncio, sys
    from pathlib import Path
    from twining.config import EngineConfig
    from twining.engine.process import EngineClient

    async def run():
        engine = EngineClient(EngineConfig(model_dir=Path("ok")), factory={FACTORY!r})
        await engine.start()
        print(engine.pid, flush=True)
        await asyncio.sleep(3600)

    asyncio.run(run())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.3)
    assert not gone(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < end, "the engine process outlived its parent"
        time.sleep(0.02)


def test_api_side_imports_no_torch():
    code = "import twining.engine.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0
