"""Write the files of a trace run in blocks of rows, and draw its figure.

A file keeps a temporary name until it is whole, so that nothing half written is found under the
final name."""

from __future__ import annotations

import gzip
import importlib
import math
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.whole_files import replace_whole
from wattcast.lab.gpuwattch.trace_statistics import (
    KernelPower,
    ListedKernel,
    SampleFigures,
    SteadyRegion,
)
from wattcast.report.figure_style import new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN_KERNEL = "unknown"
NO_STEADY_STATE = "ERROR! Not enough steady state points to generate average"
MOST_BINS = 1024
MOST_PARTS = 9
_ROUNDING = 0.6e-6  # half of the last printed decimal, and a little for float32
# Okabe and Ito's colour-blind-safe set, then lighter and darker ones; a component keeps its colour
# by its place
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_SHADES = (0.0, 0.45, -0.4, 0.7, -0.65)
_GREY = "#BFBFBF"
_NEGLIGIBLE_W = 1e-9


class BackgroundWriter(ExitStack):
    """Runs jobs in order on another thread, at most ``waiting`` behind; an error surfaces at the
    next call.
    """

    def __init__(self, waiting: int = 2) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(1)
        self._jobs: deque[Future[None]] = deque()
        self._waiting = waiting
        self.callback(self._pool.shutdown, cancel_futures=True)

    def submit(
        self,
        work: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Queue ``work(*arguments)``; its arguments must not change any more."""
        self._jobs.append(self._pool.submit(work, *arguments))
        self.drain(self._waiting)

    def drain(self, waiting: int = 0) -> None:
        """Wait until all jobs are done, or all but some that wait."""
        while len(self._jobs) > waiting:
            self._jobs.popleft().result()


class GrowingTextFile(ExitStack):
    """A text file, plain or gzip, that has a temporary name until it is whole."""

    def __init__(
        self,
        path: Path,
        compress: bool,
    ) -> None:
        super().__init__()
        self.path = path.with_name(path.name + ".gz") if compress else path
        with ExitStack() as opening:  # what cannot be opened leaves nothing behind
            part = opening.enter_context(replace_whole(self.path))
            stream: Any = gzip.GzipFile(part, "wb", 6) if compress else part.open("wb", 0)
            self.stream = opening.enter_context(stream)
            self.push(opening.pop_all())

    def write(self, data: bytes | str) -> None:
        """Append. The stream has no buffer of its own: polars writes to the same file directly."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            view = view[self.stream.write(view) :]


def write_number_rows(
    file: GrowingTextFile,
    columns: Sequence[Array],
    trailing_comma: bool,
) -> None:
    """Write rows of numbers with six decimals, as ``%f`` prints them."""
    import polars as pl

    frame = pl.DataFrame(
        {f"c{i}": np.ascontiguousarray(column) for i, column in enumerate(columns)}
    )
    if trailing_comma:
        frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias("end"))
    frame.write_csv(file.stream, include_header=False, float_precision=6)


def write_text_rows(
    file: GrowingTextFile,
    text: bytes,
    drop: Mask,
    keep_comma: bool,
) -> None:
    """Copy rows as they stand in another file, without those of ``drop``."""
    if drop.any():
        stops = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")) + 1
        starts = np.concatenate([[0], stops[:-1]])
        # kept runs lie between pairs of edges
        edges = np.flatnonzero(np.diff(np.concatenate([[1], drop, [1]])))
        kept_runs = zip(edges[0::2], edges[1::2], strict=True)
        text = b"".join(text[starts[first] : stops[last - 1]] for first, last in kept_runs)
    file.write(text if keep_comma else text.replace(b",\n", b"\n"))


class ParquetTable(ExitStack):
    """Columns of every sample, streamed into one Parquet file, which the first rows open."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._arrow: Any = importlib.import_module("pyarrow")
        self._parquet: Any = importlib.import_module("pyarrow.parquet")
        self.path = path
        self._writer: Any = None

    def write(self, columns: Mapping[str, Array]) -> None:
        """Append rows."""
        table = self._arrow.table(
            {name: np.ascontiguousarray(values) for name, values in columns.items()}
        )
        if self._writer is None:
            part = self.enter_context(replace_whole(self.path))
            self._writer = self.enter_context(
                self._parquet.ParquetWriter(part, table.schema, compression="zstd")
            )
        self._writer.write_table(table)


class OutputLabels:
    """Names of components and counters as the files have them; in the original, commas belong to
    most labels.
    """

    def __init__(
        self,
        parts: Sequence[str],
        counters: Sequence[str],
        no_comma: Sequence[str],
        compat: bool,
        totals: bool,
    ) -> None:
        self.totals = totals  # AccelWattch adds threads per warp and totals of the counters
        self.counters = tuple(counters)
        self.part_labels = tuple(parts)
        self.counter_labels = tuple(counters)
        self.power_header = ",".join(("power", *parts))
        if compat:
            self.part_labels = _add_commas(parts, no_comma)
            self.counter_labels = _add_commas(counters, counters[-1:])
            # the header of the original's AccelWattch lacks one comma
            self.power_header = "power," + "".join(self.part_labels)
        self.steady_header = ",".join(("start", "end", "power", "IPC", *counters))


def _add_commas(names: Sequence[str], without: Sequence[str]) -> tuple[str, ...]:
    """Return names with a comma behind each, but for those ``without``."""
    return tuple(name if name in without else name + "," for name in names)


def format_kernel_report(
    kernel: KernelPower,
    names: Sequence[ListedKernel],
    labels: OutputLabels,
) -> Iterator[str]:
    """Yield the lines of the power report on one kernel, in the layout of GPUWattch."""

    def lines(
        kind: str,
        names: Sequence[str],
        values: Array,
    ) -> Iterator[str]:
        for name, value in zip(names, values.tolist(), strict=True):
            yield f"gpu_{kind}_{name} = {_format_stream_number(value)}\n"

    def block(kind: str, figures: SampleFigures) -> Iterator[str]:
        yield f"kernel_{kind}_power = {_format_stream_number(figures.power_w)}\n"
        yield from lines(kind, labels.part_labels, figures.part_w)
        yield from lines(kind, labels.counter_labels, figures.counter)

    name = UNKNOWN_KERNEL
    uid = kernel.index + 1
    if kernel.index < len(names):
        name = names[kernel.index].name
        uid = names[kernel.index].uid
    yield f"kernel_name = {name} \n"
    yield f"kernel_launch_uid = {uid} \n\n"
    yield "Kernel Average Power Data:\n"
    yield from block("avg", kernel.mean)
    if labels.totals:
        if kernel.mean.thread is not None:
            yield f"gpu_avg_threads_per_warp = {_format_stream_number(kernel.mean.thread)}\n"
        yield from lines("tot", labels.counter_labels, kernel.total_counter)
    for kind, title, extreme in (
        ("max", "Maximum", kernel.highest),
        ("min", "Minimum", kernel.lowest),
    ):
        yield f"\nKernel {title} Power Data:\n"
        yield from block(kind, extreme)
    yield "\nAccumulative Power Statistics Over Previous Kernels:\n"
    for kind, watts in (
        ("avg", kernel.so_far_mean_w),
        ("max", kernel.so_far_max_w),
        ("min", kernel.so_far_min_w),
    ):
        yield f"gpu_tot_{kind}_power = {_format_stream_number(watts)}\n"
    yield "\n\n"


def _format_stream_number(value: float) -> str:
    """Return a number as a C++ stream prints it; 0/0 is ``-nan`` there."""
    return "-nan" if math.isnan(value) else f"{value:g}"


def format_steady_rows(
    regions: Iterable[SteadyRegion | None],
    names: Sequence[ListedKernel],
    compat: bool,
    ipc: Sequence[float] = (),
) -> Iterator[str]:
    """Yield the rows of the steady-state file. ``ipc`` holds the figure of each region found, where
    it is known.
    """
    end = "," if compat else ""
    measured_ipc = iter(ipc)
    for region in regions:
        if region is None:
            # the original looks twice when a kernel ends
            yield (NO_STEADY_STATE + "\n") * (2 if compat else 1)
            continue
        value = next(measured_ipc, None)
        if value is None and region.kernel < len(names):
            value = names[region.kernel].ipc
        shown = "" if value is None else f"{value:f}"
        counters = ",".join(f"{c:f}" for c in region.counter)
        yield f"{region.start},{region.end},{region.power_w:f},{shown},{counters}{end}\n"


def restore_idle_sms(
    value: Array,
    column: int,
    sm_count: int,
    sample_cycle: float,
) -> Array:
    """Recover the float32 number of idle SMs that the simulator used from the six decimals that it
    printed.

    Returns a copy of ``value``; a figure that fits no whole number of cycles stays.
    """
    printed = value[:, column]
    active = (np.rint((sm_count - printed) * sample_cycle) / sample_cycle).astype(np.float32)
    idle = (np.float32(sm_count) - active).astype(np.float64)
    restored = value.copy(order="K")
    restored[:, column] = np.where(np.abs(idle - printed) <= _ROUNDING, idle, printed)
    return restored


@dataclass
class PowerBins:
    """Energy by component in bins of equal numbers of samples; bins merge in pairs when there are
    too many.
    """

    parts: int
    width: int = 1  # samples in a bin
    _energy_j: Array = field(init=False)
    _time_s: Array = field(init=False)
    _sample: int = 0

    def __post_init__(self) -> None:
        self._energy_j = np.zeros((2 * MOST_BINS, self.parts))
        self._time_s = np.zeros(2 * MOST_BINS)

    def add(
        self,
        part_w: Array,
        duration_s: Array,
    ) -> None:
        """Add consecutive samples."""
        count = len(duration_s)
        if not count:
            return
        while (self._sample + count - 1) // self.width >= 2 * MOST_BINS:
            paired_j = self._energy_j[0::2] + self._energy_j[1::2]
            paired_s = self._time_s[0::2] + self._time_s[1::2]
            self._energy_j = np.concatenate([paired_j, np.zeros((MOST_BINS, self.parts))])
            self._time_s = np.concatenate([paired_s, np.zeros(MOST_BINS)])
            self.width *= 2
        bins = (self._sample + np.arange(count)) // self.width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        self._energy_j[bins[starts]] += np.add.reduceat(
            part_w * duration_s[:, np.newaxis], starts, axis=0
        )
        self._time_s[bins[starts]] += np.add.reduceat(duration_s, starts)
        self._sample += count

    def mean(self) -> tuple[Array, float, Array]:
        """Return the start time of each bin, the end of the last, and mean watts by part, ``(bin,
        part)``.
        """
        used = self._time_s > 0
        time_s = self._time_s[used]
        end_s = np.cumsum(time_s)
        return (
            np.concatenate([[0.0], end_s[:-1]]),
            float(end_s[-1]),
            self._energy_j[used] / time_s[:, np.newaxis],
        )


def draw_component_power(
    timeline: PowerBins,
    parts: tuple[str, ...],
    title: str,
    caption: str,
) -> Figure:
    """Draw components stacked over time: the largest by name, the rest together."""
    start_s, end_s, part_w = timeline.mean()
    largest = np.argsort(-part_w.sum(axis=0), kind="stable")[:MOST_PARTS]
    shown = [int(i) for i in largest if part_w[:, i].any()]
    heights_w = [part_w[:, i] for i in shown]
    labels = [parts[i] for i in shown]
    colours = [_part_colour(i) for i in shown]
    remainder_w = part_w.sum(axis=1) - part_w[:, shown].sum(axis=1)
    if remainder_w.max(initial=0.0) > _NEGLIGIBLE_W:
        heights_w.append(remainder_w)
        labels.append("all others")
        colours.append(_GREY)
    figure, axes = new_axes(10.0, 5.0)
    axes.stackplot(
        np.append(start_s, end_s) * 1e6,
        [np.append(height_w, height_w[-1]) for height_w in heights_w],
        labels=labels,
        colors=colours,
        step="post",
    )
    axes.set(xlabel="Time (µs)", ylabel="Power (W)")
    axes.set_ylim(bottom=0.0)
    axes.set_title(title)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    samples = "sample" if timeline.width == 1 else "samples"
    note = f"{caption}; each step is the mean of {timeline.width} {samples}"
    figure.supxlabel(note, color="#666666")
    return figure


def _part_colour(place: int) -> str:
    """Return the colour of a component by its place: a base colour, then lighter or darker ones."""
    base = _COLOURS[place % len(_COLOURS)]
    shade = _SHADES[place // len(_COLOURS) % len(_SHADES)]
    colour = "#"
    for start in (1, 3, 5):
        channel = int(base[start : start + 2], 16)
        room = 255 - channel if shade > 0 else channel
        mixed = channel + room * shade
        colour += f"{round(mixed):02X}"
    return colour
