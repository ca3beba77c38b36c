"""The model list names what is served, not what the engine was made for."""

from types import SimpleNamespace

import pytest

from twining.config import EngineConfig, ServerConfig
from twining.demo.paths import demo_paths
from twining.serving.openai.replies import model_object
from twining.serving.server import make_context


@pytest.mark.parametrize(
    ("model_id", "shown"), [("twining-demo", "twining-demo"), ("glm-5.3-flash", "GLM-5.3-Flash")]
)
def test_display_name_follows_the_id(model_id, shown):
    engine = SimpleNamespace(ready=None)
    config = ServerConfig(model_id=model_id)
    context = make_context(engine, EngineConfig(model_dir=demo_paths()[0]), config)
    entry = model_object(context, model_id)
    assert entry["id"] == model_id and entry["display_name"] == shown
