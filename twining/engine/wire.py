"""Messages between the API process and the engine process: length-prefixed msgpack over one socket.

A frame is four bytes, the body's length in little-endian order, then the body. The first frame to
the engine is `Start`; then ToEngine one way and FromEngine the other (engine/request.py). No torch
here.
"""

from pathlib import Path
from typing import Any

import msgspec

from twining.config import EngineConfig
from twining.engine.request import FromEngine, ToEngine
from twining.errors import EngineError

HEADER_BYTES = 4
# A prompt of a million ids is about 5 MB; anything far beyond is a damaged stream.
MAX_FRAME_BYTES = 1 << 28


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First frame: the configuration and the factory that builds the engine from it."""

    config: EngineConfig
    factory: str


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no message form for {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no message form for {kind.__name__}")


def encode(message: Start | ToEngine | FromEngine) -> bytes:
    """One whole frame."""
    body = msgspec.msgpack.encode(message, enc_hook=_encode_path)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def frame_length(header: bytes) -> int:
    """Bytes of the body that follows. Raises EngineError for an impossible length."""
    size = int.from_bytes(header, "little")
    if size > MAX_FRAME_BYTES:
        raise EngineError(
            f"engine message of {size} bytes exceeds {MAX_FRAME_BYTES}; damaged stream"
        )
    return size


def decode_to_engine(body: bytes) -> Start | ToEngine:
    """Raises msgspec.ValidationError or msgspec.DecodeError on a damaged body."""
    return _TO_ENGINE.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises msgspec.ValidationError or msgspec.DecodeError on a damaged body."""
    return _FROM_ENGINE.decode(body)


_TO_ENGINE: msgspec.msgpack.Decoder[Start | ToEngine] = msgspec.msgpack.Decoder(
    Start | ToEngine, dec_hook=_decode_path
)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
