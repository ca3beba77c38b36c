"""States of the output parser outside values (spec/chat_format.md 8.3.1)."""

from enum import Enum


class State(Enum):
    """Where the parser is; VALUE stands for all states inside an argument value."""

    REASONING = "R"
    CONTENT = "C"
    NAME = "N"
    NAME_CALL = "N2"  # a declared name, then CALL_OPEN where KEY_OPEN belongs
    JSON = "J"
    KEY = "K"
    AFTER_KEY = "A"
    BETWEEN = "B"
    VALUE = "V"


CALL_STATES = frozenset({State.KEY, State.AFTER_KEY, State.BETWEEN, State.VALUE})
