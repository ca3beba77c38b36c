"""The command line: results, one-line errors, exit status, lazy imports."""

import io
import json
import subprocess
import sys

import pytest

from twining import cli
from twining.cli.chat import _printable
from twining.cli.convert import parse_rule
from twining.cli.serve import describe
from twining.config import EngineConfig, ServerConfig
from twining.errors import ConfigError


def run(capsys, *args):
    """(status, stdout, stderr) of one command line."""
    status = cli.run(list(args))
    done = capsys.readouterr()
    return status, done.out, done.err


def test_help_and_version_start_no_torch():
    script = (
        "import sys\nfrom twining import cli\n"
        "assert cli.run(['--help']) == 0 and cli.run(['--version']) == 0\n"
        "assert cli.run(['serve', '--help']) == 0\n"
        "heavy = [m for m in ('torch', 'tokenizers', 'starlette') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout and "convert" in done.stdout


def test_serving_modules_start_no_torch():
    script = "import sys, twining.serving.server\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


BAD = [
    (["serve", "/no/such/folder"], "is not a folder"),
    (["serve", ".", "--port", "70000"], "port=70000"),
    (["serve", ".", "--num-draft-tokens", "16"], "num_draft_tokens=16"),
    (["serve", ".", "--partition", "5,3"], "partition='5,3' names 2 stages, but stages=1"),
    (["serve", ".", "--max-seqs", "0"], "max_seqs=0"),
    (["serve", ".", "--max-seq-len", "-1"], "max_seq_len=-1"),
    (["serve", ".", "--threads", "3"], "threads=3"),
    (["serve", ".", "--temperature", "3"], "temperature=3"),
    (["serve", ".", "--top-p", "0"], "top_p=0"),
    (["serve", ".", "--drafter", "dflash2"], "--drafter-dir"),
    (["serve", ".", "--api-key-file", "/no/such/file"], "/no/such/file"),
    (["serve", ".", "--host", "no such host"], "cannot be resolved"),
    (["generate", "--model", "/no/such/folder", "--prompt", "x"], "is not a folder"),
    (["generate", "--model", "."], "exactly one of --prompt and --messages"),
    (["generate", "--model", ".", "--prompt", "x", "--messages", "y"], "exactly one"),
    (["generate", "--model", ".", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    (["generate", "--model", ".", "--prompt", "x", "--max-tokens", "-1"], "max_tokens=-1"),
    (["generate", "--model", ".", "--prompt", "x", "--seed", str(2**63)], "seed="),
    (["generate", "--model", ".", "--messages", "/no/such/file"], "/no/such/file"),
    (["chat", "--model", "/no/such/folder"], "is not a folder"),
    (["convert", "/no/such/folder", "out"], "is not a folder"),
    (["convert", ".", "out", "--bits-for", "x"], "PATTERN=BITS"),
    (["demo", "score", "--model", "/no/such/folder"], "is not a folder"),
    (["demo", "score", "--num-per-task", "0"], "at least 1"),
    (["demo", "score", "--num-accepted", "-1"], "--num-accepted -1"),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=lambda v: " ".join(v)[:60])
def test_user_errors_are_one_line(capsys, args, words):
    status, out, err = run(capsys, *args)
    assert status == 2 and out == ""
    assert err.startswith("twining: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("args", [["bogus"], ["serve", "--port", "x"], ["generate", "--bogus"]])
def test_usage_errors(capsys, args):
    status, out, err = run(capsys, *args)
    assert status == 2 and out == "" and "Traceback" not in err


def test_settings_keep_their_whole_names_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "config", "show")
    assert status == 0
    assert "draft.num_draft_tokens" in out and "cache.latent_format" in out and "…" not in out


def test_messages_files(capsys, tmp_path):
    for number, (text, words) in enumerate(
        [("{", "not valid JSON"), ("[]", "no list of messages"), ('{"tools": 5}', "no list")]
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        status, _, err = run(capsys, "generate", "--model", ".", "--messages", str(path))
        assert status == 2 and words in err


def test_key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# comment\n\n  one \ntwo\n")
    assert cli.serve.__module__ == "twining.cli.serve"
    from twining.cli.options import read_keys

    assert read_keys(path) == ("one", "two")
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(path)


def test_printed_settings_hide_keys(tmp_path):
    lines = describe(ServerConfig(api_keys=("very-secret",)))
    assert "api_keys = 1 set" in lines and "very-secret" not in "\n".join(lines)
    assert "draft.num_draft_tokens = 7" in describe(EngineConfig(model_dir=tmp_path))


def test_bits_rules():
    assert parse_rule("*.a=b.down=2.5") == ("*.a=b.down", 2.5)
    for text in ("x", "=4", "x=", "x=-1", "x=abc"):
        with pytest.raises(ConfigError):
            parse_rule(text)


def test_terminal_text_has_no_control_characters():
    assert _printable("a\x1b[2Jb\n\tc\u200b\x07") == "a[2Jb\n\tc"


# ------------------------------------------------------------------------------- with a model


def generate(capsys, model, *args):
    command = ["generate", "--model", str(model), "--threads", "1", "--json", *args]
    status, out, err = run(capsys, *command)
    assert status == 0, err
    return json.loads(out)


def test_generate_json(capsys, tiny_model, tmp_path):
    seen = []
    for drafter, count in (("none", 0), ("ngram", 3), ("mtp", 2)):
        args = ["--prompt", "hello", "--max-tokens", "12", "--seed", "5"]
        report = generate(
            capsys, tiny_model, *args, "--drafter", drafter, "--num-draft-tokens", str(count)
        )
        assert {"token_ids", "text", "finish_reason", "timings", "accepted_length"} <= set(report)
        assert len(report["token_ids"]) <= 12 and report["drafter"] == drafter
        assert report["accepted_length"] >= 1
        seen.append((report["token_ids"], report["reasoning"], report["text"]))
    assert seen[0] == seen[1] == seen[2], "the drafter changed the output"

    path = tmp_path / "m.json"
    path.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    args = ["--messages", str(path), "--max-tokens", "12", "--seed", "5", "--drafter", "none"]
    assert generate(capsys, tiny_model, *args)["token_ids"] == seen[0][0]
    raw = generate(capsys, tiny_model, "--raw", "--prompt", "a b", "--max-tokens", "4")
    assert raw["reasoning"] == "" and raw["prompt_tokens"] < 5


def test_prompt_longer_than_the_context(capsys, tiny_model):
    args = ["--max-seq-len", "256", "--prompt", "word " * 400, "--threads", "1"]
    status, _, err = run(capsys, "generate", "--model", str(tiny_model), *args)
    assert status == 2 and "max_seq_len is 256" in err and err.count("\n") == 1


def test_chat_in_a_terminal(capsys, monkeypatch, tiny_model):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/help\n/reset\n\nagain\n/quit\nunread"))
    args = ["--max-tokens", "6", "--seed", "1", "--threads", "1", "--drafter", "none"]
    status, _, err = run(capsys, "chat", "--model", str(tiny_model), *args)
    assert status == 0
    assert "new conversation" in err and err.count("/reset starts anew") == 2


def test_damaged_models(capsys, tiny_model, tmp_path):
    """Each kind of damage is one line that names the file or tensor."""
    config = json.loads((tiny_model / "config.json").read_text())
    weights = (tiny_model / "model.safetensors").read_bytes()
    cases = {
        "no config": ({}, None, weights),
        "config is not JSON": ({}, "{", weights),
        "unknown architecture": (
            {},
            json.dumps({**config, "architectures": ["Other"], "model_type": "other"}),
            weights,
        ),
        "truncated weights": ({}, json.dumps(config), weights[:-1000]),
        "header cut": ({}, json.dumps(config), weights[:100]),
        "no weights": ({}, json.dumps(config), None),
    }
    for name, (_, text, data) in cases.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
        if text is not None:
            (folder / "config.json").write_text(text)
        if data is not None:
            (folder / "model.safetensors").write_bytes(data)
        status, out, err = run(capsys, "generate", "--model", str(folder), "--prompt", "x")
        assert status == 2 and out == "", name
        lines = [line for line in err.splitlines() if line.startswith("twining: ")]
        assert len(lines) == 1 and "Traceback" not in err, (name, err)


def test_convert_one_module(capsys, tiny_model, tmp_path):
    plain = ["--bits", "16", "--head-bits", "16", "--mtp-bits", "16", "--vision-bits", "16"]
    plain += ["--threads", "1"]
    rule = ["--bits-for", "*layers.0.*o_proj=2", "--json"]
    out_dir = tmp_path / "out"
    status, out, err = run(capsys, "convert", str(tiny_model), str(out_dir), *plain, *rule)
    assert status == 0, err
    report = json.loads(out)
    assert [m["bits"] for m in report["modules"]] == [2]
    assert 0 < report["modules"][0]["mse"] < 0.2
    status, _, err = run(capsys, "convert", str(tiny_model), str(out_dir), *plain, *rule)
    assert status == 2 and "already holds" in err
    result = generate(capsys, out_dir, "--prompt", "x", "--max-tokens", "2", "--drafter", "none")
    assert len(result["token_ids"]) <= 2
