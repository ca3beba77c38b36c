"""Streaming parser of model output (spec/chat_format.md 8): reasoning, content and tool calls.

`TokenParser` reads sampled token ids and is what the server uses; `TextParser` finds markers by
their letters, for engines without ids and for tests. Both drive one state machine, `OutputParser`.
"""

from twining.serving.parsing.drivers import TextParser, TokenParser, start_state
from twining.serving.parsing.events import (
    CallArguments,
    CallEnded,
    CallOpened,
    Channel,
    ContentText,
    Event,
    Marker,
    ParsedMessage,
    ParserOptions,
    ReasoningText,
    ToolCall,
)
from twining.serving.parsing.machine import OutputParser
from twining.serving.parsing.schema import convert_argument, schema_types

__all__ = [
    "CallArguments",
    "CallEnded",
    "CallOpened",
    "Channel",
    "ContentText",
    "Event",
    "Marker",
    "OutputParser",
    "ParsedMessage",
    "ParserOptions",
    "ReasoningText",
    "TextParser",
    "TokenParser",
    "ToolCall",
    "convert_argument",
    "schema_types",
    "start_state",
]
