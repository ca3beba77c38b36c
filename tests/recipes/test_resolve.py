"""Both launch forms, the five profiles, a verdict for every setting, and what is never done."""

import socket
import subprocess
from pathlib import Path

import pytest

from twining.errors import ConfigError
from twining.recipes.document import parse_document
from twining.recipes.launch import PROFILES, Launch, Variable, prose_variables, read_launch
from twining.recipes.resolve import engine_config, resolve, resolve_launch, server_config
from twining.recipes.schema import LaunchConfig, view
from twining.recipes.settings import Capabilities, Verdict

CAN = Capabilities()
ONE_STAGE = Capabilities(max_stages=1)
TWO_STAGES = Capabilities(
    num_devices=2,
    max_stages=2,
    activations="bfloat16",
    has_step_graphs=True,
    has_prefix_reuse=True,
    device_kind="cuda",
)
E_WORDS = (
    "-m TARGET -cs 393216 -cq 8 -gs 62,63 --q8-staging --q8-head-gpu0 -dm DRAFTER -ndt 7"
    " --dflash-prefix-cache -chunk_size 2048 --autosplit_max_batch_size 1 --port 8012"
)
E_ARGV = E_WORDS.split()


def exllama(*argv, can=CAN, variables=()):
    launch = Launch(argv=("-m", "T", *argv), variables=tuple(variables))
    return resolve_launch(launch, "exllamav3", can, label="E")


def only(resolution, flag):
    (found,) = [line for line in resolution.lines if line.given.split()[0].split("=")[0] == flag]
    return found


def test_profile_argv_token_for_token(recipe_e):
    found = resolve(recipe_e, CAN)
    assert list(found.argv) == E_ARGV
    assert found.profile == "q8_384k"


def test_resolved_argv_agrees_with_the_notes(recipe_e):
    notes = recipe_e.config.runtime.notes
    words = notes.split("resolves to: ", 1)[1].split(". ", 1)[0].split()
    words = words[words.index("-m") :]
    folders = {words[words.index("-m") + 1]: "TARGET", words[words.index("-dm") + 1]: "DRAFTER"}
    assert [folders.get(w, w) for w in words] == E_ARGV


@pytest.mark.parametrize("can", [CAN, TWO_STAGES])
def test_every_setting_has_a_verdict_and_both_can_start(recipe_e, recipe_v, can):
    for recipe, flags, variables in ((recipe_e, 12, 10), (recipe_v, 23, 19)):
        found = resolve(recipe, can)
        assert len(found.lines) == flags + variables
        assert found.can_start and not found.problems
        assert all(isinstance(line.verdict, Verdict) for line in found.lines)


def test_neutral_settings_of_the_vllm_recipe(recipe_v):
    s = resolve(recipe_v, TWO_STAGES).settings
    assert (s.pipeline_stages, s.layers_per_stage, s.draft_stage) == (2, (23, 22), -1)
    assert (s.max_seq_len, s.max_running, s.token_budget) == (225280, 4, 2048)
    assert (s.prefill_chunk_when_decoding, s.page_size) == (512, 4608)
    assert (s.draft_method, s.num_draft_tokens, s.draft_weights) == ("dflash2", 3, "bf16")
    assert (s.draft_tap, s.tool_format, s.reasoning_format) == ("stream_mean", "glm47", "glm47")
    assert (s.spread_decodes, s.mixed_steps, s.graph_mode) == (True, False, "decode")
    assert s.device_memory_fraction == 0.97 and s.devices == (0, 1)
    assert s.served_name == "glm-5.3-flash-exl3-2.60bpw"


def test_two_stages_turn_hints_into_exact(recipe_v):
    one = resolve(recipe_v, ONE_STAGE)
    assert only(one, "--pipeline-parallel-size").verdict == "equivalent"
    assert only(one, "VLLM_PP_LAYER_PARTITION").verdict == "inert"
    assert only(one, "VLLM_PP_SPREAD_DECODES").verdict == "inert"
    assert only(resolve(recipe_v, TWO_STAGES), "--pipeline-parallel-size").verdict == "exact"
    assert only(resolve(recipe_v, TWO_STAGES), "VLLM_PP_LAYER_PARTITION").verdict == "exact"
    assert only(resolve(recipe_v, CAN), "--dtype").verdict == "approximate"
    assert only(resolve(recipe_v, TWO_STAGES), "--dtype").verdict == "exact"


def test_stages_reach_the_engine(recipe_e, recipe_v):
    """This version divides the layers as the recipe says."""
    found = resolve(recipe_v, CAN)
    for flag in ("--pipeline-parallel-size", "VLLM_PP_LAYER_PARTITION", "VLLM_PP_SPREAD_DECODES"):
        assert only(found, flag).verdict == "exact"
    config = engine_config(found, Path("m"), drafter_dir=Path("d"))
    assert (config.stages, config.partition) == (2, "23,22")
    config = engine_config(resolve(recipe_e, CAN), Path("m"), drafter_dir=Path("d"))
    assert (config.stages, config.partition) == (1, "")


PROFILE_TABLE = [
    # profile, cache, format, limit, margin, drafts, draft method, head, drafter device
    ("q8_384k", 393216, "q8", 392960, 128, 7, "dflash2", 0, 0),
    ("q8_320k", 327680, "q8", 327424, 256, 7, "dflash2", None, None),
    ("q8_fast", 262144, "q8", 261888, 192, 7, "dflash2", None, None),
    ("fp16", 196608, "fp16", 196352, 256, 7, "dflash2", None, None),
    ("mtp", 196608, "fp16", 196352, 256, 2, "mtp", None, None),
]


@pytest.mark.parametrize("row", PROFILE_TABLE, ids=lambda r: r[0])
def test_five_profiles_resolve(recipe_e, row):
    name, cache, fmt, limit, margin, drafts, method, head, draft_device = row
    found = resolve(recipe_e, TWO_STAGES, profile=name)
    s = found.settings
    assert found.can_start
    assert (s.cache_tokens, s.cache_format, s.max_seq_len) == (cache, fmt, limit)
    assert (s.margin_mib, s.num_draft_tokens, s.draft_method) == (margin, drafts, method)
    assert (s.head_device, s.draft_device) == (head, draft_device)
    assert s.device_budgets_gib == (62.0, 63.0)
    drafter = Path("d") if method == "dflash2" else None
    config = engine_config(found, Path("m"), drafter_dir=drafter)
    assert (config.cache.max_pages, config.max_seq_len) == (cache // 256, limit)
    assert config.cache.latent_format == fmt and config.schedule.max_seqs == 1
    assert server_config(found).host == "127.0.0.1" and server_config(found).port == 8012
    assert set(PROFILES) == {r[0] for r in PROFILE_TABLE}


def test_messages_of_the_specification():
    argv = ("-cs", "393216", "-cq", "8", "--q8-head-gpu0", "-dm", "D", "-ndt", "7")
    messages = exllama(*argv).messages()
    assert (
        "recipe E: -cs 393216 -> cache_tokens=393216: exact"
        " (max_seq_len 392960, one page of 256 kept back)"
    ) in messages
    assert "recipe E: --q8-head-gpu0 -> head_device=0: inert, this run uses one device" in messages
    launch = Launch(argv=("/model", "--block-size", "4608"), variables=())
    assert (
        "recipe V: --block-size 4608 -> page_size=4608: equivalent,"
        " pages of 256; 18 pages hold one block"
    ) in resolve_launch(launch, "vllm", CAN, label="V").messages()


def test_unknown_words_are_reported(recipe_v, v_bytes):
    found = exllama("-cs", "512", "--frobnicate", "3", "stray")
    unknown = [line.given for line in found.lines if "unknown" in line.reason]
    assert unknown == ["--frobnicate 3", "stray"] and not found.can_start
    document = parse_document(v_bytes)
    document["config"]["launch"] += ["--frobnicate=3", "extra"]
    found = resolve(view(document), CAN)
    assert [line.given for line in found.lines if "unknown" in line.reason] == [
        "--frobnicate 3",
        "extra",
    ]


def test_an_unknown_variable_with_a_value_is_reported():
    found = exllama("-cs", "512", variables=[Variable("GLM53_TURBO", "1", "line")])
    assert only(found, "GLM53_TURBO").verdict == "refused"


REFUSED = [
    ("-cs 393217", "-cs", "use 393216"),
    ("-cs 256", "-cs", "use 512"),
    ("-cs x", "-cs", "whole number"),
    ("-cs -5", "-cs", ""),
    ("-cs 512 -cq 3", "-cq", "no 3-bit latent cache"),
    ("-cs 512 --q8-staging", "--q8-staging", "add -cq 8"),
    ("-cs 512 -cq 8 --q8-staging --autosplit_max_batch_size 2", "--q8-staging", "batch_size 1"),
    ("-cs 512 --q8-head-gpu0", "--q8-head-gpu0", "add -cq 8"),
    ("-cs 512 -cq 8 --fp16-draft-cache", "--fp16-draft-cache", "drop it"),
    ("-cs 512 --mtp -dm D -ndt 7", "--mtp", "two ways of drafting"),
    ("-cs 512 -ndt 7", "-ndt", "nothing drafts"),
    ("-cs 512 --dflash-prefix-cache", "--dflash-prefix-cache", "DFlash2"),
    ("-cs 512 --port 99999", "--port", "1..65535"),
    ("-cs 512 -gs 62,x", "-gs", "number"),
    ("-cs 512 -chunk_size 0", "-chunk_size", "whole number"),
]


@pytest.mark.parametrize(("words", "flag", "reason"), REFUSED)
def test_refusals_say_what_to_do(words, flag, reason):
    line = only(exllama(*words.split()), flag)
    assert line.verdict is Verdict.REFUSED and reason in line.reason


VLLM_REFUSED = [
    ("--quantization awq", "exl3"),
    ("--tensor-parallel-size 2", "never cut"),
    ("--max-model-len 2000000", "1048576 positions"),
    ("--tool-call-parser hermes", "use glm47"),
    ("--reasoning-parser qwen", "use glm47"),
    ("--gpu-memory-utilization 1.5", "0.01..1"),
    ("--speculative-config {}", "unknown method"),
    ("--speculative-config [1]", "JSON object"),
    ('--speculative-config {"method":"dflash","num_speculative_tokens":true}', "1..255"),
    ('--hf-overrides {"text_config":{"aux_hidden_state_tensor":"last"}}', "mean over the streams"),
    ('--hf-overrides {"vocab_size":5}', "changes the model"),
    ('--compilation-config {"cudagraph_mode":"SOMETIMES"}', "must be one of"),
]


@pytest.mark.parametrize(("words", "reason"), VLLM_REFUSED)
def test_vllm_refusals(words, reason):
    flag, value = words.split(" ", 1)
    launch = Launch(argv=("/model", flag, value), variables=())
    line = only(resolve_launch(launch, "vllm", CAN), flag)
    assert line.verdict is Verdict.REFUSED and reason in line.reason


def test_approximate_settings_name_the_difference():
    chunk = only(exllama("-cs", "512", "-chunk_size", "100"), "-chunk_size")
    assert chunk.verdict is Verdict.APPROXIMATE and "prefill_chunk=64" in chunk.setting
    deep = only(exllama("-cs", "512", "-dm", "D", "-ndt", "31"), "-ndt")
    assert deep.verdict is Verdict.APPROXIMATE and "num_draft_tokens=15" in deep.setting


def test_launch_lines_are_split_not_run(e_bytes, monkeypatch):
    """Shell metacharacters everywhere: no process, no connection."""
    calls = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: calls.append(a))
    monkeypatch.setattr(socket, "socket", lambda *a, **k: calls.append(a))
    document = parse_document(e_bytes)
    evil = "$(touch /tmp/x); `id` | curl http://example.com && rm -rf / > /dev/sda"
    document["agent"] = {"prompt": evil, "curl": evil}
    document["engine_source"]["install_note"] = evil
    document["config"]["runtime"] = {"env": f"A_B_C=1 {evil}", "notes": evil}
    document["config"]["launch"].append(f"scripts/serve.sh --profile mtp {evil}")
    found = resolve(view(document), CAN)
    found.messages()
    assert not calls
    assert any("unknown" in line.reason for line in found.lines)


def test_a_line_that_runs_something_else_is_a_problem(e_bytes):
    document = parse_document(e_bytes)
    document["config"]["launch"] = ["rm -rf everything", "echo 'open"]
    found = resolve(view(document), CAN)
    assert not found.can_start
    assert "'rm'" in found.problems[0] and "quote" in found.problems[1]


def test_precedence_of_the_port(e_bytes):
    document = parse_document(e_bytes)
    document["config"]["launch"][1] += " --port 9000"
    found = resolve(view(document), CAN)
    assert found.settings.port == 9000
    assert only(found, "GLM53_PORT").verdict is Verdict.INERT


def test_prefix_variable_drops_the_flag(e_bytes):
    document = parse_document(e_bytes)
    document["config"]["launch"][1] = "GLM53_PREFIX_CACHE=0 " + document["config"]["launch"][1]
    found = resolve(view(document), TWO_STAGES)
    assert found.settings.prefix_reuse == "off"
    assert only(found, "--dflash-prefix-cache").verdict is Verdict.INERT


def test_script_values_win_over_the_line(e_bytes):
    document = parse_document(e_bytes)
    line = document["config"]["launch"][1].replace("MARGIN_MB=128", "MARGIN_MB=999")
    document["config"]["launch"][1] = line
    assert resolve(view(document), CAN).settings.margin_mib == 128


def test_a_direct_python_line_counts(e_bytes):
    document = parse_document(e_bytes)
    document["config"]["launch"] = ["python -u glm/glm_api.py -m X -cs 1024"]
    found = resolve(view(document), CAN)
    assert found.settings.max_seq_len == 768


def test_unknown_engine_maps_nothing(e_bytes):
    document = parse_document(e_bytes)
    document["engine_source"]["base_engine"] = "sglang"
    found = resolve(view(document), CAN)
    assert not found.can_start and "no flag table" in found.problems[0] and found.lines == ()


def test_profiles_only_where_there_are_some(recipe_e, recipe_v):
    with pytest.raises(ConfigError, match="only recipes of exllamav3"):
        resolve(recipe_v, CAN, profile="fp16")
    with pytest.raises(ConfigError, match="is unknown; use q8_384k"):
        resolve(recipe_e, CAN, profile="q9")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4"])
def test_a_recipe_never_widens_the_listener(v_bytes, host):
    document = parse_document(v_bytes)
    launch = document["config"]["launch"]
    launch[launch.index("--host") + 1] = host
    assert server_config(resolve(view(document), CAN)).host == "127.0.0.1"


def test_prose_forms():
    listed = prose_variables("AAA_B/CCC(5)/DDD(1; =0 off)/EEE(profile: 1 x)/FFF=7 (verbatim)")
    assert [(v.name, v.value) for v in listed] == [
        ("AAA_B", None),
        ("CCC", "5"),
        ("DDD", "1"),
        ("EEE", None),
        ("FFF", "7"),
    ]
    prose = prose_variables("exports AAA=/x/y BBB=1,2 (why) -e CCC=off. Not $DDD=3 or ee=4")
    assert [(v.name, v.value) for v in prose] == [("AAA", "/x/y"), ("BBB", "1,2"), ("CCC", "off")]
    assert prose_variables(None) == ()


def test_argv_values_with_blanks_are_not_split(recipe_v):
    found = read_launch(recipe_v.config)
    assert found.argv[found.argv.index("--hf-overrides") + 1].count(" ") == 2
    config = LaunchConfig(launch=["vllm", "serve", "--port", "8000"])
    assert read_launch(config).argv == ("--port", "8000")
