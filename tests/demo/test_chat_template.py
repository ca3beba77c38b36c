"""The demo model's chat template renders what the vendor template renders."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tools.train_demo.data.text import MODEL_DIR


def environment() -> ImmutableSandboxedEnvironment:
    """As chat clients set it up: sandbox, trimmed blocks, plain JSON."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(
        value, ensure_ascii=ensure_ascii
    )
    return env


@pytest.fixture(scope="module")
def template():
    return environment().from_string((MODEL_DIR / "chat_template.jinja").read_text("utf-8"))


def test_vendor_vectors(template, golden):
    vectors = json.loads((golden / "chat_format.json").read_text("utf-8"))["vectors"]
    vectors = [v for v in vectors if v["layer"] == "template"]
    assert len(vectors) == 44
    wrong = []
    for v in vectors:
        got = template.render(messages=v["messages"], tools=v["tools"], **v["kwargs"])
        if got != v["prompt"]:
            wrong.append((v["name"], got, v["prompt"]))
    assert not wrong, "\n".join(map(str, wrong))
