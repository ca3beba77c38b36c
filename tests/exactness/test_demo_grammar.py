"""The bundled demo model under grammars: valid replies, the same with every drafter."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import torch

from twining.config import DraftConfig, EngineConfig
from twining.engine.loading import load_engine
from twining.engine.offline import generate
from twining.engine.request import Delta, Request, SamplingParams
from twining.serving.chat_format import build_prompt
from twining.serving.output import ChoiceOutput, OutputOptions
from twining.serving.structured import build_grammar, content_grammar, parse_tool_choice
from twining.serving.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "strict": True, "parameters": {}}},
]
CASES = {
    "schema": ("Anna is 31 years old. Name and age as JSON.", {"guided_json": SCHEMA}, [], None),
    "choice": ("Say hi.", {"guided_choice": ["hi there", "hello"]}, [], None),
    "required": ("What is the weather in Oslo for 3 days?", {}, TOOLS, "required"),
    "auto": ("What is the weather in Rome?", {}, TOOLS, "auto"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices and a shared machine: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo() -> Path:
    folder = Path(str(files("twining"))) / "demo"
    if not (folder / "model" / "config.json").is_file():
        pytest.skip("the demo model is not in this checkout")
    return folder


def make_requests(tokenizer: Tokenizer) -> list[Request]:
    requests = []
    for name, (text, fields, tools, asked) in CASES.items():
        body = {"messages": [{"role": "user", "content": text}], "reasoning_effort": "low"}
        prompt = build_prompt({**body, "tools": tools or None})
        spec, _ = build_grammar(
            content=content_grammar(fields),
            markers=tokenizer.markers,
            tools=prompt.tools,
            choice=parse_tool_choice(asked, prompt.tools),
            is_thinking=True,
        )
        requests += [
            Request(
                id=f"{name}-{temperature}",
                prompt_ids=tokenizer.encode_segments(prompt.segments),
                sampling=SamplingParams(seed=3, temperature=temperature, presence_penalty=0.2),
                max_tokens=120,
                stop_ids=tokenizer.stop_ids,
                grammar=spec,
                force_after=30,
                force_id=tokenizer.markers.think_close,
            )
            for temperature in (0.0, 1.3)
        ]
    return requests


def run(demo: Path, drafter: str, num_draft: int):
    tokenizer = Tokenizer.load(demo / "model")
    draft = DraftConfig(
        drafter=drafter,
        num_draft_tokens=num_draft,
        drafter_dir=demo / "drafter" if drafter == "dflash2" else None,
    )
    engine = load_engine(
        EngineConfig(model_dir=demo / "model", max_seq_len=1024, threads=1, draft=draft)
    )
    return generate(engine, make_requests(tokenizer)), tokenizer


@pytest.fixture(scope="module")
def plain(demo, one_thread):
    return run(demo, "none", 0)


def test_replies_are_what_was_asked(plain):
    results, tokenizer = plain
    for result in results:
        name = result.request_id.partition("-")[0]
        _, _, tools, asked = CASES[name]
        options = OutputOptions(stop_ids=frozenset(tokenizer.stop_ids))
        output = ChoiceOutput.for_chat(
            tokenizer,
            options,
            start="reasoning",
            tools=tools,
            parallel_tool_calls=True,
            tool_choice=asked or "auto",
        )
        output.push(Delta(request_id="r", kind="tokens", token_ids=result.token_ids))
        last = Delta(
            request_id="r",
            kind="finished",
            finish_reason=result.finish_reason,
            stop_id=result.stop_id,
        )
        output.push(last)
        assert result.finish_reason == "stop", (result.request_id, result.message)
        if name == "schema":
            jsonschema.validate(json.loads(output.content), SCHEMA)
        elif name == "choice":
            assert output.content in ("hi there", "hello")
        else:
            assert output.tool_calls or name == "auto"
            assert all(call.name in ("get_weather", "stop") for call in output.tool_calls)
        if name == "required":
            schemas = {"get_weather": WEATHER, "stop": {}}
            for call in output.tool_calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize(("drafter", "num_draft"), [("dflash2", 7), ("mtp", 3), ("ngram", 5)])
def test_drafters_do_not_show(plain, demo, drafter, num_draft):
    want = [(r.token_ids, r.finish_reason, r.stop_id) for r in plain[0]]
    results, _ = run(demo, drafter, num_draft)
    assert [(r.token_ids, r.finish_reason, r.stop_id) for r in results] == want
    if drafter != "ngram":
        assert sum(r.timings.num_accepted for r in results) > 0
