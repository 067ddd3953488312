"""Decide when a load has settled, and describe the run that every campaign writes down.

A window runs from one step of the energy counter to another, holds at least five intervals, and
starts only after the governor has had time to answer (about 90 ms after a load begins,
docs/method/measuring.md). It is steady when clock and power of its first and second half agree.

Under the power cap an H200 never becomes steady: it runs about a second a few percent above its
limit, then cuts the clock deeply for two tenths of a second, and repeats. A capped window therefore
holds two seconds, twice that cycle, and its mean is the settled power."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Refused
from wattcast.core.measured_rows import RunInfo
from wattcast.measure.counter_ticks import CounterTicks, find_ticks
from wattcast.measure.cuda_device import ClockSpinner, make_spinner
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.sampler import Sampler
from wattcast.measure.source_check import (
    CHECKS,
    check_sources,
    drop_impossible,
)
from wattcast.measure.window_summary import WINDOWS, flag_throttling


class SettlingCoefficients(Coefficients):
    """When a load has settled, so that its window may be measured."""

    settle_s: float  # before a window may begin
    capped_settle_s: float  # before a window may begin once the power cap has been seen
    capped_ticks: int  # stretches between counter steps under the cap, where the governor hunts
    clock_drift: float  # of the clock between the halves of a window, relative
    power_drift: float  # of power between the halves of a window, relative
    capped_drift: float  # of clock or power under the cap
    longest_s: float  # then a window is taken as it is, and flagged
    # a power cap that is reported sooner after the start of a load belongs to the load before
    cap_report_s: float


SETTLING = load_coefficients("settling", SettlingCoefficients)


CHUNKS_AHEAD = 4  # queued before the host waits
SPIN_CYCLES = 12_000_000
CLOCK_SAMPLES = 12  # latest samples in which the clock is looked up
CLOCK_POLL_S = 0.02  # between looks at the clock


@dataclass(frozen=True)
class SettlingRule:
    """What settled means."""

    settle_s: float = SETTLING.settle_s  # before a window may begin
    capped_settle_s: float = SETTLING.capped_settle_s  # the same once the power cap has been seen
    least_ticks: int = WINDOWS.least_ticks  # stretches between counter steps
    capped_ticks: int = SETTLING.capped_ticks  # the same under the cap, where the governor hunts
    clock_drift: float = SETTLING.clock_drift  # between the halves, relative
    power_drift: float = SETTLING.power_drift
    capped_drift: float = SETTLING.capped_drift  # of clock or power under the cap
    late_share: float = WINDOWS.late_share  # of the power that late polls may have cost
    longest_s: float = SETTLING.longest_s  # then the window is taken as it is, and flagged
    least_s: float = 0.0  # of load before it may end
    linger_s: float = 0.0  # that the power cap of the load before may still be reported
    look_s: float = 0.0  # between looks at the samples, which take the host a millisecond or more

    def least_settle_s(self, is_capped: bool) -> float:
        """Return the time from the start of a load after which a window may begin."""
        return self.capped_settle_s if is_capped else self.settle_s

    def needed_ticks(self, is_capped: bool) -> int:
        """Return the stretches between counter steps that a window needs."""
        return self.capped_ticks if is_capped else self.least_ticks


@dataclass(frozen=True)
class SettledWindow:
    """A stretch of samples between two counter steps, and what is wrong with it, if anything."""

    samples: EnergySamples
    ticks: CounterTicks
    flags: tuple[str, ...]

    @property
    def start_s(self) -> float:
        return float(self.ticks.time_s[0])

    @property
    def end_s(self) -> float:
        return float(self.ticks.time_s[-1])

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def whole(self, edges_s: np.ndarray) -> np.ndarray:
        """Return the lengths of the chunks between ``edges_s`` that lie inside, of the last one
        when none does.
        """
        length_s = np.diff(edges_s)
        is_inside = (edges_s[:-1] >= self.start_s) & (edges_s[1:] <= self.end_s)
        return length_s[is_inside] if is_inside.any() else length_s[-1:]


def find_settled_window(
    samples: EnergySamples,
    started_s: float,
    rule: SettlingRule,
) -> SettledWindow | None:
    """Return the latest window of a running load if it is steady, else None: the load goes on.

    ``samples`` begin at or before ``started_s``, the moment the load began.
    """
    ticks = find_ticks(samples)
    if ticks.intervals < rule.least_ticks:
        return None
    is_capped = (
        "sw_power_cap" in samples.between(started_s + SETTLING.cap_report_s, np.inf).throttle
    )
    last = ticks.last(rule.needed_ticks(is_capped))
    if last.time_s[0] < started_s + rule.least_settle_s(is_capped):
        return None
    window = _make_window(samples, ticks, last, rule)
    is_unsteady = {"clock_drift", "power_drift", "late_polls"} & set(window.flags)
    return None if is_unsteady else window


def take_window(
    samples: EnergySamples,
    start_s: float,
    end_s: float,
    rule: SettlingRule,
) -> SettledWindow:
    """Return all whole stretches inside ``start_s`` to ``end_s``; raise an error with the reason
    when too few.
    """
    ticks = find_ticks(samples)
    inside = ticks.between(start_s, end_s)
    if inside.intervals < rule.least_ticks:
        raise Refused(
            f"the window of {end_s - start_s:.2f} s holds {inside.intervals} whole steps "
            "of the energy counter, and "
            f"power needs {rule.least_ticks}: run longer, or repeat the work."
        )
    return _make_window(samples, ticks, inside, rule)


def _make_window(
    samples: EnergySamples,
    ticks: CounterTicks,
    inside: CounterTicks,
    rule: SettlingRule,
) -> SettledWindow:
    start_s = float(inside.time_s[0])
    end_s = float(inside.time_s[-1])
    seen = samples.between(start_s, end_s)
    is_capped = "sw_power_cap" in seen.throttle
    clock_drift = rule.capped_drift if is_capped else rule.clock_drift
    power_drift = rule.capped_drift if is_capped else rule.power_drift
    flags = []
    if _relative_drift(seen.known("sm_clock_hz")) > clock_drift:
        flags.append("clock_drift")
    if _relative_drift(inside.interval_w) > power_drift:
        flags.append("power_drift")
    if inside.power_doubt > rule.late_share:
        flags.append("late_polls")
    if (np.diff(inside.energy_j) < 0.0).any():
        flags.append("counter_reset")

    # The energy counter and the power readings have to agree.
    counted_j = float(inside.energy_j[-1] - inside.energy_j[0])
    possible, _ = drop_impossible(samples, CHECKS.most_w, (start_s, end_s))
    if check_sources(possible, ticks, (start_s, end_s), counted_j).doubts:
        flags.append("sources_disagree")
    flags += flag_throttling(seen.throttle)
    return SettledWindow(seen, inside, tuple(flags))


def _relative_drift(values: np.ndarray) -> float:
    """Return the relative difference between the means of the first and the second half."""
    if len(values) < 2:
        return 0.0
    half = len(values) // 2
    first = float(values[:half].mean())
    second = float(values[-half:].mean())
    return abs(second - first) / max(abs(first), 1e-12)


def describe_window(window: SettledWindow) -> dict[str, Any]:
    """Return the fields that every kind of row takes from its window, under the names that rows
    use.
    """
    return {
        "duration_s": window.duration_s,
        "power_w": window.ticks.power_w,
        "power_spread_w": window.ticks.spread_w,
        "ticks": window.ticks.intervals,
        "memory_power_w": window.samples.last("memory_w"),
        "sm_clock_hz": window.samples.mean("sm_clock_hz"),
        "temperature_c": window.samples.mean("temperature_c"),
        "throttle": window.samples.throttle,
        "flags": window.flags,
    }


class _ChunkQueue:
    """Chunks of a load on a stream, with an event at the edge of each."""

    def __init__(
        self,
        gpu: Any,
        queue_chunk: Callable[[], None],
        ahead: int,
    ) -> None:
        self._gpu = gpu
        self._queue_chunk = queue_chunk
        self._ahead = ahead
        first = gpu.mark()
        first.synchronize()
        self.started_s = time.monotonic()
        self.marks = [first]
        self._waiting = deque([first])

    def advance(self) -> None:
        """Queue chunks until enough are ahead, and wait for the oldest."""
        while len(self._waiting) < self._ahead:
            self._queue_chunk()
            mark = self._gpu.mark()
            self.marks.append(mark)
            self._waiting.append(mark)
        self._waiting.popleft().synchronize()

    def edges_s(self) -> np.ndarray:
        """Return the moments at the edges of all chunks, by the host's clock."""
        first = self.marks[0]
        passed_ms = [first.elapsed_time(mark) for mark in self.marks]
        return self.started_s + np.array(passed_ms) / 1e3


@dataclass(frozen=True)
class HeldLoad:
    """A load that ran until it settled."""

    window: SettledWindow
    chunk_s: np.ndarray  # lengths of the chunks inside the window
    chunks: int  # queued altogether
    effective_clock_hz: float | None  # by the spin kernel, after the window
    started_s: float = 0.0  # when the load began, by the host's monotonic clock
    marks: tuple[Any, ...] = ()  # events at the edges of all chunks

    def describe(self, calls: int) -> dict[str, Any]:
        """Return the row's fields where a chunk holds ``calls`` calls."""
        call_s = self.chunk_s / calls
        clock_hz = self.window.samples.known("sm_clock_hz")
        return {
            **describe_window(self.window),
            "latency_s": float(call_s.mean()),
            "latency_spread_s": float(call_s.std(ddof=1)) if len(call_s) > 1 else None,
            "sm_clock_spread_hz": float(clock_hz.std()) if len(clock_hz) else None,
            "effective_clock_hz": self.effective_clock_hz,
        }


def hold_load(
    sampler: Sampler,
    gpu: Any,
    queue_chunk: Callable[[], None],
    rule: SettlingRule,
    spinner: ClockSpinner | None = None,
    ahead: int = CHUNKS_AHEAD,
) -> HeldLoad:
    """Keep the device busy with chunks of a load, ``ahead`` of them queued, until power and clock
    have settled.

    ``gpu`` has ``mark`` and ``synchronize``. After the window has closed, the spin kernel reads the
    effective clock while the load goes on. A load that has not settled after ``rule.longest_s`` is
    flagged ``unsettled``."""
    head = sampler.head
    queue = _ChunkQueue(gpu, queue_chunk, ahead)
    started_s = queue.started_s
    looked_s = started_s
    window = None
    while window is None and time.monotonic() - started_s < rule.longest_s:
        queue.advance()
        sampler.check()
        now_s = time.monotonic()
        if now_s - started_s >= rule.least_s and now_s - looked_s >= rule.look_s:
            samples = sampler.since(head)
            looked_s = now_s
            if rule.linger_s:
                samples = samples.between(started_s + rule.linger_s, np.inf)
            window = find_settled_window(samples, started_s, rule)
    clock_hz = None
    if spinner is not None:
        clock_hz = _spin_under_load(spinner, queue_chunk)
    gpu.synchronize()
    if window is None:
        begin_s = started_s + rule.capped_settle_s
        window = take_window(sampler.since(head), begin_s, time.monotonic(), rule)
        window = replace(window, flags=(*window.flags, "unsettled"))
    chunk_s = window.whole(queue.edges_s())
    marks = tuple(queue.marks)
    return HeldLoad(
        window,
        chunk_s,
        len(marks) - 1,
        clock_hz,
        started_s,
        marks,
    )


def _spin_under_load(spinner: ClockSpinner, queue_chunk: Callable[[], None]) -> float:
    """Return the effective clock, by a spin kernel that runs between chunks of the load."""
    queue_chunk()
    spinner.start(SPIN_CYCLES)
    queue_chunk()
    queue_chunk()
    return spinner.clock_hz()


def await_clock(
    sampler: Sampler,
    least_hz: float,
    longest_s: float,
) -> bool:
    """Wait until the reported clock is at least ``least_hz``; a capped load leaves it low for about
    a second.
    """
    deadline_s = time.monotonic() + longest_s
    while time.monotonic() < deadline_s:
        clock_hz = sampler.since(sampler.head - CLOCK_SAMPLES).last("sm_clock_hz")
        if clock_hz is not None and clock_hz >= least_hz:
            return True
        time.sleep(CLOCK_POLL_S)
    return False


def make_run_name() -> str:
    """Return a name for the run that starts now."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"


def format_now() -> str:
    """Return the time in UTC, as rows carry it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_run_info(
    run: str,
    identity: DeviceIdentity,
    **software: Any,
) -> RunInfo:
    """Describe the card as the sampler identified it, with its sizes and the versions of its
    libraries as the caller gives them.
    """
    from wattcast import __version__

    return RunInfo(
        run,
        format_now(),
        card_name=identity.name,
        card_uuid=identity.uuid,
        card_serial=identity.serial,
        card_board=identity.board,
        driver=identity.driver,
        power_limit_w=identity.power_limit_w,
        top_clock_hz=identity.top_clock_hz,
        nvml=identity.library,
        wattcast=__version__,
        **software,
    )


def make_torch_run_info(
    run: str,
    identity: DeviceIdentity,
    torch: Any,
) -> RunInfo:
    """Describe the card, and PyTorch and the libraries it loaded by what they say of themselves."""
    properties = torch.cuda.get_device_properties(0)
    return make_run_info(
        run,
        identity,
        sm_count=properties.multi_processor_count,
        l2_byte=properties.L2_cache_size,
        cuda=str(torch.version.cuda),
        torch=str(torch.__version__),
        cublas=_cublas_version(),
        cudnn=str(torch.backends.cudnn.version()),
    )


def _cublas_version() -> str:
    """Return the version that the loaded cuBLAS library says; empty where it cannot be asked."""
    import ctypes

    for name in ("libcublas.so.13", "libcublas.so.12", "libcublas.so"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            parts = [ctypes.c_int() for _ in range(3)]
            for item, number in enumerate(parts):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
                library.cublasGetProperty(item, ctypes.byref(number))
            return ".".join(str(number.value) for number in parts)
    return ""


def try_spinner(torch: Any) -> ClockSpinner | None:
    """Load the spin kernel that reads the true clock; on failure report why and return None."""
    try:
        return make_spinner(torch)
    except Exception as error:
        say(f"no spin kernel: {type(error).__name__}: {error}")
        return None


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)
