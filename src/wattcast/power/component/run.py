"""A metric trace in; report, traces, steady states, Parquet and figure out. One pass, blocks of rows, flat memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from wattcast.activity import Activity
from wattcast.activity.simulated import INSTRUCTIONS, THREADS, Dialect, MetricTrace, Sampling
from wattcast.activity.trace_file import Block, TraceFault
from wattcast.arrays import Array
from wattcast.power.component.components import ComponentSet
from wattcast.power.component.figure import Timeline
from wattcast.power.component.kernels import KernelEnds, KernelName, Mask
from wattcast.power.component.model import ComponentPower
from wattcast.power.component.outputs import Background, ParquetTable, TextFile, write_rows, write_text_rows
from wattcast.power.component.printed import Printed
from wattcast.power.component.report_file import Labels, report, steady_rows
from wattcast.power.component.simulator_config import SimulatorConfig
from wattcast.power.component.statistics import KernelPower, Tally
from wattcast.power.component.steady import Region, SteadyStates
from wattcast.power.interface import Power


@dataclass(frozen=True)
class Wanted:
    """Which files to write."""

    report: bool = True
    power_trace: bool = True
    metric_trace: bool = True
    steady: bool = True
    parquet: bool = True
    figure: bool = True  # only what it needs: it is drawn elsewhere


@dataclass(frozen=True)
class TraceRun:
    """Everything one pass needs."""

    trace: MetricTrace
    model: ComponentPower
    components: ComponentSet
    sampling: Sampling
    out: Path
    kernels: tuple[KernelName, ...] = ()
    config: SimulatorConfig = field(default_factory=SimulatorConfig)
    wanted: Wanted = field(default_factory=Wanted)
    compress: bool | None = None  # default: as the trace is

    @property
    def compat(self) -> bool:
        """Whether the originals' quirks are wanted."""
        return self.components.compat


@dataclass
class TraceResult:
    """What a pass found."""

    files: list[Path] = field(default_factory=list)
    kernels: list[KernelPower] = field(default_factory=list)
    regions: list[Region | None] = field(default_factory=list)
    timeline: Timeline | None = None
    samples: int = 0
    duration_s: float = 0.0
    energy_j: float = 0.0
    notes: list[str] = field(default_factory=list)
    fault: TraceFault | None = None


def run_trace(job: TraceRun) -> TraceResult:
    """Compute and write everything. A damaged trace yields what its good samples give, and ``fault`` is set."""
    work = _Work(job)
    with ExitStack() as files:
        work.open(files)
        files.enter_context(work.writer)
        for block, following in _with_following(job.trace, work.result):
            work.block(block, following)
        work.writer.drain()
        work.close()
    work.result.notes.extend(_notes(job, work.result, work.ends.by_list))
    return work.result


def _with_following(trace: MetricTrace, result: TraceResult) -> Iterator[tuple[Block, Array | None]]:
    """Blocks, each with the first row of the next; a fault in the file ends them and is kept."""
    held: Block | None = None
    try:
        for block in _ahead(trace.blocks()):
            if held is not None:
                yield held, block.value[0]
            held = block
    except TraceFault as fault:
        result.fault = fault
    if held is not None:
        yield held, None


def _ahead(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same blocks, the next one read while the last is worked on."""
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(next, blocks, None)
        while (block := waiting.result()) is not None:
            waiting = reader.submit(next, blocks, None)
            yield block


class _Work:
    """The state of one pass."""

    def __init__(self, job: TraceRun) -> None:
        self.job = job
        self.result = TraceResult()
        columns = job.trace.file.columns
        totals = job.components.dialect is Dialect.ACCELWATTCH
        self.labels = Labels(job.model.parts, columns, job.components.no_comma, job.compat, totals)
        self.compress = job.trace.file.is_gzip if job.compress is None else job.compress
        self.ends = KernelEnds(columns, job.kernels)
        self.tally = Tally(len(job.model.parts), len(columns))
        self.states = SteadyStates(job.config.steady, len(columns))
        self.timeline = Timeline(len(job.model.parts))
        self.printed = Printed.of(job.trace, job.sampling, job.config.sm_count) if job.compat else None
        self.left_out = [i for i, p in enumerate(job.model.parts) if p in job.components.steady_leaves_out]
        self.last_w = 0.0
        self.writer = Background()

    def open(self, files: ExitStack) -> None:
        """Open the files that grow with the trace."""

        def text(wanted: bool, name: str) -> TextFile | None:
            if not wanted:
                return None
            file = files.enter_context(TextFile(self.job.out / name, self.compress))
            self.result.files.append(file.path)
            return file

        wanted = self.job.wanted
        self.report = None
        self.power = text(wanted.power_trace, "power_trace.log")
        self.metric = text(wanted.metric_trace, "metric_trace.log")
        self.steady = text(wanted.steady, "steady_state_tracking.log")
        self.parquet = None
        if wanted.report:
            self.report = files.enter_context(TextFile(self.job.out / "power_report.log", compress=False))
            self.result.files.append(self.report.path)
        if wanted.parquet:
            self.parquet = files.enter_context(ParquetTable(self.job.out / "samples.parquet"))
            self.result.files.append(self.parquet.path)
        if self.power:
            self.power.write(self.labels.power_header + "\n")
        if self.metric:
            self.metric.write(",".join(self.labels.counters) + "\n")

    def block(self, block: Block, following: Array | None) -> None:
        """One block: mark kernel ends, compute, write, count."""
        ends = self.ends.mark(block.value, following)
        sample = np.maximum(self.result.samples + np.cumsum(~ends) - 1.0, 0.0)
        exact = block if self.printed is None else replace(block, value=self.printed.restore(block.value))
        activity = self.job.trace.activity(exact, self.job.sampling, sample)
        power = self.job.model.power(activity)
        total_w = self._total(power, activity)
        self._write(block, power, total_w, ends)
        self._count(power, total_w, exact, activity, ends)

    def close(self) -> None:
        """What only the end of the trace allows."""
        if self.tally.running and not self.job.compat:  # the simulator reports a kernel only when it has ended
            self.tally.end(finished=False)
        result, job = self.result, self.job
        result.kernels, result.regions, result.timeline = self.tally.kernels, self.states.found, self.timeline
        if self.report:
            for kernel in result.kernels:
                self.report.write("".join(report(kernel, job.kernels, self.labels)))
        if self.steady:
            self.steady.write(self.labels.steady_header + "\n")
            per_cycle = 1.0 / job.sampling.sample_cycle
            at = job.trace.optional.get(INSTRUCTIONS)
            ipc = [r.counter[at] * per_cycle for r in result.regions if r is not None] if at is not None else []
            self.steady.write("".join(steady_rows(result.regions, job.kernels, job.compat, ipc)))

    def _total(self, power: Power, activity: Activity) -> Array:
        if self.job.compat and activity.has("core_voltage"):
            return self.job.model.original_total_w(power, activity, self.job.components.steady_leaves_out)
        return power.total_w

    def _write(self, block: Block, power: Power, total_w: Array, ends: Mask) -> None:
        compat = self.job.compat
        drop = np.zeros_like(ends) if compat else ends
        part_w = power.part_w
        if compat:
            total_w, part_w = self._empty_kernels(block, total_w, part_w, ends)
        if self.power:
            keep = slice(None) if not drop.any() else ~drop
            columns = [total_w[keep], *(part_w[keep, i] for i in range(part_w.shape[1]))]
            self.writer.do(write_rows, self.power, columns, compat)
        if self.metric:
            self.writer.do(write_text_rows, self.metric, block.text, drop, compat)

    def _empty_kernels(self, block: Block, total_w: Array, part_w: Array, ends: Mask) -> tuple[Array, Array]:
        """Rows of kernels without a sample: the simulator prints zeros behind the total of the sample before."""
        empty = np.flatnonzero(ends)
        empty = empty[(block.value[empty] == 0).all(axis=1)]
        if empty.size:
            total_w, part_w = total_w.copy(), part_w.copy(order="K")
            for row in empty:
                total_w[row] = total_w[row - 1] if row else self.last_w
                part_w[row] = 0.0
        self.last_w = float(total_w[-1])
        return total_w, part_w

    def _count(self, power: Power, total_w: Array, block: Block, activity: Activity, ends: Mask) -> None:
        """Statistics of each stretch between kernel ends."""
        thread = self._threads(block, activity)
        steady_w = total_w
        if self.job.compat and self.left_out:
            steady_w = total_w - power.part_w[:, self.left_out].sum(axis=1)
        marks = np.flatnonzero(ends)
        keep = ~ends
        for a, b in pairwise([-1, *marks.tolist(), len(block)]):
            run = slice(a + 1, b)
            if b > a + 1:
                self.tally.add(
                    total_w[run], power.part_w[run], block.value[run], None if thread is None else thread[run]
                )
                if self.steady:
                    self.states.add(steady_w[run], block.value[run])
            if b < len(block):
                self.tally.end()
                self.states.end_kernel()
        duration_s = np.broadcast_to(activity.duration_s, ends.shape)
        self._keep_samples(power, total_w, duration_s, activity, ends, keep)

    def _keep_samples(
        self, power: Power, total_w: Array, duration_s: Array, activity: Activity, ends: Mask, keep: Mask
    ) -> None:
        """Whole-trace sums, figure and table, over samples alone."""
        kernel = len(self.tally.kernels) - int(ends.sum()) + np.cumsum(ends)
        if ends.any():
            duration_s, total_w, part_w, kernel = duration_s[keep], total_w[keep], power.part_w[keep], kernel[keep]
        else:
            part_w = power.part_w
        result = self.result
        if self.job.wanted.figure:
            self.timeline.add(part_w, duration_s)
        if self.parquet and len(total_w):
            time_s = result.duration_s + np.cumsum(duration_s) - duration_s
            clock_hz = np.broadcast_to(np.asarray(activity.at.clock_hz), ends.shape)[keep]
            columns = {
                "sample": result.samples + np.arange(len(total_w)),
                "kernel": kernel,
                "time_s": time_s,
                "duration_s": duration_s,
                "clock_hz": clock_hz,
                "power_w": total_w,
            }
            columns |= {name: part_w[:, i] for i, name in enumerate(power.parts)}
            self.writer.do(self.parquet.write, columns)
        result.samples += len(total_w)
        result.duration_s += float(duration_s.sum())
        result.energy_j += float((total_w * duration_s).sum())

    def _threads(self, block: Block, activity: Activity) -> Array | None:
        static = self.job.model.static
        if static is None:
            return None
        if THREADS in self.job.trace.optional:
            return self.job.trace.column(block, THREADS)
        return static.lanes(activity)


def _notes(job: TraceRun, result: TraceResult, by_list: bool) -> list[str]:
    """What the trace could not say and what was done about it."""
    said = []
    ended = [k for k in result.kernels if k.finished]
    if not job.kernels:
        said.append("kernel names are not in a metric trace: they are left out (--kernels gives them)")
    elif len(ended) != len(job.kernels):
        how = "by its list" if by_list else "found by their repeated rows"
        said.append(
            f"{len(job.kernels)} kernels are listed, {len(ended)} ended in the trace, {how}: names may be shifted. "
            "Give each kernel's samples or cycles in the list"
        )
    if any(k.ipc is not None for k in job.kernels) and INSTRUCTIONS not in job.trace.optional:
        said.append("IPC of steady states is that of the whole kernel, from the list")
    elif INSTRUCTIONS not in job.trace.optional:
        said.append("IPC is not in a metric trace: it is left out of the steady states")
    if any(not k.finished for k in result.kernels):
        said.append("the last kernel had not ended when the trace did")
    return said
