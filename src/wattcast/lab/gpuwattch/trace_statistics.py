"""Gather statistics of a trace from blocks of samples: power by kernel, steady states, and where
kernels end.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value, clip_text
from wattcast.core.strict_files import read_bytes
from wattcast.lab.gpuwattch.simulator_config import SteadyStateDefinition

IDLE_COLUMNS = (
    "PIPE_A",
    "IDLE_CORE_N",
    "CONST_DYNAMICN",
    "constant_power",
)  # may be above zero without work
_MAX_BYTE = 64 << 20
_MOST_DIGITS = 18  # of a count of cycles: ten years of them
_COLUMNS = ("name", "uid", "samples", "cycles", "ipc", "threads")
_LOG_COLUMNS = {
    "kernel_name": "name",
    "kernel_launch_uid": "uid",
    "gpu_sim_cycle": "cycles",
    "gpu_ipc": "ipc",
    "gpu_avg_threads_per_warp": "mean_threads",
    "gpgpu_n_tot_thrd_icount": "total_threads",
    "gpgpu_n_tot_w_icount": "total_warps",
}


@dataclass(frozen=True)
class SampleFigures:
    """Figures of one sample, or their mean or sum over several."""

    power_w: float
    part_w: Array
    counter: Array
    thread: float | None  # active threads of a warp; None: not known


@dataclass(frozen=True)
class KernelPower:
    """The figures that a report gives of one kernel."""

    index: int
    samples: int
    mean: SampleFigures
    total_counter: Array
    highest: SampleFigures  # of the sample with the highest power
    lowest: SampleFigures
    so_far_mean_w: float  # over all samples until this kernel ended
    so_far_max_w: float
    so_far_min_w: float
    finished: bool = True


class KernelTally:
    """Gathers the power of each kernel while its samples go by, and of everything before.

    A row of sums and of extremes has the total watts, then those of the parts, the counters, and
    the active threads."""

    def __init__(
        self,
        parts: int,
        counters: int,
    ) -> None:
        self.kernels: list[KernelPower] = []
        self._edges = (1, 1 + parts, 1 + parts + counters)
        self._all_sum = self._all_max = self._all_min = 0.0
        self._all_count = 0
        self._start_kernel()

    def _start_kernel(self) -> None:
        self.running = 0  # samples of the kernel that has not ended yet
        nothing = np.zeros(self._edges[-1] + 1)
        self._sum = nothing
        self._high = nothing
        self._low = nothing

    def add(
        self,
        total_w: Array,
        part_w: Array,
        counter: Array,
        thread: Array | None,
    ) -> None:
        """Add consecutive samples of the running kernel."""
        if not len(total_w):
            return

        def row(of: Callable[[Array], Array]) -> Array:
            threads = [np.nan] if thread is None else [of(thread)]
            return np.concatenate([[of(total_w)], of(part_w), of(counter), threads])

        high = int(np.argmax(total_w))
        low = int(np.argmin(total_w))
        if not self.running or total_w[high] > self._high[0]:
            self._high = row(itemgetter(high))
        if not self.running or total_w[low] < self._low[0]:
            self._low = row(itemgetter(low))
        sums = row(lambda values: values.sum(axis=0))
        self._sum = self._sum + sums
        self.running += len(total_w)
        self._all_sum += float(sums[0])
        self._all_count += len(total_w)
        self._all_max = max(self._all_max, float(total_w[high]))
        self._all_min = min(self._all_min or np.inf, float(total_w[low]))

    def end(self, finished: bool = True) -> None:
        """End the running kernel and append its figures."""
        with np.errstate(invalid="ignore"):
            mean_row = np.true_divide(self._sum, self.running)
        mean_row[0] = mean_row[0] if self.running else 0.0
        kernel = KernelPower(
            index=len(self.kernels),
            samples=self.running,
            mean=self._name_figures(mean_row),
            total_counter=self._name_figures(self._sum).counter,
            highest=self._name_figures(self._high),
            lowest=self._name_figures(self._low),
            so_far_mean_w=self._all_sum / self._all_count if self._all_count else np.nan,
            so_far_max_w=self._all_max,
            so_far_min_w=self._all_min,
            finished=finished,
        )
        self.kernels.append(kernel)
        self._start_kernel()

    def _name_figures(self, row: Array) -> SampleFigures:
        """Return the figures of a row of sums or extremes by name."""
        power_w, part_w, counter, thread = np.split(row, self._edges)
        is_thread_known = not np.isnan(thread[0])
        return SampleFigures(
            float(power_w[0]),
            part_w,
            counter,
            float(thread[0]) if is_thread_known else None,
        )


@dataclass(frozen=True)
class SteadyRegion:
    """One stretch of samples in which power stays near its mean."""

    start: int  # its first sample
    end: int  # the sample after its last
    kernel: int
    power_w: float  # mean
    counter: Array  # means


@dataclass
class SteadyStateFinder:
    """Finds steady states while blocks of samples go by.

    A region grows while each sample lies within the allowed deviation of the region's mean so far,
    which makes the search sequential."""

    definition: SteadyStateDefinition
    counters: int
    # None: a kernel without a steady state, before the first
    regions: list[SteadyRegion | None] = field(default_factory=list)
    _start: int = 0
    _count: int = 0
    _sum: float = 0.0
    _kernel: int = 0
    _sample: int = 0

    def __post_init__(self) -> None:
        self._open_sums = np.zeros(self.counters)  # sums of the open region's earlier blocks

    def add(
        self,
        power_w: Array,
        counter: Array,
    ) -> None:
        """Add consecutive samples of the running kernel."""
        first = self._sample
        deviation_w = self.definition.deviation_w
        start = self._start
        count = self._count
        total = self._sum
        for i, watts in enumerate(power_w.tolist()):
            if not count:
                start = first + i
                count = 1
                total = watts
            elif -deviation_w < watts - total / count < deviation_w:
                total += watts
                count += 1
            else:
                if count > self.definition.minimum_sample:
                    sums = counter[max(start - first, 0) : i].sum(axis=0)
                    sums = sums + self._open_sums if start < first else sums
                    self.regions.append(
                        SteadyRegion(
                            start,
                            first + i,
                            self._kernel,
                            total / count,
                            sums / count,
                        )
                    )
                count = 0
        self._start = start
        self._count = count
        self._sum = total
        self._sample = first + len(power_w)
        if not self._count:
            self._open_sums = np.zeros(self.counters)
        elif self._start >= first:
            self._open_sums = counter[self._start - first :].sum(axis=0)
        else:
            self._open_sums = self._open_sums + counter.sum(axis=0)

    def end_kernel(self) -> None:
        """End the running kernel and close its open region."""
        if self._count > self.definition.minimum_sample:
            mean = self._sum / self._count
            self.regions.append(
                SteadyRegion(
                    self._start,
                    self._sample,
                    self._kernel,
                    mean,
                    self._open_sums / self._count,
                )
            )
        elif not any(self.regions):
            self.regions.append(None)
        self._count, self._kernel = 0, self._kernel + 1
        self._open_sums = np.zeros(self.counters)


@dataclass(frozen=True)
class ListedKernel:
    """One launch in a list of kernels."""

    name: str
    uid: int
    samples: int | None = None
    ipc: float | None = None
    # active threads of a warp, mean over all samples, as AccelWattch reports it
    mean_threads: float | None = None
    threads: float | None = None  # active threads of an executed warp


def read_kernel_list(path: Path, sample_cycle: int) -> tuple[ListedKernel, ...]:
    """Read the launches in order: one name per line, or CSV with a header, or a simulator's own
    output.

    CSV columns: ``name`` and, if known, ``uid``, ``samples`` or ``cycles``, ``ipc``, ``threads``
    (active ones of a warp). A simulator's output or power report is searched for the names in
    ``_LOG_COLUMNS``."""
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if re.search(r"^\s*kernel_name\s*=", text, re.MULTILINE):
        launches = _read_launches_of_log(text)
    elif lines and lines[0].split(",")[0].strip() == "name":
        launches = _read_launches_of_table(text, path.name)
    else:
        launches = [{"name": clip_text(line, 4096)} for line in lines]

    kernels = []
    sample_counts = _count_samples(launches, sample_cycle)
    for i, (launch, count) in enumerate(zip(launches, sample_counts, strict=True), start=1):
        samples = launch.get("samples")
        kernels.append(
            ListedKernel(
                name=launch["name"],
                uid=int(launch.get("uid") or i),
                samples=int(samples) if samples else count,
                ipc=parse_figure(launch.get("ipc")),
                mean_threads=parse_figure(launch.get("mean_threads")),
                threads=parse_figure(launch.get("threads")),
            )
        )
    return tuple(kernels)


def _read_launches_of_log(text: str) -> list[dict[str, str]]:
    """Return what a simulator's output says of each launch.

    Instructions of threads and warps add up over kernels there, so each kernel has what the one
    before had not.
    """
    launches: list[dict[str, str]] = []
    pattern = rf"^\s*({'|'.join(_LOG_COLUMNS)})\s*=\s*(\S+)"
    for key, value in re.findall(pattern, text, re.MULTILINE):
        if key == "kernel_name":
            launches.append({})
        if launches:
            launches[-1].setdefault(_LOG_COLUMNS[key], value)

    threads_before = 0.0
    warps_before = 0.0
    for launch in launches:
        launch["cycles"] = str(parse_figure(launch.get("cycles")) or "")
        threads = parse_figure(launch.get("total_threads")) or 0.0
        warps = parse_figure(launch.get("total_warps")) or 0.0
        if warps > warps_before:
            launch["threads"] = repr((threads - threads_before) / (warps - warps_before))
            threads_before = threads
            warps_before = warps
    return launches


def _read_launches_of_table(text: str, where: str) -> list[dict[str, str]]:
    """Return the cells of each launch, without spaces around them; a blank cell is empty."""
    reader = csv.DictReader(io.StringIO(text, newline=None))
    strange = [name for name in reader.fieldnames or () if name not in _COLUMNS]
    if strange:
        wanted = f"columns of {', '.join(_COLUMNS)}"
        raise bad_value(f"{where}: header", wanted, ", ".join(strange))
    launches = []
    for line, row in enumerate(reader, start=2):
        launch = {name: str(row.get(name) or "").strip() for name in _COLUMNS}
        for name in ("uid", "samples", "cycles"):
            count = launch[name]
            if count and not (count.isdecimal() and len(count) <= _MOST_DIGITS):
                wanted = f"a whole number of at most {_MOST_DIGITS} digits"
                raise bad_value(f"{where}: line {line}: {name}", wanted, count)
        launches.append(launch)
    return launches


def _count_samples(launches: list[dict[str, str]], sample_cycle: int) -> list[int | None]:
    """Return how many samples each launch has, where all say how many cycles they take.

    A sample ends at every multiple of its length since the program began.
    """
    if not all(launch.get("cycles") for launch in launches):
        return [None] * len(launches)
    cycles = (float(launch["cycles"]) for launch in launches)
    ends = [total // sample_cycle for total in accumulate(cycles, initial=0.0)]
    return [int(after - before) for before, after in pairwise(ends)]


def parse_figure(text: str | None) -> float | None:
    """Return a finite number that a simulator printed, None where there is none."""
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is None or np.isfinite(value) else None


@dataclass
class KernelEndFinder:
    """Marks the rows that end a kernel, block after block.

    The simulator writes the last row of a kernel twice, so a repeated row in which work was done
    ends a kernel. A list with the number of samples of every kernel overrides this."""

    columns: tuple[str, ...]
    kernels: tuple[ListedKernel, ...] = ()
    # rows that end kernels, where the list of kernels says so
    _planned: list[int] = field(default_factory=list)
    _row: int = 0
    _last: Array | None = None

    def __post_init__(self) -> None:
        counts = [kernel.samples for kernel in self.kernels if kernel.samples is not None]
        if len(counts) == len(self.kernels):
            # each kernel has its samples and the row that ends it
            self._planned = (np.cumsum(np.array(counts, dtype=int) + 1) - 1).tolist()
        # the list of kernels, and not the rows, determines where kernels end
        self.by_list = bool(self._planned)

    def mark(
        self,
        value: Array,
        following: Array | None,
    ) -> Mask:
        """Mark the rows of a block that end a kernel; ``following`` is the first row after the
        block, if any.
        """
        count = len(value)
        ends = np.zeros(count, dtype=np.bool_)
        if self._planned:
            planned = np.array(self._planned) - self._row
            ends[planned[(planned >= 0) & (planned < count)]] = True
        elif count:
            same = np.zeros(count + 1, dtype=np.bool_)  # same[i]: row i equals row i − 1
            same[0] = self._last is not None and bool((value[0] == self._last).all())
            same[1:count] = (value[1:] == value[:-1]).all(axis=1)
            same[count] = following is not None and bool((value[-1] == following).all())
            working = np.array([name not in IDLE_COLUMNS for name in self.columns])
            ends = same[:-1] & ~same[1:]
            candidates = np.flatnonzero(ends)
            ends[candidates] = (value[candidates][:, working] > 0).any(axis=1)
            empty = np.flatnonzero(value[:, 0] == 0)
            ends[empty[(value[empty] == 0).all(axis=1)]] = True  # a kernel without a sample
        self._row += count
        self._last = value[-1].copy() if count else self._last
        return ends
