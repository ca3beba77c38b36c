"""One stage: a device with its layers and its share of the cache planes, fed in order.

Source: design.md "Process model"; spec/performance.md 4.4. A stage works off its queue on a thread
of its own and hands each pass to the next stage, so that with S stages up to S passes are worked on
at once. Order is the only synchronisation between passes: a stage sees them in the order in which
they were launched, so a prompt block finds the state that the block before it left.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from twining.models.glm5_next.hop import Hop
from twining.models.glm5_next.model import Glm5Next, TrunkRows


@dataclass(frozen=True, slots=True)
class Pass:
    """A message on its way through the stages, and whom to tell."""

    hop: Hop
    rows: "Future[TrunkRows]"


class Stage:
    """Runs stage `number` of every pass. hand_on: called on this stage's thread after each."""

    def __init__(self, model: Glm5Next, number: int, hand_on: Callable[[Pass], None]) -> None:
        self._model = model
        self._number = number
        self._hand_on = hand_on
        self._queue: queue.SimpleQueue[Pass | None] = queue.SimpleQueue()
        # Thread counts change low bits (design.md P1), and torch keeps one per thread.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"stage-{number}", daemon=True)
        self._thread.start()

    def put(self, work: Pass) -> None:
        """Queue a pass."""
        self._queue.put(work)

    def close(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (work := self._queue.get()) is not None:
            try:
                self._model.run_stage(work.hop, self._number)
                self._hand_on(work)
            except Exception as err:
                work.rows.set_exception(err)  # whoever waits for the rows raises it
