"""Measure a stretch of a Python program: ``with wattcast.measure.window("prefill") as m: ...``.

Windows may nest and share one sampler process, which starts with the outermost and ends with it. The
figures are there after the block. Work on a GPU is asynchronous: synchronise before the block ends,
or the window closes before the work does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from wattcast.errors import Refused
from wattcast.measure.measurement import Measurement, measured
from wattcast.measure.sampler import Sampler

LEAD_S = 1.1  # before the outermost window, to learn the counter's period
TAIL_S = 0.25  # samples beyond the end, so that the counter steps once more


@dataclass
class Live:
    """A window while it runs; :attr:`result` is filled when the block ends."""

    name: str
    started_s: float
    inner: list[Live] = field(default_factory=list)
    _result: Measurement | None = None

    @property
    def result(self) -> Measurement:
        """What was measured; refused while the block still runs."""
        if self._result is None:
            raise Refused(f"{self.name}: still running; read the result after the block.")
        return self._result


@dataclass
class _Shared:
    sampler: Sampler
    open: list[Live]
    mark: int


_shared: list[_Shared] = []


@contextmanager
def window(name: str, source: str = "auto", index: int = 0, period_s: float = 0.05) -> Iterator[Live]:
    """Measure the block. Raises :class:`~wattcast.errors.MissingTool` when nothing here can be measured."""
    outermost = not _shared
    if outermost:
        sampler = Sampler(source, index, period_s)
        sampler.start()
        time.sleep(LEAD_S)
        _shared.append(_Shared(sampler, [], 0))
    shared = _shared[-1]
    live = Live(name, time.monotonic())
    if shared.open:
        shared.open[-1].inner.append(live)
    shared.open.append(live)
    try:
        yield live
    finally:
        _close(shared, live, outermost)


def _close(shared: _Shared, live: Live, outermost: bool) -> None:
    end_s = time.monotonic()
    shared.open.remove(live)
    live._result = Measurement(live.name, end_s - live.started_s, flags=("not evaluated",))
    try:
        if outermost:
            shared.sampler.quick(True)
            time.sleep(TAIL_S)
        samples = shared.sampler.since(shared.mark)
        live._result = measured(live.name, samples, live.started_s, end_s)
        for inner in live.inner:  # with the samples that came after they ended
            inner._result = measured(inner.name, samples, inner.started_s, inner.started_s + inner.result.duration_s)
    finally:
        if outermost:
            _shared.pop()
            shared.sampler.stop()
