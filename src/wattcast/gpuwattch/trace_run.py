"""Turn a metric trace into a power report, traces, steady states and a Parquet table.

One pass goes over the trace in blocks of rows, so that memory does not grow with its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.gpuwattch.architecture import SimulatorConfig
from wattcast.gpuwattch.energy_table import ComponentSet
from wattcast.gpuwattch.trace_outputs import (
    BackgroundWriter,
    GrowingTextFile,
    IdleSmRestorer,
    OutputLabels,
    ParquetTable,
    PowerBins,
    format_kernel_report,
    format_steady_rows,
    write_number_rows,
    write_text_rows,
)
from wattcast.gpuwattch.trace_reading import (
    INSTRUCTIONS,
    THREADS,
    MetricTrace,
    SimulatorDialect,
    TraceBlock,
    TraceFault,
    TraceSampling,
)
from wattcast.gpuwattch.trace_statistics import (
    KernelEndFinder,
    KernelPower,
    KernelTally,
    ListedKernel,
    SteadyRegion,
    SteadyStateFinder,
)
from wattcast.power.component_power import ComponentPower
from wattcast.power.power_model import Power


@dataclass(frozen=True)
class WantedFiles:
    """The files that a pass writes."""

    report: bool = True
    power_trace: bool = True
    metric_trace: bool = True
    steady: bool = True
    parquet: bool = True
    figure: bool = True  # only its data are gathered: it is drawn elsewhere


@dataclass(frozen=True)
class TraceRun:
    """Everything one pass needs."""

    trace: MetricTrace
    model: ComponentPower
    components: ComponentSet
    sampling: TraceSampling
    out: Path
    kernels: tuple[ListedKernel, ...] = ()
    config: SimulatorConfig = field(default_factory=SimulatorConfig)
    wanted: WantedFiles = field(default_factory=WantedFiles)
    compress: bool | None = None  # default: as the trace is

    @property
    def compat(self) -> bool:
        """Whether the quirks of the original programs are reproduced."""
        return self.components.compat


@dataclass
class TraceResult:
    """The outcome of a pass."""

    files: list[Path] = field(default_factory=list)
    kernels: list[KernelPower] = field(default_factory=list)
    regions: list[SteadyRegion | None] = field(default_factory=list)
    timeline: PowerBins | None = None
    samples: int = 0
    duration_s: float = 0.0
    energy_j: float = 0.0
    notes: list[str] = field(default_factory=list)
    fault: TraceFault | None = None


def run_trace(job: TraceRun) -> TraceResult:
    """Compute and write everything. A damaged trace yields the results of its good samples, and ``fault`` is set."""
    work = _TracePass(job)
    with ExitStack() as files:
        work.open_files(files)
        files.enter_context(work.writer)
        for block, following in _blocks_with_following(job.trace, work.result):
            work.process_block(block, following)
        work.writer.drain()
        work.finish()
    result, notes = work.result, work.result.notes
    ended = [k for k in result.kernels if k.finished]
    if not job.kernels:
        notes.append("kernel names are not in a metric trace: they are left out (--kernels gives them)")
    elif len(ended) != len(job.kernels):
        how = "by its list" if work.ends.by_list else "found by their repeated rows"
        notes.append(
            f"{len(job.kernels)} kernels are listed, {len(ended)} ended in the trace, {how}: names may be shifted. "
            "Give each kernel's samples or cycles in the list"
        )
    if any(k.ipc is not None for k in job.kernels) and INSTRUCTIONS not in job.trace.optional:
        notes.append("IPC of steady states is that of the whole kernel, from the list")
    elif INSTRUCTIONS not in job.trace.optional:
        notes.append("IPC is not in a metric trace: it is left out of the steady states")
    if any(not k.finished for k in result.kernels):
        notes.append("the last kernel had not ended when the trace did")
    return result


def _blocks_with_following(trace: MetricTrace, result: TraceResult) -> Iterator[tuple[TraceBlock, Array | None]]:
    """Yield blocks, each with the first row of the next, which is read meanwhile; keep a fault of the file."""
    held: TraceBlock | None = None
    blocks = trace.blocks()
    with ThreadPoolExecutor(1) as reader:
        try:
            waiting = reader.submit(next, blocks, None)
            while (block := waiting.result()) is not None:
                waiting = reader.submit(next, blocks, None)
                if held is not None:
                    yield held, block.value[0]
                held = block
        except TraceFault as fault:
            result.fault = fault
    if held is not None:
        yield held, None


class _TracePass:
    """The state of one pass over a trace."""

    def __init__(self, job: TraceRun) -> None:
        self.job = job
        self.result = TraceResult()
        columns, parts = job.trace.file.columns, job.model.parts
        totals = job.components.dialect is SimulatorDialect.ACCELWATTCH
        self.labels = OutputLabels(parts, columns, job.components.no_comma, job.compat, totals)
        self.compress = job.trace.file.is_gzip if job.compress is None else job.compress
        self.ends = KernelEndFinder(columns, job.kernels)
        self.tally = KernelTally(len(parts), len(columns))
        self.states = SteadyStateFinder(job.config.steady, len(columns))
        self.timeline = PowerBins(len(parts))
        self.restorer = IdleSmRestorer.make(job.trace, job.sampling, job.config.sm_count) if job.compat else None
        self.left_out = [i for i, p in enumerate(parts) if p in job.components.steady_leaves_out]
        self.last_w = 0.0
        self.writer = BackgroundWriter()

    def open_files(self, files: ExitStack) -> None:
        """Open the files that grow with the trace and write their headers."""

        def text(wanted: bool, name: str, compress: bool) -> GrowingTextFile | None:
            if not wanted:
                return None
            file = files.enter_context(GrowingTextFile(self.job.out / name, compress))
            self.result.files.append(file.path)
            return file

        wanted = self.job.wanted
        self.power = text(wanted.power_trace, "power_trace.log", self.compress)
        self.metric = text(wanted.metric_trace, "metric_trace.log", self.compress)
        self.steady = text(wanted.steady, "steady_state_tracking.log", self.compress)
        self.report = text(wanted.report, "power_report.log", compress=False)
        self.parquet = None
        if wanted.parquet:
            self.parquet = files.enter_context(ParquetTable(self.job.out / "samples.parquet"))
            self.result.files.append(self.parquet.path)
        if self.power:
            self.power.write(self.labels.power_header + "\n")
        if self.metric:
            self.metric.write(",".join(self.labels.counters) + "\n")

    def process_block(self, block: TraceBlock, following: Array | None) -> None:
        """Find kernel ends in a block, compute its power, write it, and add it to the statistics."""
        job = self.job
        ends = self.ends.mark(block.value, following)
        sample = np.maximum(self.result.samples + np.cumsum(~ends) - 1.0, 0.0)
        exact = block if self.restorer is None else replace(block, value=self.restorer.restore(block.value))
        activity = job.trace.activity(exact, job.sampling, sample)
        power = job.model.power(activity)
        total_w = power.total_w
        if job.compat and activity.has("core_voltage"):
            total_w = job.model.original_total_w(power, activity, job.components.steady_leaves_out)
        self._write_rows(block, power, total_w, ends)
        thread = None
        if job.model.static is not None:
            has_threads = THREADS in job.trace.optional
            thread = job.trace.column(exact, THREADS) if has_threads else job.model.static.lanes(activity)
        self._add_kernels(power, total_w, exact, thread, ends)
        duration_s = np.broadcast_to(activity.duration_s, ends.shape)
        self._sum_samples(power, total_w, duration_s, np.asarray(activity.at.clock_hz), ends)

    def finish(self) -> None:
        """Report kernels and steady states, which only the end of the trace completes."""
        if self.tally.running and not self.job.compat:  # the simulator reports a kernel only when it has ended
            self.tally.end(finished=False)
        result, job = self.result, self.job
        result.kernels, result.regions, result.timeline = self.tally.kernels, self.states.found, self.timeline
        if self.report:
            for kernel in result.kernels:
                self.report.write("".join(format_kernel_report(kernel, job.kernels, self.labels)))
        if self.steady:
            self.steady.write(self.labels.steady_header + "\n")
            per_cycle = 1.0 / job.sampling.sample_cycle
            column = job.trace.optional.get(INSTRUCTIONS)
            regions = [r for r in result.regions if r is not None] if column is not None else []
            ipc = [float(r.counter[column]) * per_cycle for r in regions]
            self.steady.write("".join(format_steady_rows(result.regions, job.kernels, job.compat, ipc)))

    def _write_rows(self, block: TraceBlock, power: Power, total_w: Array, ends: Mask) -> None:
        compat, part_w = self.job.compat, power.part_w
        drop = np.zeros_like(ends) if compat else ends
        if compat:
            # of a kernel without a sample the simulator prints zeros behind the total of the sample before
            empty = np.flatnonzero(ends)
            empty = empty[(block.value[empty] == 0).all(axis=1)]
            if empty.size:
                total_w, part_w = total_w.copy(), part_w.copy(order="K")
                for row in empty:
                    total_w[row] = total_w[row - 1] if row else self.last_w
                    part_w[row] = 0.0
            self.last_w = float(total_w[-1])
        if self.power:
            keep = slice(None) if not drop.any() else ~drop
            columns = [total_w[keep], *(part_w[keep, i] for i in range(part_w.shape[1]))]
            self.writer.submit(write_number_rows, self.power, columns, compat)
        if self.metric:
            self.writer.submit(write_text_rows, self.metric, block.text, drop, compat)

    def _add_kernels(self, power: Power, total_w: Array, block: TraceBlock, lanes: Array | None, ends: Mask) -> None:
        """Add each stretch between kernel ends to the statistics of its kernel."""
        steady_w = total_w
        if self.job.compat and self.left_out:
            steady_w = total_w - power.part_w[:, self.left_out].sum(axis=1)
        for a, b in pairwise([-1, *np.flatnonzero(ends).tolist(), len(block)]):
            run = slice(a + 1, b)
            if b > a + 1:
                threads = None if lanes is None else lanes[run]
                self.tally.add(total_w[run], power.part_w[run], block.value[run], threads)
                if self.steady:
                    self.states.add(steady_w[run], block.value[run])
            if b < len(block):
                self.tally.end()
                self.states.end_kernel()

    def _sum_samples(self, power: Power, total_w: Array, duration_s: Array, clock_hz: Array, ends: Mask) -> None:
        """Add the samples, without the rows that only end a kernel, to sums, figure and table."""
        keep, result = ~ends, self.result
        kernel = (len(self.tally.kernels) - int(ends.sum()) + np.cumsum(ends))[keep]
        part_w = power.part_w
        if ends.any():
            duration_s, total_w, part_w = duration_s[keep], total_w[keep], part_w[keep]
        if self.job.wanted.figure:
            self.timeline.add(part_w, duration_s)
        if self.parquet and len(total_w):
            columns = {
                "sample": result.samples + np.arange(len(total_w)),
                "kernel": kernel,
                "time_s": result.duration_s + np.cumsum(duration_s) - duration_s,
                "duration_s": duration_s,
                "clock_hz": np.broadcast_to(clock_hz, ends.shape)[keep],
                "power_w": total_w,
            }
            columns |= {name: part_w[:, i] for i, name in enumerate(power.parts)}
            self.writer.submit(self.parquet.write, columns)
        result.samples += len(total_w)
        result.duration_s += float(duration_s.sum())
        result.energy_j += float((total_w * duration_s).sum())


def trace_to_plain(job: TraceRun, result: TraceResult) -> dict[str, Any]:
    """Return the outcome of a pass as plain values for JSON."""
    names = [k.name for k in job.kernels]
    return {
        "samples": result.samples,
        "duration_s": result.duration_s,
        "energy_j": result.energy_j,
        "mean_power_w": result.energy_j / result.duration_s if result.duration_s else None,
        "kernels": [
            {
                "name": names[k.index] if k.index < len(names) else None,
                "samples": k.samples,
                "mean_w": k.mean_w if k.samples else None,
                "max_w": k.highest.power_w if k.samples else None,
                "min_w": k.lowest.power_w if k.samples else None,
                "finished": k.finished,
                "mean_part_w": dict(zip(job.model.parts, k.mean_part_w.tolist(), strict=True)) if k.samples else {},
            }
            for k in result.kernels
        ],
        "steady_states": [
            {"start": r.start, "end": r.end, "kernel": r.kernel, "power_w": r.power_w}
            for r in result.regions
            if r is not None
        ],
        "files": [str(path) for path in result.files],
        "notes": result.notes,
        "fault": str(result.fault) if result.fault else None,
    }
