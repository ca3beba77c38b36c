"""Errors a user can cause or meet. Each message is one line: what, which value, what to do.

Bugs of our own raise AssertionError or whatever Python raises; these classes are for files,
settings, requests and the outside world. The CLI prints them without a traceback and exits with
status 2.
"""


class TwiningError(Exception):
    """Base of every error that is reported to a user as one line."""


class ConfigError(TwiningError, ValueError):
    """A setting cannot be honoured; the message names the setting, its value and the fix."""


class CheckpointError(TwiningError):
    """A checkpoint is missing, damaged, or of a kind this engine does not run."""


class EngineError(TwiningError):
    """The engine could not start, or ended while requests were open."""


class RequestError(TwiningError):
    """A request is refused; carries what the HTTP layer needs (spec/api.md section 3).

    status: HTTP status. code: stable lower-case word. param: path of the field, or None.
    extra: further members of the error object, such as n_prompt_tokens and n_ctx.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        status: int = 400,
        extra: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.extra = extra or {}
