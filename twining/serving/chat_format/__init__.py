"""Prompt format of GLM-5.3-Flash (spec/chat_format.md 2 to 7): from request bodies to segments.

`build_prompt` is the whole path for one chat body; `from_messages_body` and `from_responses_body`
turn the two other request shapes into such a body first. Everything here is pure.
"""

from twining.serving.chat_format.messages_api import from_messages_body
from twining.serving.chat_format.normalise import normalise_messages, normalise_tools
from twining.serving.chat_format.prompt import ChatPrompt, build_prompt
from twining.serving.chat_format.render import Rendered, prompt_text, render, render_with_media
from twining.serving.chat_format.responses_api import from_responses_body
from twining.serving.chat_format.shapes import MappedBody, ToolOrigin
from twining.serving.chat_format.thinking import ThinkingPlan, resolve_thinking

__all__ = [
    "ChatPrompt",
    "MappedBody",
    "Rendered",
    "ThinkingPlan",
    "ToolOrigin",
    "build_prompt",
    "from_messages_body",
    "from_responses_body",
    "normalise_messages",
    "normalise_tools",
    "prompt_text",
    "render",
    "render_with_media",
    "resolve_thinking",
]
