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

from wattcast.core import Refused
from wattcast.core.measured_rows import RunInfo
from wattcast.measure.counter_ticks import CounterTicks, find_ticks
from wattcast.measure.cuda_device import ClockSpinner, make_spinner
from wattcast.measure.energy_samples import BENIGN, EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.sampler import Sampler
from wattcast.measure.source_check import MOST_W, check_sources, drop_impossible

CHUNKS_AHEAD = 4  # queued before the host waits
SPIN_CYCLES = 12_000_000


@dataclass(frozen=True)
class SettlingRule:
    """What settled means."""

    settle_s: float = 0.30  # before a window may begin
    capped_settle_s: float = 0.50  # the same once the power cap has been seen
    least_ticks: int = 5  # stretches between counter steps
    capped_ticks: int = 20  # the same under the cap, where the governor hunts
    clock_drift: float = 0.010  # between the halves, relative
    power_drift: float = 0.020
    capped_drift: float = 0.060  # of clock or power under the cap
    late_share: float = 0.010  # of the power that late polls may have cost
    longest_s: float = 4.0  # then the window is taken as it is, and flagged
    least_s: float = 0.0  # of load before it may end
    linger_s: float = 0.0  # that the power cap of the load before may still be reported
    look_s: float = 0.0  # between looks at the samples, which take the host a millisecond or more


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
        inside = (edges_s[:-1] >= self.start_s) & (edges_s[1:] <= self.end_s)
        return length_s[inside] if inside.any() else length_s[-1:]


def find_settled_window(
    samples: EnergySamples, started_s: float, rule: SettlingRule
) -> SettledWindow | None:
    """Return the latest window of a running load if it is steady, else None: keep the load running.

    ``samples`` begin at or before ``started_s``, the moment the load began.
    """
    stepped = find_ticks(samples)
    if stepped.intervals < rule.least_ticks:
        return None
    capped = "sw_power_cap" in samples.between(started_s + 0.05, np.inf).throttle
    last = stepped.last(rule.capped_ticks if capped else rule.least_ticks)
    if last.time_s[0] < started_s + (rule.capped_settle_s if capped else rule.settle_s):
        return None
    window = _make_window(samples, stepped, last, rule)
    return None if {"clock_drift", "power_drift", "late_polls"} & set(window.flags) else window


def take_window(
    samples: EnergySamples, start_s: float, end_s: float, rule: SettlingRule
) -> SettledWindow:
    """Return all whole stretches inside ``start_s`` to ``end_s``; raise an error with the reason
    when too few.
    """
    stepped = find_ticks(samples)
    inside = stepped.between(start_s, end_s)
    if inside.intervals < rule.least_ticks:
        raise Refused(
            f"the window of {end_s - start_s:.2f} s holds {inside.intervals} whole steps of the energy counter, and "
            f"power needs {rule.least_ticks}: run longer, or repeat the work."
        )
    return _make_window(samples, stepped, inside, rule)


def _make_window(
    samples: EnergySamples, stepped: CounterTicks, inside: CounterTicks, rule: SettlingRule
) -> SettledWindow:
    held = samples.between(float(inside.time_s[0]), float(inside.time_s[-1]))
    flags = []
    capped = "sw_power_cap" in held.throttle
    if _relative_drift(held.known("sm_clock_hz")) > (
        rule.capped_drift if capped else rule.clock_drift
    ):
        flags.append("clock_drift")
    if _relative_drift(inside.interval_w) > (rule.capped_drift if capped else rule.power_drift):
        flags.append("power_drift")
    if inside.power_doubt > rule.late_share:
        flags.append("late_polls")
    if (np.diff(inside.energy_j) < 0.0).any():
        flags.append("counter_reset")
    counted_j = float(inside.energy_j[-1] - inside.energy_j[0])
    ends_s = (float(inside.time_s[0]), float(inside.time_s[-1]))
    if check_sources(
        drop_impossible(samples, MOST_W, ends_s)[0], stepped, ends_s, counted_j
    ).doubts:
        flags.append("sources_disagree")  # the energy counter and the power readings
    flags += [f"throttle_{reason}" for reason in held.throttle if reason not in BENIGN]
    return SettledWindow(held, inside, tuple(flags))


def _relative_drift(values: np.ndarray) -> float:
    """Return the relative difference between the means of the first and the second half."""
    if len(values) < 2:
        return 0.0
    half = len(values) // 2
    first = float(values[:half].mean())
    second = float(values[-half:].mean())
    return abs(second - first) / max(abs(first), 1e-12)


def describe_window(held: SettledWindow) -> dict[str, Any]:
    """Return the fields that every kind of row takes from its window, under the names that rows
    use.
    """
    return {
        "duration_s": held.duration_s,
        "power_w": held.ticks.power_w,
        "power_spread_w": held.ticks.spread_w,
        "ticks": held.ticks.intervals,
        "memory_power_w": held.samples.last("memory_w"),
        "sm_clock_hz": held.samples.mean("sm_clock_hz"),
        "temperature_c": held.samples.mean("temperature_c"),
        "throttle": held.samples.throttle,
        "flags": held.flags,
    }


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
    first = sampler.head
    zero = gpu.mark()
    zero.synchronize()
    started_s = time.monotonic()
    marks = [zero]
    waiting = deque([zero])
    held = None
    looked_s = started_s
    while held is None and time.monotonic() - started_s < rule.longest_s:
        while len(waiting) < ahead:
            queue_chunk()
            marks.append(gpu.mark())
            waiting.append(marks[-1])
        waiting.popleft().synchronize()
        sampler.check()
        now_s = time.monotonic()
        if now_s - started_s >= rule.least_s and now_s - looked_s >= rule.look_s:
            seen = sampler.since(first)
            looked_s = now_s
            recent = seen.between(started_s + rule.linger_s, np.inf) if rule.linger_s else seen
            held = find_settled_window(recent, started_s, rule)
    clock_hz = None
    if spinner is not None:
        queue_chunk()
        spinner.start(SPIN_CYCLES)
        queue_chunk()
        queue_chunk()
        clock_hz = spinner.clock_hz()
    gpu.synchronize()
    if held is None:
        held = take_window(
            sampler.since(first), started_s + rule.capped_settle_s, time.monotonic(), rule
        )
        held = replace(held, flags=(*held.flags, "unsettled"))
    edges_s = started_s + np.array([zero.elapsed_time(mark) for mark in marks]) / 1e3
    return HeldLoad(held, held.whole(edges_s), len(marks) - 1, clock_hz, started_s, tuple(marks))


def await_clock(sampler: Sampler, least_hz: float, longest_s: float) -> bool:
    """Wait until the reported clock is at least ``least_hz``; a capped load leaves it low for about
    a second.
    """
    deadline_s = time.monotonic() + longest_s
    while time.monotonic() < deadline_s:
        clock_hz = sampler.since(sampler.head - 12).last("sm_clock_hz")
        if clock_hz is not None and clock_hz >= least_hz:
            return True
        time.sleep(0.02)
    return False


def make_run_name() -> str:
    """Return a name for the run that starts now."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"


def format_now() -> str:
    """Return the time in UTC, as rows carry it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_run_info(run: str, identity: DeviceIdentity, **given: Any) -> RunInfo:
    """Describe the card as the sampler knows it, with its sizes and the versions of its libraries
    as given.
    """
    from wattcast import __version__

    given |= {
        f"card_{name}": getattr(identity, name) for name in ("name", "uuid", "serial", "board")
    }
    given |= {name: getattr(identity, name) for name in ("driver", "power_limit_w", "top_clock_hz")}
    return RunInfo(run, format_now(), nvml=identity.library, wattcast=__version__, **given)


def make_torch_run_info(run: str, identity: DeviceIdentity, torch: Any) -> RunInfo:
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
