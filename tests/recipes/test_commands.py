"""The plan, recipe and config commands end to end: text, JSON, exit status, files."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.recipes.conftest import E_SLUG, V_SLUG
from tests.recipes.test_publish import about, results
from twining.cli.config_cmd import config_app
from twining.cli.plan import plan_command
from twining.cli.recipe import recipe_app
from twining.errors import ConfigError, TwiningError
from twining.recipes.document import parse_document
from twining.recipes.schema import view


@pytest.fixture(scope="module")
def app():
    tree = typer.Typer()
    tree.command("plan")(plan_command)
    tree.add_typer(recipe_app(), name="recipe")
    tree.add_typer(config_app(), name="config")
    return tree


@pytest.fixture
def call(app, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv, status=0):
        found = CliRunner().invoke(app, [str(a) for a in argv])
        if found.exception and not isinstance(found.exception, SystemExit):
            raise found.exception
        assert found.exit_code == status, found.output
        return found.output

    return run


@pytest.fixture
def e_path(recipes_folder):
    return recipes_folder / f"{E_SLUG}.json"


@pytest.fixture
def v_path(recipes_folder):
    return recipes_folder / f"{V_SLUG}.json"


def test_plan_of_a_recipe_shows_both_engines(call, e_path):
    text = call("plan", e_path)
    assert text.startswith("fits: 392960 tokens at q8")
    assert "128.00 GiB in all; fit is decided per device" in text
    assert "largest cache is 425472 tokens (4.51 GiB for 393216)" in text
    data = json.loads(call("plan", e_path, "--json"))
    assert data["recipe_engine"] == {
        "tokens": 393216,
        "fits": True,
        "reason": None,
        "largest_tokens": 425472,
        "cache_bytes": 4844421120,
    }
    assert [d["budget_bytes"] >> 30 for d in data["devices"]] == [62, 63]


@pytest.mark.parametrize("tokens", [458752, 524288])
def test_larger_caches_are_refused_by_the_recipes_engine(call, e_path, tmp_path, tokens):
    document = parse_document(e_path.read_bytes())
    document["config"]["launch"][1] += f" -cs {tokens}"
    path = tmp_path / e_path.name
    path.write_text(json.dumps(document))
    data = json.loads(call("plan", path, "--json"))
    assert data["fits"] and not data["recipe_engine"]["fits"]
    assert "transformer layer 44 does not fit on device 1" in data["recipe_engine"]["reason"]


def test_plan_on_other_cards_answers_for_both(call, e_path):
    text = call("plan", e_path, "--devices", "2x80GB")
    assert "On the recipe's own cards and budgets ours fits" in text
    assert "80.00 GiB" in text


def test_plan_options(call, tmp_path):
    million = ("--context", 1048576, "--drafter", "published", "--devices", "2x64GB")
    assert json.loads(call("plan", *million, "--cache", "q8", "--json"))["fits"]
    page = tmp_path / "plan.html"
    text = call("plan", *million, "--cache", "fp16", "--html", page, status=1)
    assert "it would fit if you store latents as q8" in text
    assert "<svg" in page.read_text()
    floors = json.loads(call("plan", "--devices", "2x64GB", "--machine", "h200", "--json"))[
        "floors"
    ]
    assert floors["rows"] == 1 and 2 < floors["memory_ms"] < 3
    split = json.loads(call("plan", "--devices", "2x70GB", "--split", "23,22", "--json"))
    assert [d["layers"] for d in split["devices"]] == [[0, 23], [23, 45]]


def test_plan_of_the_demo_has_its_drafter_and_stages(call):
    text = call("plan", "demo", "--devices", "cpu:4GB", "--stages", "2")
    assert "MiB per device" in text and "drafter ring" in text
    assert "stage 0: layers 0-" in text and "stage 1: layers" in text
    found = ("plan", "demo", "--devices", "cpu:4GB", "--json")
    data = json.loads(call(*found, "--split", "3,5"))
    assert [stage["layers"] for stage in data["stages"]] == [[0, 3], [3, 8]]
    exact = sum(i["bytes"] for i in data["devices"][0]["items"] if not i["is_estimate"])
    parts = [s["weights"] + s["drafter"] + sum(s["planes"].values()) for s in data["stages"]]
    assert sum(parts) == exact
    assert "stages" not in json.loads(call(*found))
    bare = json.loads(call(*found, "--drafter", "none"))
    assert "drafter" not in {item["name"] for item in bare["devices"][0]["items"]}


def test_plan_of_a_folder_a_config_and_headers(call, golden, tmp_path):
    folder = golden / "glm5_next" / "tiny"
    data = json.loads(call("plan", folder, "--json"))
    assert data["weights_from"] == "headers" and data["devices"][0]["kind"] == "cpu"
    data = json.loads(call("plan", folder / "config.json", "--devices", "cpu:8GB", "--json"))
    assert data["weights_from"] == "config"
    raw = (folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
    assert json.loads(call("plan", cut, "--json"))["weights_from"] == "headers"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan", "no/such/model"), "no such folder"),
        (("plan", "--devices", "many"), "not understood"),
        (("plan", "--devices", "2x64GB", "--split", "a,b"), "split="),
        (("plan", "--devices", "2x64GB", "--machine", "abacus"), "unknown"),
        (("plan", "--devices", "2x64GB", "--drafter", "nowhere"), "no folder"),
        (("plan", "--profile", "fp16"), "needs a recipe"),
        (("plan", "--devices", "2x64GB", "--stages", "2"), "cards are stages themselves"),
        (("plan", "demo", "--devices", "cpu:4GB", "--stages", "9"), "use stages=8 or fewer"),
        (("plan", "demo", "--devices", "cpu:4GB", "--stages", "-1"), "stages=-1"),
        (("plan", "demo", "--devices", "cpu:4GB", "--stages", "3", "--split", "4,4"), "stages=3"),
        (("plan", "demo", "--devices", "cpu:4GB", "--split", "4,5"), "the model has 8"),
        (("plan", "--bits", "99"), "outside 1..16"),
        (("plan", "--context", "5000000", "--devices", "64GB"), "1048576 positions"),
        (("recipe", "show", "nothing.json"), "no such file"),
        (("config", "explain", "server.prot"), "did you mean"),
    ],
)
def test_user_errors_are_one_line(call, argv, words):
    with pytest.raises(TwiningError, match=words) as err:
        call(*argv)
    assert "\n" not in str(err.value)


def test_show(call, v_path, e_path):
    text = call("recipe", "show", v_path)
    assert "82.953" in text and "161.143" in text and "1851.540" in text
    assert "11264" not in text and "21504" not in text and "31744" not in text
    assert "AlexBrandes" in text
    text = call("recipe", "show", e_path)
    assert "first token, prefix reused: 650.000 ms at 1024" in text
    assert "decode, filed at the limit: 90.000 tok/s at 393216" in text
    data = json.loads(call("recipe", "show", v_path, "--json"))
    assert len(data["measurements"]) == 28


def test_show_prints_no_control_characters(call, e_path, tmp_path):
    document = parse_document(e_path.read_bytes())
    document["title"] = "a\x1b]0;owned\x07b [red]x[/red]"
    document["credit"][0]["name"] = "\x1b[2J"
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    text = call("recipe", "show", path)
    assert "\x1b" not in text and "[red]x[/red]" in text


def test_check(call, e_path, v_path, tmp_path):
    for path in (e_path, v_path):
        data = json.loads(call("recipe", "check", path, "--json"))
        assert data["is_sound"] and all(f["is_ok"] for f in data["findings"])
    assert "R14" in call("recipe", "check", e_path)
    renamed = tmp_path / "other.json"
    renamed.write_bytes(e_path.read_bytes())
    assert "R1" in call("recipe", "check", renamed, status=1)


def test_check_against_a_local_folder(call, e_path, tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"bits": 4.0}}')
    data = json.loads(call("recipe", "check", e_path, "--model", tmp_path, "--json"))
    broken = {f["rule"] for f in data["findings"] if not f["is_ok"]}
    assert broken == {"R13"} and data["is_sound"]


def test_resolve(call, e_path, v_path, tmp_path):
    data = json.loads(call("recipe", "resolve", e_path, "--json"))
    assert data["can_start"] and data["settings"]["max_seq_len"] == 392960
    assert len(data["lines"]) == 22
    data = json.loads(call("recipe", "resolve", e_path, "--profile", "mtp", "--json"))
    assert data["settings"]["draft_method"] == "mtp"
    assert "approximate" in call("recipe", "resolve", v_path)
    document = parse_document(v_path.read_bytes())
    document["config"]["launch"].append("--frobnicate")
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    assert "--frobnicate" in call("recipe", "resolve", path, status=1)


def test_run_without_files_says_what_to_fetch(call, e_path, v_path):
    with pytest.raises(ConfigError, match="--revision 332ab457b709b7ba30dd9a448be5de03b80a7ac9"):
        call("recipe", "run", e_path)
    with pytest.raises(ConfigError, match="--dtype would differ"):
        call("recipe", "run", v_path)
    with pytest.raises(ConfigError, match="hf download turboderp"):
        call("recipe", "run", v_path, "--allow-approximate")


def small_recipe(e_path, tmp_path, argv):
    document = parse_document(e_path.read_bytes())
    document["config"]["launch"] = [f"python glm_api.py {argv}"]
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    return path


def test_run_plans_before_it_loads(call, e_path, golden, tmp_path):
    model = golden / "glm5_next" / "tiny"
    path = small_recipe(e_path, tmp_path, "-m X -cs 2048 -cq 8 --mtp -ndt 2")
    text = call("recipe", "run", path, "--model", model, "--dry-run")
    assert "cache_tokens=2048: exact (max_seq_len 1792" in text
    assert "fits: 1792 tokens at q8" in text and "dry run" in text
    assert "warning: the document says 3.05 bpw, the checkpoint 16" in text
    path = small_recipe(e_path, tmp_path, "-m X -cs 2048 -cq 3")
    with pytest.raises(ConfigError, match="no 3-bit latent cache"):
        call("recipe", "run", path, "--model", model, "--dry-run")


def test_run_serves_the_resolved_configuration(call, e_path, golden, tmp_path, monkeypatch):
    served = []
    # The package's attribute of that name is the command, not the module.
    module = sys.modules["twining.cli.serve"]
    monkeypatch.setattr(module, "_run", lambda *configs: served.append(configs))
    model = golden / "glm5_next" / "tiny"
    path = small_recipe(e_path, tmp_path, "-m X -cs 2048 -cq 8 --mtp -ndt 2 --port 8099")
    call("recipe", "run", path, "--model", model)
    ((engine, server),) = served
    assert (engine.max_seq_len, engine.cache.max_pages, engine.cache.latent_format) == (
        1792,
        8,
        "q8",
    )
    assert (engine.draft.drafter, engine.draft.num_draft_tokens) == ("mtp", 2)
    assert (server.host, server.port) == ("127.0.0.1", 8099)


def test_publish(call, e_path, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results()))
    (tmp_path / "about.json").write_text(json.dumps(about()))
    argv = (tmp_path / "results.json", "--about", tmp_path / "about.json", "--out", tmp_path)
    call("recipe", "publish", *argv, "--from", e_path)
    written = tmp_path / "glm-5-3-flash-on-a-cpu.json"
    assert len(view(parse_document(written.read_bytes())).points) == 28
    assert "82.953" in call("recipe", "show", written)
    call("recipe", "check", written)
    (tmp_path / "about.json").write_text(json.dumps(about(launch=["twining", "serve", "--odd"])))
    with pytest.raises(ConfigError, match="not written: R9"):
        call("recipe", "publish", *argv)


def test_config_commands(call, tmp_path):
    assert "schedule.max_seqs" in call("config", "show")
    path = tmp_path / "c.toml"
    path.write_text('model_dir = "m"\n[server]\nport = 5\napi_keys = ["secret"]\n')
    text = call("config", "show", "--config", path, "--json")
    data = json.loads(text)
    assert data["server.port"] == 5 and data["server.api_keys"] == "1 set" and "secret" not in text
    assert "in tokens; default 7" in call("config", "explain", "draft.num_draft_tokens")
    assert json.loads(call("config", "explain", "server.port", "--json"))["default"] == 8000
