"""`twining serve` as a process: start, answer, port in use, damaged model, drain on a signal."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

SCRIPT = "from twining.cli import main; main()"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(model, port, *args):
    command = [sys.executable, "-c", SCRIPT, "serve", str(model), "--port", str(port)]
    return subprocess.Popen(
        [*command, "--threads", "1", "--max-seqs", "2", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_ready(process, url, limit_s=90):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        try:
            reply = httpx.get(url + "/health", timeout=5)
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if reply.status_code == 200:
            return
        assert reply.json()["error"]["code"] == "model_loading"
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")


@pytest.fixture(scope="module")
def running(tiny_model):
    port = free_port()
    process = start(
        tiny_model, port, "--num-draft-tokens", "3", "--stages", "2", "--adaptive-draft"
    )
    try:
        wait_ready(process, f"http://127.0.0.1:{port}")
        yield process, port
    finally:
        process.kill()
        process.communicate()


def test_the_real_engine_answers(running):
    _, port = running
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
    whole = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60).json()
    again = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60).json()
    ids = whole["choices"][0]["token_ids"]
    assert 1 <= len(ids) <= 8 and ids == again["choices"][0]["token_ids"]
    assert whole["usage"]["completion_tokens"] == len(ids)
    assert whole["timings"]["ttft_ms"] > 0 and "draft_steps" in whole["timings"]
    streamed = httpx.post(url, json={**body, "stream": True}, timeout=60).text
    chunks = [json.loads(x[6:]) for x in streamed.split("\n") if x.startswith("data: {")]
    deltas = [c["choices"][0]["delta"] for c in chunks]
    for name in ("content", "reasoning_content"):
        joined = "".join(d.get(name) or "" for d in deltas)
        assert joined == (whole["choices"][0]["message"][name] or "")


def test_a_gone_client_frees_its_slot(running):
    _, port = running
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{port}"
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
        assert httpx.get(url + "/load").json()["server_load"] <= 1
    end = time.monotonic() + 10
    while httpx.get(url + "/load").json()["server_load"]:
        assert time.monotonic() < end, "the request still runs"
        time.sleep(0.1)


def command(*argv):
    words = [sys.executable, "-m", "twining", "serve", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_a_file_of_settings(running, tiny_model, tmp_path):
    """The file's port is the one that is tried; options beside it, and unknown keys, are errors."""
    _, port = running
    path = tmp_path / "settings.toml"
    path.write_text(f'model_dir = "{tiny_model}"\nstages = 2\n[server]\nport = {port}\n')
    found = command("--config", str(path))
    assert found.returncode == 2 and f"port {port} on 127.0.0.1 is in use" in found.stderr
    found = command("--config", str(path), "--max-seqs", "2")
    assert found.returncode == 2 and found.stderr.startswith("twining: max_seqs beside --config")
    found = command("demo", "--config", str(path))
    assert found.returncode == 2 and found.stderr.startswith("twining: model beside --config")
    path.write_text('model_dir = "m"\nstagess = 2\n')
    found = command("--config", str(path))
    assert found.returncode == 2 and "did you mean stages" in found.stderr


def test_port_in_use(running, tiny_model):
    _, port = running
    other = start(tiny_model, port)
    out, err = other.communicate(timeout=60)
    assert other.returncode == 2 and out == ""
    assert err == (
        f"twining: port {port} on 127.0.0.1 is in use; stop the other server or choose another"
        " --port\n"
    )


def test_a_signal_drains(running):
    """Last test of the module: the running stream is finished, new requests get 503."""
    process, port = running
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    result = {}

    def stream():
        result["text"] = httpx.post(url + "/v1/completions", json=body, timeout=60).text

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    try:
        refused = httpx.post(url + "/v1/completions", json={"prompt": "x"}, timeout=5)
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.status_code == 503
    except httpx.TransportError:
        pass  # the short stream was already done and the server gone
    thread.join(60)
    assert '"finish_reason":"length"' in result["text"]
    assert result["text"].endswith("data: [DONE]\n\n")
    assert process.wait(30) == 0


def test_a_damaged_model_ends_the_start(tiny_model, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    process = start(folder, free_port())
    out, err = process.communicate(timeout=90)
    assert process.returncode == 2 and out == ""
    last = err.splitlines()[-1]
    assert last.startswith("twining: ") and "model.safetensors" in last
    assert "Traceback" not in err
