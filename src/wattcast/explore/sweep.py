"""Run a study in parts, with bounded memory, in this process, several processes or a Dask cluster.

A part is a fixed range of points, evaluated in fixed chunks, so results do not depend on who
computes them, in which order, or after how many interruptions. Workers hand back encoded parts; one
process alone writes them. A part lost with its worker is computed again. Dask's messages are
pickles: use clusters you trust, and nobody else's.

Results on disk are a folder of Parquet parts with a manifest, so that a killed run continues where
it stood. A part is written whole or not at all, under a name that says which points it holds, so no
result is lost or doubled. ``--out NAME.parquet|.csv|.json`` keeps its parts in
``NAME.parquet.parts`` until all are there, then joins them into the one file. ``--out FOLDER``
stays a folder of parts, which polars, pandas, DuckDB and Spark read as one table."""

from __future__ import annotations

import io
import multiprocessing
import signal
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast import __version__
from wattcast.core import (
    BadInput,
    arrays,
    bad_value,
    check_names,
)
from wattcast.core.errors import (
    CannotWrite,
    Refused,
    WattcastError,
    import_extra,
)
from wattcast.core.row_tables import catch_panics, import_polars
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.units import show
from wattcast.core.user_results import UserResult
from wattcast.core.whole_files import replace_whole, write_whole
from wattcast.explore.search_space import RESULT_UNITS, SamplingMethod
from wattcast.explore.study import (
    Columns,
    Study,
    describe_designs,
    evaluate_points,
    find_unused_fields,
    tabulate_points,
)

ENDINGS = (".parquet", ".csv", ".json")
_MANIFEST = "manifest.json"
_FORMAT = 1


class StoreManifest(msgspec.Struct, forbid_unknown_fields=True):
    """Say what a folder of parts holds."""

    format: int
    wattcast: str
    study: str  # the fingerprint of the study
    about: str
    points: int
    part_points: int


@dataclass(frozen=True)
class ResultStore:
    """Hold the parts of one study, and the file they end up in."""

    folder: Path
    target: Path | None  # the one file they are joined into; None: they stay

    def finished(self) -> set[int]:
        """Return the numbers of the parts that are there."""
        numbers = [path.stem.removeprefix("part-") for path in self.folder.glob("part-*.parquet")]
        return {int(number) for number in numbers if number.isascii() and number.isdigit()}

    def read(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Read the columns of a finished part."""
        try:
            with catch_panics():
                columns = import_polars().read_parquet(self.part(index)).get_columns()
                return {column.name: column.to_numpy() for column in columns}
        except (OSError, import_polars().exceptions.PolarsError) as error:
            do = "Delete it; the same command computes it again."
            raise BadInput(f"{self.part(index)}: not a readable part ({error}). {do}") from None

    def part(self, index: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"part-{index:06d}.parquet"

    def join(self, parts: int) -> None:
        """Join all parts, in order, into the one file asked for, and remove them."""
        if self.target is None:
            return
        paths = [self.part(index) for index in range(parts)]
        try:
            with replace_whole(self.target) as part_file:
                _WRITERS[self.target.suffix.lower()](paths, part_file)
        except (CannotWrite, import_polars().exceptions.PolarsError) as error:
            where = f"All parts are kept in {self.folder}."
            raise BadInput(f"{self.target}: cannot be written ({error}). {where}") from None
        for path in (*paths, self.folder / _MANIFEST):
            path.unlink()
        self.folder.rmdir()


def open_store(out: Path, manifest: StoreManifest) -> ResultStore:
    """Open a store for this study at ``out``.

    One that was begun is continued; one of another study is refused.
    """
    import_polars()
    store = _choose_store(out)
    path = store.folder / _MANIFEST
    if path.exists():
        stored = decode_json(read_bytes(path), StoreManifest, str(path))
        if stored.format != _FORMAT:
            do = "Choose another folder."
            raise bad_value(f"{path}: format", str(_FORMAT), stored.format, do)
        if _key_of_manifest(stored) != _key_of_manifest(manifest):
            raise Refused(
                f"{store.folder}: holds results of another study "
                f"({stored.about}, Wattcast {stored.wattcast}), "
                f"not of this one ({manifest.about}). Choose another --out, or delete the folder."
            )
    elif store.folder.is_dir() and any(store.folder.iterdir()):
        raise Refused(
            f"{store.folder}: holds other files and no {_MANIFEST}. Choose an empty folder."
        )
    else:
        write_whole(path, msgspec.json.encode(manifest))
    return store


def _choose_store(out: Path) -> ResultStore:
    """Return the store of a folder, or of the parts of one file, by its ending."""
    ending = out.suffix.lower()
    if ending and ending not in ENDINGS and not out.is_dir():
        expected = f"a folder, or a name that ends in {', '.join(ENDINGS)}"
        raise bad_value(str(out), expected, out.name)
    is_file = ending in ENDINGS
    if is_file and out.is_dir():
        raise bad_value(str(out), "a file", "a folder", "Choose another name.")
    if not is_file and out.is_file():
        raise bad_value(str(out), "a folder", "a file", "Choose another name.")
    if is_file:
        return ResultStore(out.with_name(out.name + ".parts"), out)
    return ResultStore(out, None)


def _key_of_manifest(manifest: StoreManifest) -> tuple[str, int, int]:
    """Return what two runs of the same study share."""
    return manifest.study, manifest.points, manifest.part_points


def _write_json_parts(paths: list[Path], out: Path) -> None:
    """Write a list of objects, one part at a time."""
    with out.open("wb") as stream:
        stream.write(b"[")
        begun = False
        for path in paths:
            inner = import_polars().read_parquet(path).write_json().encode()[1:-1]
            stream.write((b",\n" if begun and inner else b"") + inner)
            begun = begun or bool(inner)
        stream.write(b"]\n")


_WRITERS: dict[str, Callable[[list[Path], Path], Any]] = {
    ".parquet": lambda paths, out: (
        import_polars()
        .scan_parquet(paths)
        .sink_parquet(out, compression="zstd", compression_level=1)
    ),
    ".csv": lambda paths, out: import_polars().scan_parquet(paths).sink_csv(out),
    ".json": _write_json_parts,
}


# Points written together. At the end a process may wait for two parts of another: few seconds.
PART_POINTS = 40_000
ASK_ABOVE = 100_000_000  # points
SHOWN = 20_000  # points kept for figures, about
BEST_COLUMNS = ("latency_s", "power_w", "energy_j")


@dataclass(frozen=True)
class SweepSummary:
    """Hold the few points that are kept once all are written."""

    kept: int  # points that meet the constraints
    front: Columns  # the Pareto front
    best: Columns  # the point of least latency, power, energy
    shown: Columns  # a selection spread over all, for figures


# The number of a part, its summary, and its points as Parquet where they are written.
SweepPart = tuple[int, SweepSummary, bytes | None]


@dataclass(frozen=True, repr=False)
class SweepResult(UserResult):
    """Hold the result of a sweep."""

    plain_by = "wattcast.explore.exploration_report:sweep_json"
    drawn_by = "wattcast.explore.exploration_figures:draw_pareto_front"
    rows_in = "front"

    study: Study
    points: int
    objectives: tuple[str, ...]
    summary: SweepSummary
    notes: tuple[str, ...]
    continued: int  # parts that were there before

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        front = len(next(iter(self.summary.front.values()), ()))
        around = f"{self.study.graph.name} on designs around {self.study.gpu.name}"
        return f"{around}: {self.points:,} points, {front} on the Pareto front"


@dataclass(frozen=True)
class SweepWork:
    """Compute parts of a study. Workers are sent this."""

    study: Study
    objectives: tuple[str, ...]
    compression: str | None  # of what is written; None: nothing is
    part_points: int

    def part_range(self, index: int) -> tuple[int, int]:
        """Return the first point of a part and the first after it."""
        start = index * self.part_points
        return start, min(start + self.part_points, self.study.space.size)

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return -(-self.study.space.size // self.part_points)

    def count_points(self, index: int) -> int:
        """Return the points of a part."""
        start, stop = self.part_range(index)
        return stop - start

    def compute_part(self, index: int) -> SweepPart:
        """Compute part ``index``."""
        columns = tabulate_points(self.study, *self.part_range(index))
        if self.compression is None:
            return index, self.summarise(columns), None
        buffer = io.BytesIO()
        level = 1 if self.compression == "zstd" else None
        frame = import_polars().DataFrame(columns)
        frame.write_parquet(buffer, compression=self.compression, compression_level=level)
        return index, self.summarise(columns), buffer.getvalue()

    def summarise(self, columns: Columns) -> SweepSummary:
        """Keep a few points of a part.

        Those to show are chosen by a multiplicative hash of their numbers [Knuth, TAOCP 3, 6.4].
        Every n-th point would fall into step with the axes of a grid and show few of their values.
        """
        points = columns["point"]
        hashed = (points.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        is_shown = np.asarray(hashed < SHOWN / self.study.space.size * 2.0**32)
        shown = {name: values[is_shown] for name, values in columns.items()}
        front = arrays.pareto_rows(columns, self.objectives)
        return SweepSummary(len(points), front, _find_best(columns), shown)


Runner = Callable[[SweepWork, Iterable[int]], Iterator[SweepPart]]
ReportProgress = Callable[[int, int], None]


def run_sweep(
    study: Study,
    out: Path | None = None,
    objectives: Sequence[str] = ("latency_s", "power_w"),
    runner: Runner | None = None,
    progress: ReportProgress | None = None,
    yes: bool = False,
    part_points: int = PART_POINTS,
) -> SweepResult:
    """Evaluate every point of a study; write all to ``out``, return the Pareto front and the best.

    ``runner`` computes the parts: ``run_here`` by default, or that of ``process_runner`` or
    ``cluster_runner``.
    """
    size = study.space.size
    if size > ASK_ABOVE and not yes:
        do = "Take larger steps, or add --yes to go."
        raise Refused(f"the space has {size:,} points, more than {ASK_ABOVE:,}. {do}")
    _check_objectives(study, objectives)
    notes = _list_notes(study)
    store = None
    compression = None
    if out is not None:
        manifest = StoreManifest(
            _FORMAT,
            __version__,
            study.digest(),
            _describe_study(study),
            size,
            part_points,
        )
        store = open_store(out, manifest)
        # parts are small where they stay, and fast where they are read once and go
        compression = "zstd" if store.target is None else "lz4"
    work = SweepWork(study, tuple(objectives), compression, part_points)
    finished = sorted(store.finished()) if store else []
    summary = _compute_parts(
        work,
        store,
        finished,
        runner or run_here,
        progress,
    )
    if summary.kept == 0:
        raise _no_point_error(study)
    if store:
        store.join(work.part_count)
    return SweepResult(
        study,
        size,
        work.objectives,
        summary,
        notes,
        len(finished),
    )


def _check_objectives(study: Study, objectives: Sequence[str]) -> None:
    columns = [*study.space.columns, *RESULT_UNITS]
    check_names("column", objectives, columns, f"Known here: {', '.join(columns)}.")
    if len(objectives) < 2 or len(set(objectives)) != len(objectives):
        raise bad_value("front", "two or more different columns to minimise", ",".join(objectives))


def _describe_study(study: Study) -> str:
    """Describe a study for its manifest."""
    space = study.space
    axes = [f"{axis.field.name} ({axis.values.size} values)" for axis in space.axes]
    method = f"{space.method}:{space.samples}" if space.samples else str(space.method)
    return f"{study.graph.name} on {study.gpu.name}, {method} over {', '.join(axes)}"


def _compute_parts(
    work: SweepWork,
    store: ResultStore | None,
    finished: Sequence[int],
    runner: Runner,
    progress: ReportProgress | None,
) -> SweepSummary:
    """Compute the parts that are not ``finished``, store them and merge the summaries of all."""
    size = work.study.space.size
    summaries = [work.summarise(store.read(index)) for index in finished] if store else []
    count = sum(map(work.count_points, finished))
    if progress:
        progress(count, size)
    missing = [index for index in range(work.part_count) if index not in set(finished)]
    for index, summary, data in runner(work, missing):
        if store and data is not None:
            write_whole(store.part(index), data)
        summaries = [_merge_summaries([*summaries, summary], work.objectives)]
        count += work.count_points(index)
        if progress:
            progress(count, size)
    return _merge_summaries(summaries, work.objectives)


def run_here(work: SweepWork, indices: Iterable[int]) -> Iterator[SweepPart]:
    """Compute parts one after the other in this process."""
    return map(work.compute_part, indices)


def process_runner(count: int) -> Runner:
    """Return a runner on ``count`` processes of this machine, this process included."""
    if count < 1:
        raise bad_value("workers", "one or more", count)

    def runner(work: SweepWork, indices: Iterable[int]) -> Iterator[SweepPart]:
        waiting = deque(indices)
        helpers = min(count, len(waiting)) - 1
        if helpers < 1:
            yield from run_here(work, waiting)
            return
        quiet = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
        with ProcessPoolExecutor(helpers, multiprocessing.get_context("spawn"), *quiet) as pool:
            try:
                yield from _run_on_pool(
                    pool,
                    work,
                    waiting,
                    helpers + 1,
                    here=True,
                )
            except BrokenProcessPool:
                raise WattcastError(f"a worker process died. {_RUN_AGAIN}") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return runner


def _run_on_pool(
    pool: Executor,
    work: SweepWork,
    waiting: deque[int],
    most: int,
    *,
    here: bool = False,
) -> Iterator[SweepPart]:
    """Compute parts, ``most`` at a time in the pool, so that no memory fills up.

    With ``here`` this process helps.
    """
    running: set[Future[SweepPart]] = set()
    while waiting or running:
        while waiting and len(running) < most:
            running.add(pool.submit(work.compute_part, waiting.popleft()))
        if here and waiting:
            yield work.compute_part(waiting.popleft())
        patience_s = 0.0 if here and waiting else None
        finished, running = wait(running, patience_s, FIRST_COMPLETED)
        yield from (future.result() for future in finished)


_RUN_AGAIN = "What is finished is kept; run the same command again."


def _list_notes(study: Study) -> tuple[str, ...]:
    """List what a sweep assumes beyond what each prediction does."""
    notes = [
        f"{name}: changes nothing, with the other fields in the middle of their values: "
        "nothing here is bound by it"
        for name in find_unused_fields(study)
    ]
    if study.design is not None:
        notes += describe_designs(study)
    if study.space.method is not SamplingMethod.GRID:
        sample = f"{study.space.method} sample of {study.space.samples} points"
        notes.append(f"{sample}, seed {study.space.seed}")
    return tuple(notes)


def _find_best(columns: Columns) -> Columns:
    """Return the rows of least latency, power and energy; of equal ones the first point."""
    if not len(columns["point"]):
        return columns
    # rows are in the order of their points
    order = [int(np.argmin(columns[name])) for name in BEST_COLUMNS]
    return {name: values[order] for name, values in columns.items()}


def _merge_summaries(several: Sequence[SweepSummary], objectives: tuple[str, ...]) -> SweepSummary:
    """Merge summaries; the order in which they came does not matter."""
    if len(several) == 1:
        return several[0]
    fronts = _join_tables([summary.front for summary in several])
    bests = _join_tables([summary.best for summary in several])
    return SweepSummary(
        kept=sum(summary.kept for summary in several),
        front=arrays.pareto_rows(fronts, objectives),
        best=_find_best(bests),
        shown=_join_tables([summary.shown for summary in several]),
    )


def _join_tables(tables: Sequence[Columns]) -> Columns:
    """Return the rows of all tables as one table, in the order of their points."""
    point = np.concatenate([table["point"] for table in tables])
    order = np.argsort(point, kind="stable")
    joined = {}
    for name in tables[0]:
        values = np.concatenate([table[name] for table in tables])
        joined[name] = values[order]
    return joined


def _no_point_error(study: Study) -> WattcastError:
    """Return the error that no point is left.

    It says which constraint is the limit, from points spread over the space.
    """
    size = study.space.size
    points = study.space.spread_points(_PROBED_POINTS)
    count = len(next(iter(points.values())))
    columns = points | evaluate_points(replace(study, constraints=()), points)
    shares = []
    for constraint in study.constraints:
        share = float(constraint.holds(columns).mean())
        best = constraint.closest_value(columns[constraint.column])
        closest = show(best, constraint.unit) if constraint.unit else f"{best:g}"
        shares.append(f"{constraint} holds for {share:.1%} (closest: {closest})")
    return BadInput(
        f"none of the {size:,} points meets every constraint. Of {count:,} points spread "
        "over the space, "
        f"{'; '.join(shares)}. Loosen the one that holds least, or widen the space."
    )


# Settings of a cluster of our own. Dask's profiler and monitors take a tenth of a core, more than a
# fifth of the work of a hall. Workers that are forked import Dask once, not each again.
_LEAN = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.memory.monitor-interval": "5s",
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
}
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
if _FORKS:
    _LEAN["distributed.worker.multiprocessing-method"] = "forkserver"

_PROBED_POINTS = 2_000  # among which the constraint that no point meets is looked for
RETRIES = 5  # of a part whose worker died
CONNECT_S = 10.0
WORKERS_S = 60.0


def cluster_runner(address: str, workers: int | None = None) -> Runner:
    """Return a runner on the Dask scheduler at ``address`` (``tcp://host:8786``).

    ``local`` makes a cluster on this machine.
    """
    if address != "local" and "://" not in address:
        expected = "a scheduler's address, such as tcp://host:8786, or local"
        raise bad_value("cluster", expected, address)

    def runner(work: SweepWork, indices: Iterable[int]) -> Iterator[SweepPart]:
        waiting = deque(indices)
        if not waiting:
            return
        dask = import_extra("distributed", "clusters need Dask", "explore")
        with ExitStack() as stack:
            part_module = type(work).__module__
            client = _connect_client(dask, stack, address, workers, part_module)
            pool = client.get_executor(pure=False, retries=RETRIES)
            most = 2 * max(len(client.nthreads()), 1)
            try:
                yield from _run_on_pool(pool, work, waiting, most)
            except dask.KilledWorker:
                raise WattcastError(
                    f"cluster: a part lost its worker again and again. {_RUN_AGAIN}"
                ) from None

    return runner


def _prepare_fork(modules: Sequence[str]) -> None:
    """Import what workers need once, in the process from which they are forked.

    Dask would import pandas there as well, and every worker the modules of its parts.
    """
    if _FORKS:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def _connect_client(
    dask: Any,
    stack: ExitStack,
    address: str,
    workers: int | None,
    part_module: str,
) -> Any:
    """Return a client of the cluster once it has a worker; ``stack`` closes it.

    Workers of a cluster of our own have ``part_module``, which computes parts, from the start.
    """
    if address == "local":
        options = {
            "threads_per_worker": 1,
            "processes": True,
            "dashboard_address": None,
        }
        settings = import_extra("dask.config", "clusters need Dask", "explore")
        stack.enter_context(settings.set(_LEAN))
        _prepare_fork(("distributed", part_module))
        cluster = stack.enter_context(dask.LocalCluster(n_workers=workers, **options))
        client = stack.enter_context(dask.Client(cluster))
    else:
        try:
            client = stack.enter_context(dask.Client(address, timeout=CONNECT_S))
        except (OSError, ValueError) as error:
            do = "Is the scheduler running, and reachable from here?"
            message = f"cluster: {address} cannot be reached ({error}). {do}"
            raise WattcastError(message) from None
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except (TimeoutError, dask.TimeoutError):
        do = "Start one beside the scheduler."
        raise WattcastError(f"cluster: no worker within {WORKERS_S} s. {do}") from None
    return client
