"""The end of forced calls (spec/chat_format.md 9): the model tends to repeat a finished set.

From the second call on, a call is shown only when it is complete, and one that equals an earlier
call of the reply in name and arguments is not shown and ends it.
"""

from twining.serving.parsing import CallArguments, CallEnded, CallOpened, Event


class RepeatFilter:
    """Events in, events that may be shown out; is_over after a repetition."""

    def __init__(self) -> None:
        self.is_over = False
        self._sent: set[tuple[str, str]] = set()
        self._num_calls = 0
        self._name = ""
        self._arguments = ""
        self._held: list[Event] = []

    def take(self, events: list[Event]) -> list[Event]:
        """What passes now: everything of the first call, later calls as a whole."""
        passed: list[Event] = []
        for event in events:
            if self.is_over:
                break
            match event:
                case CallOpened():
                    self._num_calls += 1
                    self._name, self._arguments, self._held = event.name, "", []
                case CallArguments():
                    self._arguments += event.text
                case CallEnded():
                    call = (self._name, self._arguments)
                    if call in self._sent:
                        self.is_over = True
                        break
                    self._sent.add(call)
                    passed += [*self._held, event]
                    continue
                case _:
                    passed.append(event)
                    continue
            (self._held if self._num_calls > 1 else passed).append(event)
        return passed
