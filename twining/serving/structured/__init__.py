"""Structured output and forced calls: from the fields of a request to one grammar for the engine.

Source: spec/api.md 7, spec/chat_format.md 9. `content` reads what the visible text must look like,
`choice` which calls are wanted, `calls` writes calls in the model's own format, and `build` puts
them together. Nothing here looks at tokens; engine/grammar.py applies the result.
"""

from twining.serving.structured.build import build_grammar
from twining.serving.structured.choice import Mode, ToolChoice, parse_tool_choice
from twining.serving.structured.content import Content, content_grammar

__all__ = ["Content", "Mode", "ToolChoice", "build_grammar", "content_grammar", "parse_tool_choice"]
