"""The trunk over several stages, with the interface of the model: prefill, verify, commit, logits.

Source: design.md "Steps and scheduling"; spec/performance.md 4.4. One message per hop carries the
row plan, the streams and the taps. Embeddings are made before the first stage; the last one ends
with the final norm, and head and drafter are where it is. On a CPU the stages are threads of this
process and share its memory; a device backend copies the message instead.

With one stage nothing is queued and no thread exists. The division cannot change a bit: stages run
the same layers on the same rows in the same order of positions.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from twining.engine.stage import Pass, Stage
from twining.models.glm5_next.hop import Hop
from twining.models.glm5_next.model import Glm5Next, TrunkRows, join_rows

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState


class Pipeline:
    """Stages of one model; the cache pool must be divided into as many.

    A sequence's planes belong to the caller while none of its passes is under way: `commit` and
    everything in the pool that touches planes wait for nothing.
    """

    def __init__(self, model: Glm5Next, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self._model = model
        self._stages: list[Stage] = []
        if num_stages > 1:
            self._stages = [Stage(model, n, partial(self._hand_on, n)) for n in range(num_stages)]

    def close(self) -> None:
        """End the threads; nothing may be launched afterwards."""
        for stage in self._stages:
            stage.close()

    def prefill(
        self, state: "SequenceState", ids: Sequence[int], *, embeds: Tensor | None = None
    ) -> TrunkRows:
        """Glm5Next.prefill, its 64-token blocks following each other through the stages."""
        passes: list[Future[TrunkRows]] = []
        try:
            for hop in self._model.prefill_hops(state, ids, embeds=embeds):
                passes.append(self._launch(hop))
        finally:
            wait(passes)  # also on errors: nothing of this sequence may still be under way
        return join_rows([rows.result() for rows in passes])

    def launch(self, batch: Sequence[tuple["SequenceState", Sequence[int]]]) -> "Future[TrunkRows]":
        """Start a verify pass. Its sequences must have no other pass under way.

        Raises what Glm5Next.verify raises for bad arguments.
        """
        return self._launch(self._model.verify_hop(batch))

    def verify(self, batch: Sequence[tuple["SequenceState", Sequence[int]]]) -> TrunkRows:
        """Glm5Next.verify: launch and wait."""
        return self.launch(batch).result()

    def commit(self, state: "SequenceState", num_rows: int) -> None:
        """Glm5Next.commit, on the planes of every stage."""
        self._model.commit(state, num_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Glm5Next.logits."""
        return self._model.logits(hidden)

    def _launch(self, hop: Hop) -> "Future[TrunkRows]":
        rows: Future[TrunkRows] = Future()
        if self._stages:
            self._stages[0].put(Pass(hop, rows))
        else:
            rows.set_result(self._model.run(hop))
        return rows

    def _hand_on(self, number: int, work: Pass) -> None:
        """Stage `number` has done its part."""
        if number + 1 < self.num_stages:
            self._stages[number + 1].put(work)
        else:
            work.rows.set_result(self._model.finish(work.hop))
