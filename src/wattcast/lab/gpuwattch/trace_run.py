"""Turn a metric trace into a power report, traces, steady states and a Parquet table.

One pass goes over the trace in blocks of rows, so that memory does not grow with its length.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import (
    dataclass,
    field,
    replace,
)
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattcast.core.arrays import Array, Mask
from wattcast.lab.gpuwattch.component_set import ComponentSet
from wattcast.lab.gpuwattch.simulator_config import SimulatorConfig
from wattcast.lab.gpuwattch.trace_outputs import (
    BackgroundWriter,
    GrowingTextFile,
    OutputLabels,
    ParquetTable,
    PowerBins,
    format_kernel_report,
    format_steady_rows,
    restore_idle_sms,
    write_number_rows,
    write_text_rows,
)
from wattcast.lab.gpuwattch.trace_reading import (
    CYCLES,
    INSTRUCTIONS,
    THREADS,
    MetricTrace,
    SimulatorDialect,
    TraceBlock,
    TraceFault,
    TraceSampling,
)
from wattcast.lab.gpuwattch.trace_statistics import (
    KernelEndFinder,
    KernelPower,
    KernelTally,
    ListedKernel,
    SteadyRegion,
    SteadyStateFinder,
)
from wattcast.power.activity import Activity
from wattcast.power.component_power import ComponentPower
from wattcast.power.power_model import Power

LOGS = {  # files that a pass writes, and what the manual calls them (section 4.3)
    "power_trace": "power_trace",
    "metric_trace": "metric_trace",
    "steady_state_tracking": "steady_state_tracking_report",
    "power_report": "power_report",
}
# of the figure only the data are gathered: it is drawn elsewhere
TABLE = "samples.parquet"
FIGURE = "components.png"


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
    wanted: Collection[str] = (*LOGS, TABLE, FIGURE)
    compress: bool | None = None  # default: as the trace is
    # date and time in the names of files, as the manual has them; empty: plain names
    stamp: str = ""
    # hears the sums after every block of a growing trace
    tell: Callable[[TraceResult], None] | None = None


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
    # samples whose static power rests on estimated threads
    doubtful: list[int] = field(default_factory=list)
    fault: TraceFault | None = None


def run_trace(job: TraceRun) -> TraceResult:
    """Compute and write everything. A damaged trace yields the results of its good samples, and
    ``fault`` is set.
    """
    with ExitStack() as files:
        work = _TracePass(job, files)
        for block, following in _blocks_with_following(job.trace, work.result):
            work.process_block(block, following)
            if job.tell is not None:
                job.tell(work.result)
        work.writer.drain()
        work.finish()
    result = work.result
    if work.lanes is not None:
        result.notes.append(work.lanes.note())
        result.doubtful = work.lanes.doubtful
    result.notes += _describe_kernels(job, result, work.ends.by_list)
    return result


def _describe_kernels(
    job: TraceRun,
    result: TraceResult,
    ends_by_list: bool,
) -> Iterator[str]:
    """Say where names, ends and IPC of the kernels come from, and what is not known of them."""
    ended_count = sum(kernel.finished for kernel in result.kernels)
    if not job.kernels:
        yield "kernel names are not in a metric trace: they are left out (--kernels gives them)"
    elif ended_count != len(job.kernels):
        how = "by its list" if ends_by_list else "found by their repeated rows"
        yield (
            f"{len(job.kernels)} kernels are listed, {ended_count} ended in the trace, "
            f"{how}: names may be shifted. "
            "Give each kernel's samples or cycles in the list"
        )
    if INSTRUCTIONS not in job.trace.optional:
        if any(kernel.ipc is not None for kernel in job.kernels):
            yield "IPC of steady states is that of the whole kernel, from the list"
        else:
            yield "IPC is not in a metric trace: it is left out of the steady states"
    if any(not kernel.finished for kernel in result.kernels):
        yield "the last kernel had not ended when the trace did"


def _blocks_with_following(
    trace: MetricTrace, result: TraceResult
) -> Iterator[tuple[TraceBlock, Array | None]]:
    """Yield blocks, each with the first row of the next, which is read meanwhile; keep a fault of
    the file.
    """
    previous: TraceBlock | None = None
    blocks = trace.blocks()
    with ThreadPoolExecutor(1) as reader:
        try:
            waiting = reader.submit(next, blocks, None)
            while (block := waiting.result()) is not None:
                waiting = reader.submit(next, blocks, None)
                if previous is not None:
                    yield previous, block.value[0]
                previous = block
        except TraceFault as fault:
            result.fault = fault
    if previous is not None:
        yield previous, None


# of a full warp; full warps of a real run show 0.77 and more in the duty, a divergent one 0.35
_DIVERGENT = 0.75
_REPORTED_DIGITS = 1e-5  # of the mean number of threads in a report


@dataclass
class LaneFinder:
    """Finds the active threads of a warp in each sample, which AccelWattch's static power needs.

    A metric trace does not hold them. Three sources are used, the better before the worse:

    1. a column ``THREADS_PER_WARP``;
    2. a power report or a simulator's output (``--kernels``), which hold each kernel's mean;
    3. the pipeline duty d, which counts the threads that commit: d · cycles · SMs · warp size ·
    write-back width over
       the warp instructions that were scheduled. It includes memory instructions, so it only tells
       a divergent sample and estimates its lanes; it counts too little before the first results are
       written back.

    Without any of them, full warps are assumed wherever a unit worked. With a kernel's mean, the
    estimates of its samples are scaled to it: exact where a kernel has one sample with work, or
    none that diverges."""

    job: TraceRun
    # of each kernel's estimates, where its mean is known
    factor: list[float] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    doubtful: list[int] = field(default_factory=list)  # samples whose lanes are an estimate
    unchecked: int = 0  # samples with work that nothing could be said about

    def read_kernels(self) -> None:
        """Go over the trace once to find how far each listed kernel's mean is from the
        estimates.
        """
        sums = np.zeros((len(self.job.kernels), 3))  # samples, lanes, samples with work
        ends = KernelEndFinder(self.job.trace.file.columns, self.job.kernels)
        index = 0
        for block, following in _blocks_with_following(self.job.trace, TraceResult()):
            ending = ends.mark(block.value, following)
            lanes, _ = self.estimate(self.job.trace.activity(block, self.job.sampling))
            kernel = index + np.cumsum(ending) - ending
            index += int(ending.sum())
            is_counted = ~ending & (kernel < len(sums))
            figures = np.stack([np.ones_like(lanes), lanes, lanes > 0], axis=1)
            np.add.at(sums, kernel[is_counted], figures[is_counted])
        for listed, kernel_sums in zip(self.job.kernels, sums.tolist(), strict=True):
            self._add_kernel(listed, *kernel_sums)

    def _add_kernel(
        self,
        listed: ListedKernel,
        sample_count: float,
        lanes_sum: float,
        working_count: float,
    ) -> None:
        """Keep how far a kernel's listed mean is from its estimates, and whether that is exact.

        A report gives the mean over all samples, other lists the one over samples with work."""
        is_reported = listed.mean_threads is not None
        mean = listed.mean_threads if is_reported else listed.threads
        counted = sample_count if is_reported else working_count
        if mean is None or lanes_sum <= 0:
            self.factor.append(1.0)
            self.exact.append(False)
            return
        ratio = mean * counted / lanes_sum
        has_full_warps = abs(ratio - 1.0) <= _REPORTED_DIGITS
        self.factor.append(1.0 if has_full_warps else ratio)
        self.exact.append(is_reported and (has_full_warps or working_count <= 1))

    def estimate(self, activity: Activity) -> tuple[Array, Mask]:
        """Return lanes by the pipeline duty, and which samples it shows to be divergent."""
        static = self.job.model.static
        config = self.job.config
        assert static is not None
        full = static.lanes(activity)
        if config.commit_width is None or activity.has("active_thread"):
            return full, np.zeros(full.shape, dtype=np.bool_)
        cycles = activity.duration_s * np.asarray(activity.at.clock_hz)
        warps = activity.event_values("scheduled_instruction")
        most = cycles * static.sm_count * static.full_warp * config.commit_width
        lanes = np.divide(
            activity.event_values("pipe_duty") * most, warps, out=full.copy(), where=warps > 0
        )
        divergent = (full > 0) & (lanes < _DIVERGENT * full)
        written = activity.event_values("register_write") > 0
        return np.where(divergent & written, np.maximum(lanes, 1.0), full), divergent

    def add_lanes(
        self,
        activity: Activity,
        kernel: NDArray[np.intp],
        sample: Array,
        kept: Mask,
    ) -> tuple[Activity, Array, Mask]:
        """Return the activity with its active threads, the threads, and the samples that know
        them.
        """
        lanes, is_divergent = self.estimate(activity)
        if activity.has("active_thread"):
            return activity, lanes, np.ones(lanes.shape, dtype=np.bool_)
        is_known = lanes <= 0
        if self.factor:
            assert self.job.model.static is not None
            place = np.minimum(kernel, len(self.factor) - 1)
            is_listed = kernel < len(self.factor)
            factor = np.array(self.factor)[place]
            scaled = np.minimum(lanes * factor, self.job.model.static.full_warp)
            lanes = np.where(is_listed, scaled, lanes)
            is_known |= is_listed & np.array(self.exact)[place]
            is_divergent = is_divergent | (is_listed & (factor != 1.0))
        is_open = ~is_known & kept
        self.doubtful += sample[is_open & is_divergent].astype(int).tolist()
        if self.job.config.commit_width is None:
            self.unchecked += int(is_open.sum())
        value = np.concatenate([activity.value, lanes[:, np.newaxis]], axis=1)
        with_lanes = replace(activity, value=value, events=(*activity.events, "active_thread"))
        return with_lanes, lanes, is_known

    def note(self) -> str:
        """Say in one sentence where the active threads come from and which samples are doubtful."""
        if THREADS in self.job.trace.optional:
            return "active threads of a warp are those of the column THREADS_PER_WARP"
        sentence = "active threads of a warp are not in a metric trace: full warps are assumed"
        if self.factor:
            sentence = "active threads of a warp are those of the list of kernels"
        if self.doubtful:
            shown = ", ".join(map(str, self.doubtful[:8]))
            if len(self.doubtful) > 8:
                shown += " ..."
            method = "estimated from the pipeline duty"
            if self.factor:
                method += " and the kernel's mean"
            sentence += f"; {len(self.doubtful)} divergent samples ({shown}) are {method}"
            sentence += ": STATICP and total are uncertain there"
        elif self.unchecked:
            sentence += (
                f"; {self.unchecked} samples could not be checked for divergence: that "
                "needs gpgpu_clock_gated_lanes "
                "1 and gpgpu_pipeline_widths in gpgpusim.config, or the simulator's power "
                "report as --kernels"
            )
        return sentence


def _find_lanes(job: TraceRun) -> LaneFinder | None:
    """Return what finds active threads, where static power needs them."""
    if job.model.static is None:
        return None
    finder = LaneFinder(job)
    if any(k.mean_threads is not None or k.threads is not None for k in job.kernels):
        finder.read_kernels()
    return finder


class _TracePass:
    """The state of one pass over a trace."""

    def __init__(
        self,
        job: TraceRun,
        files: ExitStack,
    ) -> None:
        """Open the files that grow with the trace, and look for the lanes of the kernels."""
        self.job = job
        self.result = TraceResult()
        columns = job.trace.file.columns
        parts = job.model.parts
        # whether the quirks of the original programs are reproduced
        self.compat = job.components.compat
        self.labels = OutputLabels(
            parts,
            columns,
            job.components.no_comma,
            self.compat,
            totals=job.components.dialect is SimulatorDialect.ACCELWATTCH,
        )
        self.ends = KernelEndFinder(columns, job.kernels)
        self.tally = KernelTally(len(parts), len(columns))
        self.states = SteadyStateFinder(job.config.steady, len(columns))
        self.timeline = PowerBins(len(parts))
        self.left_out = [
            place for place, part in enumerate(parts) if part in job.components.steady_leaves_out
        ]
        self.last_w = 0.0
        self.lanes = _find_lanes(job)
        self.logs = self._open_logs(files)
        self.parquet = None
        if TABLE in job.wanted:
            self.parquet = files.enter_context(ParquetTable(job.out / TABLE))
            self.result.files.append(self.parquet.path)
        self.writer = files.enter_context(BackgroundWriter())  # ends before its files

    def _open_logs(self, files: ExitStack) -> dict[str, GrowingTextFile]:
        """Open the logs that are wanted and write the headers of those that have one."""
        job = self.job
        compress = job.trace.file.is_gzip if job.compress is None else job.compress
        headers = {
            "power_trace": self.labels.power_header,
            "metric_trace": ",".join(self.labels.counters),
        }
        logs: dict[str, GrowingTextFile] = {}
        for log, manual_name in LOGS.items():
            if log not in job.wanted:
                continue
            name = f"gpgpusim_{manual_name}_{job.stamp}.log" if job.stamp else f"{log}.log"
            file = GrowingTextFile(job.out / name, compress and log != "power_report")
            logs[log] = files.enter_context(file)
            self.result.files.append(file.path)
            if log in headers:
                file.write(headers[log] + "\n")
        return logs

    def process_block(
        self,
        block: TraceBlock,
        following: Array | None,
    ) -> None:
        """Find kernel ends in a block, compute its power, write it, and add it to the
        statistics.
        """
        job = self.job
        ends = self.ends.mark(block.value, following)
        sample = np.maximum(self.result.samples + np.cumsum(~ends) - 1.0, 0.0)
        exact = block
        sms = job.config.sm_count
        if self.compat and sms is not None and CYCLES not in job.trace.optional:
            idle = job.trace.columns[job.trace.events.index("idle_sm")]
            value = restore_idle_sms(block.value, idle, sms, job.sampling.sample_cycle)
            exact = replace(block, value=value)
        activity = job.trace.activity(exact, job.sampling, sample)
        threads: dict[str, Any] = {}
        if self.lanes is not None:
            kernel = len(self.tally.kernels) + np.cumsum(ends) - ends
            activity, lanes, known = self.lanes.add_lanes(activity, kernel, sample, ~ends)
            threads = {"threads_per_warp": lanes, "threads_known": known}
        power = job.model.power(activity)
        total_w = power.total_w
        if self.compat and activity.has("core_voltage"):
            total_w = job.model.original_total_w(power, activity, job.components.steady_leaves_out)
        self._write_rows(block, power, total_w, ends)
        self._add_kernels(
            power,
            total_w,
            exact,
            threads.get("threads_per_warp"),
            ends,
        )
        clocks = {"duration_s": activity.duration_s, "clock_hz": np.asarray(activity.at.clock_hz)}
        self._sum_samples(power, clocks | {"power_w": total_w} | threads, ends)

    def finish(self) -> None:
        """Report kernels and steady states, which only the end of the trace completes."""
        if (
            self.tally.running and not self.compat
        ):  # the simulator reports a kernel only when it has ended
            self.tally.end(finished=False)
        result = self.result
        job = self.job
        result.kernels = self.tally.kernels
        result.regions = self.states.regions
        result.timeline = self.timeline
        if report := self.logs.get("power_report"):
            for kernel in result.kernels:
                report.write("".join(format_kernel_report(kernel, job.kernels, self.labels)))
        if steady := self.logs.get("steady_state_tracking"):
            steady.write(self.labels.steady_header + "\n")
            per_cycle = 1.0 / job.sampling.sample_cycle
            column = job.trace.optional.get(INSTRUCTIONS)
            regions = [r for r in result.regions if r is not None] if column is not None else []
            ipc = [float(r.counter[column]) * per_cycle for r in regions]
            steady.write("".join(format_steady_rows(result.regions, job.kernels, self.compat, ipc)))

    def _write_rows(
        self,
        block: TraceBlock,
        power: Power,
        total_w: Array,
        ends: Mask,
    ) -> None:
        compat = self.compat
        part_w = power.part_w
        drop = np.zeros_like(ends) if compat else ends
        if compat:
            # of a kernel without a sample the simulator prints zeros behind the total of the sample
            # before
            empty = np.flatnonzero(ends)
            empty = empty[(block.value[empty] == 0).all(axis=1)]
            if empty.size:
                total_w = total_w.copy()
                part_w = part_w.copy(order="K")
                for row in empty:
                    total_w[row] = total_w[row - 1] if row else self.last_w
                    part_w[row] = 0.0
            self.last_w = float(total_w[-1])
        if log := self.logs.get("power_trace"):
            keep = slice(None) if not drop.any() else ~drop
            columns = [total_w[keep], *(part_w[keep, i] for i in range(part_w.shape[1]))]
            self.writer.submit(write_number_rows, log, columns, compat)
        if log := self.logs.get("metric_trace"):
            self.writer.submit(
                write_text_rows,
                log,
                block.text,
                drop,
                compat,
            )

    def _add_kernels(
        self,
        power: Power,
        total_w: Array,
        block: TraceBlock,
        lanes: Array | None,
        ends: Mask,
    ) -> None:
        """Add each stretch between kernel ends to the statistics of its kernel."""
        steady_w = total_w
        if self.compat and self.left_out:
            steady_w = total_w - power.part_w[:, self.left_out].sum(axis=1)
        for a, b in pairwise([-1, *np.flatnonzero(ends).tolist(), len(block)]):
            run = slice(a + 1, b)
            if b > a + 1:
                threads = None if lanes is None else lanes[run]
                self.tally.add(total_w[run], power.part_w[run], block.value[run], threads)
                if "steady_state_tracking" in self.logs:
                    self.states.add(steady_w[run], block.value[run])
            if b < len(block):
                self.tally.end()
                self.states.end_kernel()

    def _sum_samples(
        self,
        power: Power,
        columns: Mapping[str, Any],
        ends: Mask,
    ) -> None:
        """Add the samples, without the rows that only end a kernel, to sums, figure and table."""
        keep = ~ends
        result = self.result
        kept = {name: np.broadcast_to(values, ends.shape)[keep] for name, values in columns.items()}
        part_w = power.part_w[keep] if ends.any() else power.part_w
        duration_s = kept["duration_s"]
        total_w = kept["power_w"]
        if FIGURE in self.job.wanted:
            self.timeline.add(part_w, duration_s)
        if self.parquet and len(total_w):
            place = {
                "sample": result.samples + np.arange(len(total_w)),
                "kernel": (len(self.tally.kernels) - int(ends.sum()) + np.cumsum(ends))[keep],
                "time_s": result.duration_s + np.cumsum(duration_s) - duration_s,
            }
            parts = {name: part_w[:, i] for i, name in enumerate(power.parts)}
            self.writer.submit(self.parquet.write, place | kept | parts)
        result.samples += len(total_w)
        result.duration_s += float(duration_s.sum())
        result.energy_j += float((total_w * duration_s).sum())


def trace_to_plain(job: TraceRun, result: TraceResult) -> dict[str, Any]:
    """Return the outcome of a pass as plain values for JSON."""
    kernels = [_kernel_to_plain(job, kernel) for kernel in result.kernels]
    regions = [region for region in result.regions if region is not None]
    return {
        "samples": result.samples,
        "duration_s": result.duration_s,
        "energy_j": result.energy_j,
        "mean_power_w": result.energy_j / result.duration_s if result.duration_s else None,
        "kernels": kernels,
        "steady_states": [
            {
                "start": region.start,
                "end": region.end,
                "kernel": region.kernel,
                "power_w": region.power_w,
            }
            for region in regions
        ],
        "files": [str(path) for path in result.files],
        "notes": result.notes,
        "uncertain_static_samples": result.doubtful,
        "fault": str(result.fault) if result.fault else None,
    }


def _kernel_to_plain(job: TraceRun, kernel: KernelPower) -> dict[str, Any]:
    """Return one kernel for JSON; without a sample it has no watts."""
    has_samples = kernel.samples > 0
    mean_part_w = {}
    if has_samples:
        mean_part_w = dict(zip(job.model.parts, kernel.mean.part_w.tolist(), strict=True))
    return {
        "name": job.kernels[kernel.index].name if kernel.index < len(job.kernels) else None,
        "samples": kernel.samples,
        "mean_w": kernel.mean.power_w if has_samples else None,
        "max_w": kernel.highest.power_w if has_samples else None,
        "min_w": kernel.lowest.power_w if has_samples else None,
        "finished": kernel.finished,
        "mean_part_w": mean_part_w,
    }
