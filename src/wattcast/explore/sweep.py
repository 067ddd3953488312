"""Run a study in parts: bounded memory, progress, several processes or a cluster, and no part done twice.

A part is a fixed range of points, evaluated in fixed chunks, so results do not depend on who computes
them, in which order, or after how many interruptions. Workers hand back encoded parts; one process
alone writes them.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.errors import BadInput, Refused, WattcastError, bad_value, unknown_name
from wattcast.explore import pareto
from wattcast.explore.fields import Kind
from wattcast.explore.space import Method
from wattcast.explore.store import encode, open_store
from wattcast.explore.study import Columns, Study, evaluate, idle_fields, table
from wattcast.units import show

PART = 100_000  # points written together
ASK_ABOVE = 100_000_000  # points
SHOWN = 20_000  # points kept for figures, about
BEST = ("latency_s", "power_w", "energy_j")


@dataclass(frozen=True)
class Summary:
    """What is kept of points once they are written: few of them, whatever their number."""

    kept: int  # points that meet the constraints
    front: Columns  # the Pareto front
    best: Columns  # the point of least latency, power, energy
    shown: Columns  # a selection spread over all, for figures


@dataclass(frozen=True)
class Part:
    """One part, computed."""

    index: int
    summary: Summary
    data: bytes | None  # as Parquet, where it is to be written


@dataclass(frozen=True)
class Swept:
    """A study, done."""

    study: Study
    points: int
    objectives: tuple[str, ...]
    summary: Summary
    notes: tuple[str, ...]
    continued: int  # parts that were there before


@dataclass(frozen=True)
class Work:
    """How one part is computed; what a worker is sent."""

    study: Study
    objectives: tuple[str, ...]
    compression: str | None  # of what is written; None: nothing is
    part_points: int

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.study.space.size // self.part_points)

    def part(self, index: int) -> Part:
        """Compute part ``index``."""
        start = index * self.part_points
        columns = table(self.study, start, min(start + self.part_points, self.study.space.size))
        data = None if self.compression is None else encode(columns, self.compression)
        return Part(index, self.summary(columns), data)

    def summary(self, columns: Columns) -> Summary:
        """Few points of many."""
        chosen = _scattered(columns["point"], SHOWN / self.study.space.size)
        shown = {name: values[chosen] for name, values in columns.items()}
        return Summary(len(columns["point"]), pareto.of_columns(columns, self.objectives), _best(columns), shown)


Runner = Callable[[Work, Iterable[int]], Iterator[Part]]
Progress = Callable[[int, int], None]


def run(
    study: Study,
    out: Path | None = None,
    objectives: Sequence[str] = ("latency_s", "power_w"),
    runner: Runner | None = None,
    progress: Progress | None = None,
    yes: bool = False,
    part_points: int = PART,
) -> Swept:
    """Evaluate every point of a study; write them to ``out``, keep the front and the best.

    ``runner`` is who computes the parts: by default this process; :func:`processes`, or
    :func:`~wattcast.explore.cluster.on`.
    """
    size = study.space.size
    if size > ASK_ABOVE and not yes:
        do = "Take larger steps, or add --yes to go."
        raise Refused(f"the space has {size:,} points, more than {ASK_ABOVE:,}. {do}")
    wanted, notes = _objectives(study, objectives), _notes(study)
    store = None if out is None else open_store(out, study.digest(), _about(study), size, part_points)
    work = Work(study, wanted, store.compression if store else None, part_points)
    done = store.finished() if store else set()
    summaries = deque(work.summary(store.read(index)) for index in sorted(done)) if store else deque()
    count = sum(_part_size(work, index) for index in done)
    if progress:
        progress(count, size)
    for part in (runner or here)(work, [index for index in range(work.parts) if index not in done]):
        if store and part.data is not None:
            store.write(part.index, part.data)
        summaries.append(part.summary)
        summaries = deque([_merged(summaries, work.objectives)])
        count += _part_size(work, part.index)
        if progress:
            progress(count, size)
    summary = _merged(summaries, work.objectives)
    if summary.kept == 0:
        raise _impossible(study)
    if store:
        store.join(work.parts)
    return Swept(study, size, work.objectives, summary, notes, len(done))


def here(work: Work, indices: Iterable[int]) -> Iterator[Part]:
    """Compute parts one after the other in this process."""
    for index in indices:
        yield work.part(index)


def processes(count: int) -> Runner:
    """Compute parts in ``count`` processes of this machine; one is this process itself."""
    if count < 1:
        raise bad_value("workers", "one or more", count)

    def runner(work: Work, indices: Iterable[int]) -> Iterator[Part]:
        left = deque(indices)
        others = min(count, len(left)) - 1
        if others < 1:
            yield from here(work, left)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(others, context, _hold, (work,)) as pool:
            running: set[Future[Part]] = set()
            try:
                while left or running:
                    while left and len(running) <= others:  # each has one, and one waits for whoever is first
                        running.add(pool.submit(_held_part, left.popleft()))
                    if left:
                        yield work.part(left.popleft())
                    finished, running = wait(running, 0.0 if left else None, FIRST_COMPLETED)
                    yield from (future.result() for future in finished)
            except BrokenProcessPool:
                do = "What is finished is kept; run the same command again."
                raise WattcastError(f"a worker process died. {do}") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return runner


_held: Work | None = None  # what this worker process computes parts of


def _hold(work: Work) -> None:
    global _held
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _held = work


def _held_part(index: int) -> Part:
    assert _held is not None, "the worker was not told what to compute"
    return _held.part(index)


def _scattered(point: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """About this share of all points, by a multiplicative hash of their numbers [Knuth, TAOCP 3, 6.4].

    Every n-th point would fall into step with the axes of a grid and show few of their values.
    """
    hashed = (point.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    return np.asarray(hashed < share * 2.0**32)


def _objectives(study: Study, names: Sequence[str]) -> tuple[str, ...]:
    known = [*study.space.columns, *("latency_s", "power_w", "energy_j", "clock_hz", "effective_clock_hz", "busy_s")]
    for name in names:
        if name not in known:
            raise unknown_name("column", name, known, f"Known here: {', '.join(known)}.")
    if len(names) < 2 or len(set(names)) != len(names):
        raise bad_value("front", "two or more different columns to minimise", ",".join(names))
    return tuple(names)


def _notes(study: Study) -> tuple[str, ...]:
    """What a sweep assumes beyond what each prediction does."""
    notes = [
        f"{name}: changes nothing, with the other fields in the middle of their values: the models of this "
        "bundle may not use it"
        for name in idle_fields(study)
    ]
    if any(axis.field.kind is not Kind.SETTING for axis in study.space.axes):
        notes.append(f"energy per event and idle power stay those of the {study.gpu.name}, whatever the design")
    if study.space.method is not Method.GRID:
        notes.append(f"{study.space.method} sample of {study.space.samples} points, seed {study.space.seed}")
    return tuple(notes)


def _about(study: Study) -> str:
    axes = ", ".join(f"{axis.field.name} ({axis.values.size} values)" for axis in study.space.axes)
    how = study.space.method if not study.space.samples else f"{study.space.method}:{study.space.samples}"
    return f"{study.graph.name} on {study.gpu.name}, {how} over {axes}"


def _part_size(work: Work, index: int) -> int:
    return min((index + 1) * work.part_points, work.study.space.size) - index * work.part_points


def _best(columns: Columns) -> Columns:
    """The row of least latency, of least power, of least energy; of equal ones the first point."""
    if not len(columns["point"]):
        return columns
    order = [int(np.argmin(columns[name])) for name in BEST]  # rows are in the order of their points
    return {name: values[order] for name, values in columns.items()}


def _merged(summaries: Iterable[Summary], objectives: tuple[str, ...]) -> Summary:
    """Several summaries as one; the order in which they came does not matter."""
    several = list(summaries)
    if len(several) == 1:
        return several[0]
    return Summary(
        sum(s.kept for s in several),
        pareto.of_columns(_joined([s.front for s in several]), objectives),
        _best(_joined([s.best for s in several])),
        _joined([s.shown for s in several]),
    )


def _joined(tables: Sequence[Columns]) -> Columns:
    joined = {name: np.concatenate([t[name] for t in tables]) for name in tables[0]}
    order = np.argsort(joined["point"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _impossible(study: Study) -> WattcastError:
    """No point is left: which constraint binds, from an even selection of points without constraints."""
    size = study.space.size
    points = study.space.some(2_000)
    count = len(next(iter(points.values())))
    columns = points | evaluate(replace(study, where=()), points)
    said = []
    for where in study.where:
        share = float(where.holds(columns).mean())
        best = where.best(columns[where.column])
        closest = show(best, where.unit) if where.unit else f"{best:g}"
        said.append(f"{where} holds for {share:.1%} (closest: {closest})")
    return BadInput(
        f"none of the {size:,} points meets every constraint. Of {count:,} points spread over the space, "
        f"{'; '.join(said)}. Loosen the one that holds least, or widen the space."
    )
