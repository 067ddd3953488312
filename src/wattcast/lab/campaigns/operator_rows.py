"""Measure one row of an operator: burst, sustained, duty-cycled, effective clock or idle.

The calls of a row are captured in a CUDA graph, so that the GPU never waits for the host between
them. All graphs share one memory pool, held open by a keeper graph, so that no row pays for
allocation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from typing import Any, TypeVar

import numpy as np

from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.core import Refused
from wattcast.core.measured_rows import (
    ChainRow,
    KernelRow,
    RowKind,
)
from wattcast.lab.campaigns import campaign_engine
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.kernel_plan import (
    OperatorSpec,
    read_kernel_plan,
    take_subset,
)
from wattcast.lab.campaigns.operator_calls import (
    CallBuilder,
    OperandPools,
    OperatorCall,
    build_call,
)
from wattcast.measure import steady_state

POOL_BYTE = {
    "bf16": 8 * 10**9,
    "fp16": 8 * 10**9,
    "fp32": 14 * 10**9,
    "fp8": 3 * 10**9,
}
GRAPH_S = 0.0025  # a graph should run about this long
ROTATION_S = 0.008  # or longer, up to this, to visit every operand set
MOST_COPIES = 400


@dataclass(frozen=True)
class CapturedGraph:
    """Captured copies of one call."""

    graph: Any
    copies: int
    call: OperatorCall

    def __enter__(self) -> CapturedGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.graph.reset()  # its memory goes back to the shared pool


class CampaignGpu(campaign_engine.TorchDevice):
    """A device with pools of operands and graphs that share one pool of memory. ``open`` starts
    it.
    """

    def __init__(
        self,
        torch: Any,
        operands: OperandPools,
        l2_byte: int,
    ) -> None:
        super().__init__(torch)
        self.operands = operands
        self.builder = CallBuilder(torch, operands, l2_byte)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()

    @classmethod
    def open(cls, pool_byte: dict[str, int] | None = None) -> CampaignGpu:
        """Draw the operand pools and capture the keeper."""
        torch = campaign_engine.import_cuda_torch("measuring kernels")
        torch.set_grad_enabled(False)
        operands = OperandPools(torch, "cuda", pool_byte or POOL_BYTE)
        operands.fill("random")
        gpu = cls(torch, operands, int(torch.cuda.get_device_properties(0).L2_cache_size))
        dummy = torch.zeros(32, device="cuda")
        torch.cuda.synchronize()
        gpu._capture(gpu._keeper, lambda: dummy.add(1.0))
        return gpu

    def build(self, spec: OperatorSpec) -> OperatorCall:
        """Build the call of ``spec`` over views of the operand pools."""
        return build_call(self.builder, spec)

    def prepare(
        self,
        spec: OperatorSpec,
        graph_s: float = GRAPH_S,
        most_copies: int = MOST_COPIES,
    ) -> CapturedGraph:
        """Build, warm up, time roughly and capture; the graph runs about ``graph_s``."""
        torch = self.torch
        call = self.build(spec)
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            call.run(0)
            call.run(1)
            begin = self.mark()
            for copy in range(3):
                call.run(copy)
            end = self.mark()
        end.synchronize()
        guess_s = begin.elapsed_time(end) / 3e3
        rotating = min(call.sets, ROTATION_S / guess_s)
        copies = int(
            min(max(graph_s / guess_s, min(rotating, 4 * graph_s / guess_s), 1), most_copies)
        )
        if guess_s < 3e-5:  # three eager calls of a short kernel show the host, not the GPU
            copies = min(max(copies, 160), most_copies)
        graph = torch.cuda.CUDAGraph()
        results: list[Any] = [None] * min(call.sets, copies)

        def run() -> None:
            for copy in range(copies):
                results[copy % len(results)] = call.run(copy)

        self._capture(graph, run)
        results.clear()
        return CapturedGraph(graph, copies, call)

    def replay(
        self,
        graph: CapturedGraph,
        times: int,
    ) -> None:
        """Queue replays; returns before they have run."""
        self.issue(graph.graph.replay, times)

    def timed(
        self,
        graph: CapturedGraph,
        replays: int,
        warm: int = 1,
    ) -> np.ndarray:
        """Return the seconds per copy of each of ``replays`` replays, all queued before waiting."""
        return campaign_engine.time_calls(self, graph.graph.replay, replays, warm) / graph.copies

    def _capture(
        self,
        graph: Any,
        run: Callable[[], Any],
    ) -> None:
        with self.torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()


def pause_since(since_s: float, least_s: float) -> None:
    """Sleep until ``least_s`` have passed since ``since_s``."""
    time.sleep(max(0.0, since_s + least_s - time.monotonic()))


BURST_S = 0.020
LONGEST_BURST_S = 0.050
CHUNK_S = 0.020
PERIOD_S = 0.01236  # of a duty cycle
DUTY_SETTLE_S = 0.30
DUTY_TICKS = 8
LATE_SHARE = 0.01  # of a period, by which it may be longer before a row is flagged


def make_row_id(
    kind: str,
    spec: OperatorSpec,
    data: str = "random",
    duty: float | None = None,
    repeat: int = 0,
) -> str:
    """Return an id that is the same in every run, so that a campaign can be continued."""
    return (
        f"{kind}-{spec.id}-{data}{f'-{duty:.2f}' if duty else ''}{f'-r{repeat}' if repeat else ''}"
    )


def make_blank_row(
    bench: OperatorBench,
    kind: RowKind,
    spec: OperatorSpec,
    repeat: int = 0,
    duty: float | None = None,
) -> KernelRow:
    """Return a row that names what is to be measured, with nothing measured yet."""
    data = bench.gpu.operands.pattern
    date = steady_state.format_now()
    planned = vars(spec) | {"detail": spec.detail | {"spec": spec.id}}
    row_id = make_row_id(
        kind,
        spec,
        data,
        duty,
        repeat,
    )
    return KernelRow(
        row_id,
        kind,
        **planned,
        data=data,
        repeat=repeat,
        run=bench.run,
        date=date,
    )


def measure_burst_row(
    bench: OperatorBench,
    spec: OperatorSpec,
    repeat: int = 0,
) -> KernelRow:
    """Measure latency at the top clock: tens of milliseconds after a pause, once more if the clock
    was low.
    """
    row = make_blank_row(bench, RowKind.BURST, spec, repeat)
    with bench.gpu.prepare(spec) as graph:
        for attempt in range(2):
            pause_since(bench.rested_s, bench.tired_s)
            mark = bench.sampler.head
            began_s = time.monotonic()
            once_s = float(bench.gpu.timed(graph, 1)[0]) * graph.copies
            replays = int(min(max(BURST_S / once_s, 3), 60))
            if replays * once_s > LONGEST_BURST_S:
                replays = max(int(LONGEST_BURST_S / once_s), 2)
            copy_s = bench.gpu.timed(graph, replays)
            ended_s = time.monotonic()
            _note_rest(bench, ended_s, ended_s - began_s)
            seen = bench.sampler.since(mark - 20)
            clock = seen.between(began_s, ended_s).known("sm_clock_hz")
            low = len(clock) > 0 and float(clock.min()) < TOP_CLOCK_SHARE * bench.top_clock_hz
            flags = ("clock_low",) * low + ("clock_unseen",) * (len(clock) == 0)
            row = replace(
                row,
                **_describe_graph(graph),
                replays=replays,
                latency_s=float(np.median(copy_s)),
                latency_spread_s=float(copy_s.std(ddof=1)),
                duration_s=float(copy_s.sum()) * graph.copies,
                sm_clock_hz=float(np.median(clock)) if len(clock) else None,
                temperature_c=seen.last("temperature_c"),
                throttle=seen.between(began_s, ended_s).throttle,
                flags=flags,
            )
            if "clock_low" not in row.flags:
                break
            await_top_clock(bench, 1.5 if attempt == 0 else 0.0)
    return row


def _note_rest(
    bench: OperatorBench,
    ended_s: float,
    busy_s: float,
) -> None:
    bench.rested_s, bench.tired_s = ended_s, min(max(0.012, 0.8 * busy_s), 0.05)


def await_top_clock(bench: OperatorBench, longest_s: float) -> bool:
    """Wait until the reported clock is at the top; a capped load leaves it low for about a
    second.
    """
    wanted_s = longest_s if bench.patience > 0 else 0.0
    if steady_state.await_clock(bench.sampler, TOP_CLOCK_SHARE * bench.top_clock_hz, wanted_s):
        return True
    bench.patience -= 1
    return False


def find_top_clock_hz(bench: OperatorBench, spec: OperatorSpec) -> float:
    """Return the highest clock reported around a light load; the driver's stated top may not be
    reached.
    """
    mark = bench.sampler.head
    with bench.gpu.prepare(spec) as graph:
        bench.gpu.timed(graph, 20)
        time.sleep(0.3)
        bench.gpu.timed(graph, 20)
    clock = bench.sampler.since(mark).known("sm_clock_hz")
    return float(clock.max()) if len(clock) else bench.top_clock_hz


def measure_sustained_row(
    bench: OperatorBench,
    spec: OperatorSpec,
    repeat: int = 0,
) -> KernelRow:
    """Measure power, clock and latency of a load that fills the GPU until it has settled."""
    row = make_blank_row(bench, RowKind.SUSTAINED, spec, repeat)
    gpu = bench.gpu
    with gpu.prepare(spec) as graph:
        once_s = float(gpu.timed(graph, 2)[-1]) * graph.copies
        replays = max(int(CHUNK_S / once_s), 1)
        load = steady_state.hold_load(
            bench.sampler,
            gpu,
            lambda: gpu.replay(graph, replays),
            bench.rule,
            bench.spinner,
        )
    _note_rest(bench, time.monotonic(), 1.0)
    fields = _describe_graph(graph) | load.describe(replays * graph.copies)
    return replace(row, **fields, replays=replays * load.chunks)


def _describe_graph(graph: CapturedGraph) -> dict[str, Any]:
    return {
        "sets": min(graph.call.sets, graph.copies),
        "footprint_byte": graph.call.footprint_byte(graph.copies),
        "copies": graph.copies,
    }


def measure_duty_row(
    bench: OperatorBench,
    spec: OperatorSpec,
    duty: float,
    idle_power_w: float,
) -> KernelRow:
    """Measure bursts with idle gaps under the cap, and derive the power while busy.

    On-power = (mean power x period - idle power at the gap's clock x gap) / busy time
    (docs/method/measuring.md). The board samples its power about every 20 ms, so the period is 20
    ms over the golden ratio: samples then fall evenly on all parts of it."""
    row = make_blank_row(bench, RowKind.DUTY, spec, duty=duty)
    gpu = bench.gpu
    with gpu.prepare(spec, graph_s=0.1 * PERIOD_S) as graph:
        once_s = float(gpu.timed(graph, 2)[-1]) * graph.copies
        replays = max(round(duty * PERIOD_S / once_s), 1)
        period_s = max(PERIOD_S, replays * once_s / duty)
        await_top_clock(bench, 1.2)
        mark = bench.sampler.head
        started_s = time.monotonic()
        bursts = _replay_bursts(
            gpu,
            graph,
            replays,
            period_s,
            started_s,
        )
    ended_s = time.monotonic()
    _note_rest(bench, ended_s, 0.05)
    settled = steady_state.take_window(
        bench.sampler.since(mark), started_s + DUTY_SETTLE_S, ended_s, bench.rule
    )
    inside = [burst for burst in bursts if settled.start_s <= burst.end_s <= settled.end_s]
    inside_s = np.array([burst.busy_s for burst in inside])
    seen_period_s = (inside[-1].end_s - inside[0].end_s) / (len(inside) - 1)
    busy_s = float(inside_s.mean())
    share = busy_s / seen_period_s
    load = steady_state.HeldLoad(settled, inside_s, len(bursts), None)
    fields = _describe_graph(graph) | load.describe(replays * graph.copies)
    fields["flags"] = settled.flags
    if abs(seen_period_s - period_s) > LATE_SHARE * period_s:
        fields["flags"] += ("late_periods",)
    return replace(
        row,
        **fields,
        replays=replays,
        duty=share,
        busy_s=busy_s,
        period_s=seen_period_s,
        idle_power_w=idle_power_w,
        on_power_w=(settled.ticks.power_w - idle_power_w * (1.0 - share)) / share,
    )


@dataclass(frozen=True)
class _Burst:
    """The busy part of one period: when it had ended, and how long it took on the device."""

    end_s: float
    busy_s: float


def _replay_bursts(
    gpu: CampaignGpu,
    graph: CapturedGraph,
    replays: int,
    period_s: float,
    started_s: float,
) -> list[_Burst]:
    """Replay a graph at the beginning of every period until enough ticks have come."""
    bursts: list[_Burst] = []
    needed_s = DUTY_SETTLE_S + 0.1 * (DUTY_TICKS + 1.5)
    while time.monotonic() - started_s < needed_s:
        pause_since(started_s, len(bursts) * period_s)
        begin = gpu.mark()
        gpu.replay(graph, replays)
        end = gpu.mark()
        end.synchronize()
        bursts.append(_Burst(time.monotonic(), begin.elapsed_time(end) / 1e3))
    return bursts


def measure_clock_row(bench: OperatorBench, spec: OperatorSpec) -> KernelRow:
    """Measure the effective clock in a burst, with the spin kernel running next to the load."""
    if bench.spinner is None:
        raise Refused("the effective clock needs the spin kernel, which could not be compiled.")
    row = make_blank_row(bench, RowKind.CLOCK, spec)
    with bench.gpu.prepare(spec) as graph:
        await_top_clock(bench, 1.2)
        pause_since(bench.rested_s, 0.05)
        once_s = float(bench.gpu.timed(graph, 2)[-1]) * graph.copies
        mark = bench.sampler.head
        began_s = time.monotonic()
        bench.gpu.replay(graph, max(int(0.004 / once_s), 1))
        bench.spinner.start(steady_state.SPIN_CYCLES)
        beside_s = bench.gpu.timed(graph, max(int(0.012 / once_s), 2), warm=0)
        clock_hz = bench.spinner.clock_hz()
        ended_s = time.monotonic()
    _note_rest(bench, ended_s, ended_s - began_s)
    seen = bench.sampler.since(mark).between(began_s, ended_s)
    return replace(
        row,
        sets=min(graph.call.sets, graph.copies),
        copies=graph.copies,
        latency_s=float(np.median(beside_s)),
        sm_clock_hz=seen.mean("sm_clock_hz"),
        effective_clock_hz=clock_hz,
        throttle=seen.throttle,
    )


def measure_idle_row(
    bench: OperatorBench,
    name: str,
    length_s: float = 0.9,
) -> KernelRow:
    """Measure power with a context open and no work, at whatever clock the card rests."""
    mark = bench.sampler.head
    began_s = time.monotonic()
    time.sleep(length_s)
    bench.sampler.check()
    settled = steady_state.take_window(
        bench.sampler.since(mark), began_s, time.monotonic(), bench.rule
    )
    clock = settled.samples.known("sm_clock_hz")
    return KernelRow(
        f"idle-{name}-{bench.run}",
        RowKind.IDLE,
        "idle",
        {"op": "idle"},
        run=bench.run,
        date=steady_state.format_now(),
        data="none",
        sm_clock_spread_hz=float(clock.std()) if len(clock) else None,
        **steady_state.describe_window(settled),
    )


Row = TypeVar("Row", KernelRow, ChainRow)


@dataclass
class KernelCampaign(campaign_engine.Campaign):
    """One call of ``lab kernels``, and which operators it takes."""

    few: int = 0  # a smoke test takes this many per family
    after: int = 0  # operators at the head of a step's list that another machine has measured
    listed: list[OperatorSpec] | None = None  # in place of the plan
    round_: int = 1  # of the plan
    ahead: Sequence[str] = ()  # steps that follow the present one
    # operators measured by this process, by kind
    fresh: dict[str, list[OperatorSpec]] = field(default_factory=dict)
    # of the rows measured by this process, by id
    latency_s: dict[str, float] = field(default_factory=dict)

    def measure(
        self,
        kind: str,
        spec: OperatorSpec,
        blank: Row,
        make: Callable[[], Row],
    ) -> None:
        """Measure and save one row unless its id is on file, and remember what was measured."""
        row = self.record(kind, blank, make, spec.family)
        if row is not None and not row.error:
            self.fresh.setdefault(str(kind), []).append(spec)
            self.latency_s |= {blank.id: row.latency_s} if row.latency_s else {}

    def specs(
        self,
        counts: dict[str, int] | None = None,
        keep: Callable[[OperatorSpec], bool] = lambda s: True,
    ) -> list[OperatorSpec]:
        """Return the operators of a step, or the first few of each family in a smoke test."""
        everything = list(read_kernel_plan(self.round_)) if self.listed is None else self.listed
        if self.listed is not None and not self.few:
            return [spec for spec in everything if keep(spec)]
        if self.few:
            return take_subset(
                everything, dict.fromkeys((spec.family for spec in everything), self.few), keep
            )
        return take_subset(everything, counts, keep) if counts else everything


def save_row(
    campaign: KernelCampaign,
    kind: RowKind,
    spec: OperatorSpec,
    repeat: int = 0,
) -> None:
    """Measure and save one burst, sustained or clock row, unless it is on file."""
    bench = campaign.bench
    makers: dict[str, Callable[[], KernelRow]] = {
        RowKind.BURST: lambda: measure_burst_row(bench, spec, repeat),
        RowKind.SUSTAINED: lambda: measure_sustained_row(bench, spec, repeat),
        RowKind.CLOCK: lambda: measure_clock_row(bench, spec),
    }
    campaign.measure(kind, spec, make_blank_row(bench, kind, spec, repeat), makers[kind])
