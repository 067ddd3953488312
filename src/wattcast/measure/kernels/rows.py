"""The kinds of row: burst, sustained, duty-cycled, clock. Each measures one operator and returns a row."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from wattcast.errors import Refused
from wattcast.measure.kernels.gpu import Gpu, Graph, pause
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.sampler import Sampler
from wattcast.measure.samples import Samples
from wattcast.measure.spin import Spinner
from wattcast.measure.steady import Rule, Window, settled, window
from wattcast.records import KernelRow, RowKind

BURST_S = 0.020
LONGEST_BURST_S = 0.050
CHUNK_S = 0.020
PERIOD_S = 0.01236  # of a duty cycle
DUTY_SETTLE_S = 0.30
DUTY_TICKS = 8
SPIN_CYCLES = 12_000_000
TOP_SHARE = 0.995  # of the top clock, below which a burst was not at the top


@dataclass
class Bench:
    """What measuring a row needs."""

    gpu: Gpu
    sampler: Sampler
    run: str
    spinner: Spinner | None = None
    top_clock_hz: float = 0.0
    rule: Rule = field(default_factory=Rule)
    rested_s: float = 0.0  # when the last load ended
    tired_s: float = 0.0  # how long a pause it asks for
    patience: int = 25  # waits for the top clock that may fail before no more are tried


def row_id(kind: str, spec: Spec, data: str = "random", duty: float | None = None, repeat: int = 0) -> str:
    """The same in every run, so that a campaign can be continued."""
    return f"{kind}-{spec.id}-{data}{f'-{duty:.2f}' if duty else ''}{f'-r{repeat}' if repeat else ''}"


def blank(bench: Bench, kind: RowKind, spec: Spec, repeat: int = 0, duty: float | None = None) -> KernelRow:
    """A row that says what is to be measured, with nothing measured yet."""
    data = bench.gpu.operands.pattern
    return KernelRow(
        row_id(kind, spec, data, duty, repeat),
        kind,
        spec.family,
        spec.operator,
        layout=spec.layout,
        detail=spec.detail | {"spec": spec.id},
        rotated=spec.rotated,
        data=data,
        chosen=spec.chosen,
        repeat=repeat,
        run=bench.run,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def burst(bench: Bench, spec: Spec, repeat: int = 0) -> KernelRow:
    """Latency at the top set clock: a few tens of milliseconds after a pause, once more if the clock was low."""
    row = blank(bench, RowKind.BURST, spec, repeat)
    graph = bench.gpu.prepare(spec)
    try:
        for attempt in range(2):
            row = _burst(bench, graph, row)
            if "clock_low" not in row.flags:
                break
            await_top(bench, 1.5 if attempt == 0 else 0.0)
    finally:
        graph.drop()
    return row


def _burst(bench: Bench, graph: Graph, row: KernelRow) -> KernelRow:
    pause(bench.rested_s, bench.tired_s)
    mark, began_s = bench.sampler.head, time.monotonic()
    once_s = float(bench.gpu.timed(graph, 1)[0]) * graph.copies
    replays = int(min(max(BURST_S / once_s, 3), 60))
    if replays * once_s > LONGEST_BURST_S:
        replays = max(int(LONGEST_BURST_S / once_s), 2)
    copy_s = bench.gpu.timed(graph, replays)
    ended_s = time.monotonic()
    _rest(bench, ended_s, ended_s - began_s)
    seen = bench.sampler.since(mark - 20)
    clock = seen.between(began_s, ended_s).known("sm_clock_hz")
    low = len(clock) > 0 and float(clock.min()) < TOP_SHARE * bench.top_clock_hz
    flags = ("clock_low",) * low + ("clock_unseen",) * (len(clock) == 0)
    return replace(
        row,
        sets=min(graph.call.sets, graph.copies),
        footprint_byte=graph.call.footprint_byte(graph.copies),
        copies=graph.copies,
        replays=replays,
        latency_s=float(np.median(copy_s)),
        latency_spread_s=float(copy_s.std(ddof=1)),
        duration_s=float(copy_s.sum()) * graph.copies,
        sm_clock_hz=float(np.median(clock)) if len(clock) else None,
        temperature_c=seen.last("temperature_c"),
        throttle=seen.between(began_s, ended_s).throttle,
        flags=flags,
    )


def _rest(bench: Bench, ended_s: float, busy_s: float) -> None:
    bench.rested_s, bench.tired_s = ended_s, min(max(0.012, 0.8 * busy_s), 0.05)


def await_top(bench: Bench, longest_s: float) -> bool:
    """Wait until the reported clock is at the top; a capped load leaves it low for about a second."""
    deadline = time.monotonic() + (longest_s if bench.patience > 0 else 0.0)
    while time.monotonic() < deadline:
        clock_hz = bench.sampler.since(bench.sampler.head - 12).last("sm_clock_hz")
        if clock_hz is not None and clock_hz >= TOP_SHARE * bench.top_clock_hz:
            return True
        time.sleep(0.02)
    bench.patience -= 1
    return False


def seen_top_clock_hz(bench: Bench, spec: Spec) -> float:
    """The highest clock reported during and after a light load; what the driver names may not be reached."""
    mark = bench.sampler.head
    graph = bench.gpu.prepare(spec)
    bench.gpu.timed(graph, 20)
    time.sleep(0.3)
    bench.gpu.timed(graph, 20)
    graph.drop()
    clock = bench.sampler.since(mark).known("sm_clock_hz")
    return float(clock.max()) if len(clock) else bench.top_clock_hz


def sustained(bench: Bench, spec: Spec, repeat: int = 0) -> KernelRow:
    """Power, clock and latency of a load that fills the GPU until it has settled."""
    row = blank(bench, RowKind.SUSTAINED, spec, repeat)
    graph = bench.gpu.prepare(spec)
    try:
        return _sustained(bench, graph, row)
    finally:
        graph.drop()


def _sustained(bench: Bench, graph: Graph, row: KernelRow) -> KernelRow:
    gpu, rule = bench.gpu, bench.rule
    once_s = float(gpu.timed(graph, 2)[-1]) * graph.copies
    per_chunk = max(int(CHUNK_S / once_s), 1)
    mark = bench.sampler.head
    zero = gpu.mark()
    zero.synchronize()
    started_s = time.monotonic()
    marks, waiting = [zero], deque([zero])
    seen, held = bench.sampler.since(mark), None
    while held is None and time.monotonic() - started_s < rule.longest_s:
        while len(waiting) < 4:
            gpu.replay(graph, per_chunk)
            marks.append(gpu.mark())
            waiting.append(marks[-1])
        waiting.popleft().synchronize()
        bench.sampler.check()
        seen = bench.sampler.since(mark)
        held = settled(seen, started_s, rule)
    late = held is None
    clock_hz = _spin_beside(bench, graph, per_chunk)
    gpu.synchronize()
    _rest(bench, time.monotonic(), 1.0)
    held = held or window(seen, started_s + rule.capped_settle_s, time.monotonic(), rule)
    edges_s = started_s + np.array([zero.elapsed_time(m) for m in marks]) / 1e3
    copy_s = held.whole(edges_s) / (per_chunk * graph.copies)
    measured = _seen(row, graph, held, copy_s)
    flags = (*measured.flags, *(("unsettled",) if late else ()))
    return replace(measured, effective_clock_hz=clock_hz, replays=per_chunk * (len(marks) - 1), flags=flags)


def _spin_beside(bench: Bench, graph: Graph, per_chunk: int) -> float | None:
    """Effective clock while the load goes on, after the window has closed."""
    if bench.spinner is None:
        return None
    bench.gpu.replay(graph, per_chunk)
    bench.spinner.start(SPIN_CYCLES)
    bench.gpu.replay(graph, 2 * per_chunk)
    return bench.spinner.clock_hz()


def _seen(row: KernelRow, graph: Graph, held: Window, copy_s: np.ndarray) -> KernelRow:
    clock = held.samples.known("sm_clock_hz")
    return replace(
        row,
        sets=min(graph.call.sets, graph.copies),
        footprint_byte=graph.call.footprint_byte(graph.copies),
        copies=graph.copies,
        latency_s=float(copy_s.mean()),
        latency_spread_s=float(copy_s.std(ddof=1)) if len(copy_s) > 1 else None,
        duration_s=held.duration_s,
        power_w=held.ticks.power_w,
        power_spread_w=held.ticks.spread_w,
        ticks=held.ticks.intervals,
        memory_power_w=held.samples.last("memory_w"),
        sm_clock_hz=float(clock.mean()) if len(clock) else None,
        sm_clock_spread_hz=float(clock.std()) if len(clock) else None,
        temperature_c=held.samples.mean("temperature_c"),
        throttle=held.samples.throttle,
        flags=held.flags,
    )


def duty_cycled(bench: Bench, spec: Spec, duty: float, idle_power_w: float) -> KernelRow:
    """Bursts with idle gaps under the cap: power while on, from mean power, duty and idle power.

    On-power = (mean power x period - idle power at the gap's clock x gap) / busy time (docs/method/measuring.md).
    The board samples its power about every 20 ms, so the period is 20 ms over the golden ratio: samples
    then fall evenly on all parts of it.
    """
    row = blank(bench, RowKind.DUTY, spec, duty=duty)
    graph = bench.gpu.prepare(spec, graph_s=0.1 * PERIOD_S)
    try:
        return _duty_cycled(bench, graph, row, duty, idle_power_w)
    finally:
        graph.drop()


def _duty_cycled(bench: Bench, graph: Graph, row: KernelRow, duty: float, idle_power_w: float) -> KernelRow:
    gpu = bench.gpu
    once_s = float(gpu.timed(graph, 2)[-1]) * graph.copies
    replays = max(round(duty * PERIOD_S / once_s), 1)
    period_s = max(PERIOD_S, replays * once_s / duty)
    await_top(bench, 1.2)
    mark, started_s = bench.sampler.head, time.monotonic()
    busy: list[tuple[float, float]] = []
    needed_s = DUTY_SETTLE_S + 0.1 * (DUTY_TICKS + 1.5)
    while time.monotonic() - started_s < needed_s:
        pause(started_s, len(busy) * period_s)
        begin = gpu.mark()
        gpu.replay(graph, replays)
        end = gpu.mark()
        end.synchronize()
        busy.append((time.monotonic(), begin.elapsed_time(end) / 1e3))
    ended_s = time.monotonic()
    _rest(bench, ended_s, 0.05)
    held = window(bench.sampler.since(mark), started_s + DUTY_SETTLE_S, ended_s, bench.rule)
    inside = [(at, length) for at, length in busy if held.start_s <= at <= held.end_s]
    inside_s = np.array([length for _, length in inside])
    seen_period_s = (inside[-1][0] - inside[0][0]) / (len(inside) - 1)
    on_s = float(inside_s.mean())
    share = on_s / seen_period_s
    late = abs(seen_period_s - period_s) > 0.01 * period_s
    return replace(
        _seen(row, graph, held, inside_s / (replays * graph.copies)),
        replays=replays,
        duty=share,
        busy_s=on_s,
        period_s=seen_period_s,
        idle_power_w=idle_power_w,
        on_power_w=(held.ticks.power_w - idle_power_w * (1.0 - share)) / share,
        flags=held.flags + (("late_periods",) if late else ()),
    )


def clock_row(bench: Bench, spec: Spec) -> KernelRow:
    """Effective clock in a burst: the spin kernel beside the load, at the top set clock."""
    if bench.spinner is None:
        raise Refused("the effective clock needs the spin kernel, which could not be compiled.")
    row = blank(bench, RowKind.CLOCK, spec)
    graph = bench.gpu.prepare(spec)
    try:
        await_top(bench, 1.2)
        pause(bench.rested_s, 0.05)
        once_s = float(bench.gpu.timed(graph, 2)[-1]) * graph.copies
        mark, began_s = bench.sampler.head, time.monotonic()
        bench.gpu.replay(graph, max(int(0.004 / once_s), 1))
        bench.spinner.start(SPIN_CYCLES)
        beside_s = bench.gpu.timed(graph, max(int(0.012 / once_s), 2), warm=0)
        clock_hz = bench.spinner.clock_hz()
        ended_s = time.monotonic()
    finally:
        graph.drop()
    _rest(bench, ended_s, ended_s - began_s)
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


def idle_row(bench: Bench, name: str, length_s: float = 0.9) -> KernelRow:
    """Power with a context open and no work, at whatever clock the card rests."""
    mark, began_s = bench.sampler.head, time.monotonic()
    time.sleep(length_s)
    bench.sampler.check()
    held = window(bench.sampler.since(mark), began_s, time.monotonic(), bench.rule)
    clock = held.samples.known("sm_clock_hz")
    operator: dict[str, Any] = {"op": "idle"}
    return KernelRow(
        f"idle-{name}-{bench.run}",
        RowKind.IDLE,
        "idle",
        operator,
        run=bench.run,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        data="none",
        duration_s=held.duration_s,
        power_w=held.ticks.power_w,
        power_spread_w=held.ticks.spread_w,
        ticks=held.ticks.intervals,
        memory_power_w=held.samples.last("memory_w"),
        sm_clock_hz=float(clock.mean()) if len(clock) else None,
        sm_clock_spread_hz=float(clock.std()) if len(clock) else None,
        temperature_c=held.samples.mean("temperature_c"),
        throttle=held.samples.throttle,
        flags=held.flags,
    )


def samples_of(bench: Bench) -> Samples:
    """Everything the sampler still holds."""
    return bench.sampler.since(0)
