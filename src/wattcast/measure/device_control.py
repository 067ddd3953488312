"""Read a card through NVML and set its clocks and power limit. No other module of Wattcast sets
anything on a GPU.

Reading needs no privilege. Setting needs root and happens only through ``NvmlCard.set_knob``, which
the management daemon alone calls (``control/card_daemon.py``). NVML tells the power limit in force,
but not whether somebody locked clocks before. A lost card raises ``MissingTool``, a setting that
the driver refuses raises ``Refused``, and a missing reading is NaN."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Queue
from typing import Any, TypeVar

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import (
    MissingTool,
    Refused,
    import_extra,
)
from wattcast.measure.energy_sources import choose_nvml_index, decode_text


class ProgramPhaseCoefficients(Coefficients):
    """What a card's utilisation says of the program that it runs."""

    # share of time with a kernel running, from which a clock says what the card is allowed
    busy: float
    idle_busy: float  # share of time with a kernel running, below which a program is idle
    memory_phase: float  # of DRAM's bandwidth, from which a program is in a memory phase
    # of cycles in which pipes issue, from which a program is in a compute phase
    compute_phase: float


PHASES = load_coefficients("program_phases", ProgramPhaseCoefficients)


T = TypeVar("T")

CALL_TIMEOUT_S = 5.0  # a driver that does not answer for this long is as good as gone
MOST_LATE_CALLS = 32  # calls that hang, after which a driver is not asked again
# Clocks: NVML_CLOCK_SM, NVML_CLOCK_MEM.
SM_CLOCK = 1
MEMORY_CLOCK = 2
IDLE_BIT = 0x1  # event reason: the card has nothing to do
# Event reasons: power cap, slowdown, sync boost, heat, brake.
LIMITED_BITS = 0x4 | 0x8 | 0x10 | 0x20 | 0x40 | 0x80
# Shares of cycles in which pipes issue: integer, any tensor, fp64, fp32, fp16 utilisation. Their
# sum times the clock is a rate of work, like VALUBusy in paper 004.
GPM_PIPES = {
    "IntegerBusy": 4,
    "TensorBusy": 5,
    "Fp64Busy": 11,
    "Fp32Busy": 12,
    "Fp16Busy": 13,
}
GPM_COUNTERS = {
    "SmBusy": 2,
    "DramBusy": 10,
    **GPM_PIPES,
}
# Power profiles of the firmware, as NVML numbers them (nvmlPowerProfileType_t, driver 570 on).
POWER_PROFILES = {
    "max-p": 0,
    "max-q": 1,
    "compute": 2,
    "memory-bound": 3,
    "network": 4,
    "balanced": 5,
    "llm-inference": 6,
    "llm-training": 7,
    "training": 20,
    "inference": 21,
}
SMOOTHING_FIELD = 251  # NVML_FI_PWR_SMOOTHING_ENABLED
MASK_WORDS = 8  # of 32 bits, in a mask of power profiles
# Clocks of a card that lists none: from the highest down to a third of it, in these steps.
CLOCK_STEP_MHZ = 15
LOWEST_SHARE = 3


@dataclass(frozen=True)
class NvmlReading:
    """What the card says now; NaN where it does not."""

    at_s: float
    energy_j: float
    power_w: float
    core_hz: float
    memory_hz: float
    busy: float = math.nan  # share of time with a kernel running
    # Share of time in which memory is in use, or of its bandwidth where GPM is there.
    memory_busy: float = math.nan
    work_per_s: float = math.nan  # pipe activity times clock, where GPM is there; any unit
    # Shares since the reading before, by name (``GPM_COUNTERS``); None without GPM.
    counters: Mapping[str, float] | None = None

    @property
    def phase(self) -> str | None:
        """Name what limits the program now: idle, memory, compute or latency; None where that is
        not known.

        With GPM, DRAM in use for 60 % of its bandwidth is a memory phase, pipes that issue in 30 %
        of cycles a compute phase, and neither a phase that waits. Without GPM, utilisation
        separates busy from idle alone."""
        if self.busy < PHASES.idle_busy:
            return "idle"
        if not math.isfinite(self.work_per_s):
            return None
        if self.memory_busy >= PHASES.memory_phase:
            return "memory"
        return "compute" if self.work_per_s >= PHASES.compute_phase * self.core_hz else "latency"


@dataclass(frozen=True)
class ClockReading:
    """What the clocks say now, and whether they say what the card is allowed; None where the card
    does not report it.
    """

    core_hz: float
    memory_hz: float
    is_working: bool | None
    is_limited: bool | None  # power, heat or another card holds the core clock down


class NvmlCard:
    """One NVIDIA card. Every call to the driver has a deadline, so that a hung driver hangs
    nobody.
    """

    def __init__(
        self,
        index: int | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.index = index or 0
        self._is_chosen = index is not None  # else the card that CUDA programs of this process use
        self._timeout_s = timeout_s
        self._nvml: Any = None
        self._handle: Any = None
        self._gpm: _Gpm | None = None
        self._caller: _Caller | None = None
        self.name = ""
        self.uuid = ""

    def open(self) -> None:
        """Connect to the driver; raises ``MissingTool`` when there is nothing to connect to."""
        pynvml = import_extra("pynvml", "nvidia-ml-py is not installed", "measure")
        self._nvml = pynvml
        self._caller = _Caller(self._timeout_s)
        self._call(pynvml.nvmlInit)
        if not self._is_chosen:
            self.index = self._call(choose_nvml_index, pynvml, os.environ).index
        self._handle = self._call(pynvml.nvmlDeviceGetHandleByIndex, self.index)
        self.name = decode_text(self._call(pynvml.nvmlDeviceGetName, self._handle))
        self.uuid = decode_text(self._call(pynvml.nvmlDeviceGetUUID, self._handle))
        self._gpm = self._optional(_Gpm.start, pynvml, self._handle)

    @property
    def has_call_under_way(self) -> bool:
        """Tell whether a call that was given up after its deadline may still reach the card."""
        return self._caller is not None and self._caller.has_call_under_way

    def close(self) -> None:
        """Disconnect from the driver."""
        if self._nvml is not None:
            with contextlib.suppress(MissingTool, Refused, self._nvml.NVMLError):
                self._call(self._nvml.nvmlShutdown)

    def driver_version(self) -> str:
        """Return the version of the driver; "unknown" where it does not tell."""
        version = self._optional(self._nvml.nvmlSystemGetDriverVersion)
        return "unknown" if version is None else str(decode_text(version))

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the core and memory clocks that can be locked, ascending; from the highest alone
        without a list.
        """
        nvml = self._nvml
        memory_mhz = self._optional(nvml.nvmlDeviceGetSupportedMemoryClocks, self._handle)
        if not memory_mhz:
            top_mhz = self._optional(nvml.nvmlDeviceGetMaxClockInfo, self._handle, MEMORY_CLOCK)
            memory_mhz = [top_mhz] if top_mhz else []
        memory_mhz = sorted(set(memory_mhz))
        core_mhz = self._list_core_clocks_mhz(memory_mhz)
        core_hz = tuple(1e6 * mhz for mhz in sorted(set(core_mhz)))
        return core_hz, tuple(1e6 * mhz for mhz in memory_mhz)

    def _list_core_clocks_mhz(self, memory_mhz: list[int]) -> list[int]:
        """Return the core clocks at the highest memory clock."""
        nvml = self._nvml
        if memory_mhz:
            highest_mhz = memory_mhz[-1]
            core_mhz: list[int] | None = self._optional(
                nvml.nvmlDeviceGetSupportedGraphicsClocks, self._handle, highest_mhz
            )
            if core_mhz:
                return core_mhz
        top_mhz = self._optional(nvml.nvmlDeviceGetMaxClockInfo, self._handle, SM_CLOCK)
        if not top_mhz:
            return []
        return list(range(top_mhz, top_mhz // LOWEST_SHARE, -CLOCK_STEP_MHZ))

    def limits_w(self) -> tuple[float, float, float] | None:
        """Return the power limit in force, and the lowest and highest that can be set; None where
        the card does not report them.
        """
        now_mw = self._optional(self._nvml.nvmlDeviceGetPowerManagementLimit, self._handle)
        read_range = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints
        range_mw = self._optional(read_range, self._handle)
        if now_mw is None or range_mw is None:
            return None
        lowest_mw, highest_mw = range_mw
        return now_mw / 1e3, lowest_mw / 1e3, highest_mw / 1e3

    def limit_w(self) -> float | None:
        """Return the power limit that is set; None where the card does not report it."""
        limit_mw = self._optional(self._nvml.nvmlDeviceGetPowerManagementLimit, self._handle)
        return None if limit_mw is None else limit_mw / 1e3

    def default_limit_w(self) -> float | None:
        """Return the power limit that the board comes with; None where the card does not report
        it.
        """
        read_default = self._nvml.nvmlDeviceGetPowerManagementDefaultLimit
        limit_mw = self._optional(read_default, self._handle)
        return None if limit_mw is None else limit_mw / 1e3

    def list_power_profiles(self) -> tuple[int, ...]:
        """Return the numbers of the power profiles that the firmware has; none on most cards."""
        nvml = self._nvml
        try:
            info = nvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
        except AttributeError:  # an old binding
            return ()
        read = nvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo
        if self._optional(read, self._handle, ctypes.byref(info)) is None:
            return ()
        mask = _join_mask(info.perfProfilesMask)
        return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)

    def read_optional_knob(self, knob: str) -> float | None:
        """Return the mask of the power ``profiles`` that are requested, or whether power
        ``smoothing`` is on; None where the card does not have it.
        """
        nvml = self._nvml
        if knob == "profiles":
            try:
                current = nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
            except AttributeError:  # an old binding
                return None
            read = nvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles
            if self._optional(read, self._handle, ctypes.byref(current)) is None:
                return None
            return float(_join_mask(current.requestedProfilesMask))
        values = self._optional(nvml.nvmlDeviceGetFieldValues, self._handle, [SMOOTHING_FIELD])
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return float(values[0].value.uiVal)

    def read_clocks(self) -> ClockReading:
        """Return both clocks, and whether the card works and whether anything holds it down."""
        nvml = self._nvml
        rates = self._optional(nvml.nvmlDeviceGetUtilizationRates, self._handle)
        bits = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        is_working = None
        is_limited = None
        if bits is not None:
            is_working = not bits & IDLE_BIT
            is_limited = bool(bits & LIMITED_BITS)
        if rates is not None:
            is_working = rates.gpu / 100.0 >= PHASES.busy
        return ClockReading(
            core_hz=self._read_scaled(1e6, nvml.nvmlDeviceGetClockInfo, SM_CLOCK),
            memory_hz=self._read_scaled(1e6, nvml.nvmlDeviceGetClockInfo, MEMORY_CLOCK),
            is_working=is_working,
            is_limited=is_limited,
        )

    def read(self) -> NvmlReading:
        """Return all readings now; raise ``MissingTool`` when the card is lost."""
        nvml = self._nvml
        energy_j = self._read_scaled(1e-3, nvml.nvmlDeviceGetTotalEnergyConsumption)
        power_w = self._read_scaled(1e-3, nvml.nvmlDeviceGetPowerUsage)
        core_hz = self._read_scaled(1e6, nvml.nvmlDeviceGetClockInfo, SM_CLOCK)
        memory_hz = self._read_scaled(1e6, nvml.nvmlDeviceGetClockInfo, MEMORY_CLOCK)
        busy = math.nan
        memory_busy = math.nan
        work_per_s = math.nan
        rates = self._optional(nvml.nvmlDeviceGetUtilizationRates, self._handle)
        if rates is not None:
            busy = rates.gpu / 100.0
            memory_busy = rates.memory / 100.0

        # Where the card has GPM, it knows its use better.
        counters = None if self._gpm is None else self._optional(self._gpm.read)
        if counters is not None:
            busy = counters["SmBusy"]
            memory_busy = counters["DramBusy"]
            work_per_s = sum(counters[name] for name in GPM_PIPES) * core_hz
        return NvmlReading(
            time.monotonic(),
            energy_j,
            power_w,
            core_hz,
            memory_hz,
            busy,
            memory_busy,
            work_per_s,
            counters,
        )

    def _read_scaled(
        self,
        factor: float,
        function: Any,
        *arguments: int,
    ) -> float:
        """Return a reading in its SI unit; NaN where the card does not have it."""
        value = self._optional(function, self._handle, *arguments)
        return math.nan if value is None else float(value * factor)

    def set_knob(
        self,
        knob: str,
        value: Any,
    ) -> None:
        """Lock the ``core`` or ``memory`` clock to a range in Hz, set the power ``limit`` in W,
        request the power ``profiles`` of a mask and no others, or switch power ``smoothing``.

        None gives a clock back to the driver. ``Refused`` when the driver will not.
        """
        nvml = self._nvml
        clock_name = {"core": "Gpu", "memory": "Memory"}.get(knob)
        if knob == "profiles":
            self._request_profiles(int(value))
        elif knob == "smoothing":
            state = nvml.c_nvmlPowerSmoothingState_v1_t()
            state.state = int(value)
            what = f"switch power smoothing {'on' if value else 'off'}"
            self._set(nvml.nvmlDevicePowerSmoothingSetState, what, ctypes.byref(state))
        elif clock_name is None:
            set_limit = nvml.nvmlDeviceSetPowerManagementLimit
            self._set(set_limit, f"set the power limit to {value:.0f} W", round(1e3 * value))
        elif value is None:
            reset_clock = getattr(nvml, f"nvmlDeviceReset{clock_name}LockedClocks")
            self._set(reset_clock, f"reset the {knob} clock")
        else:
            low_mhz, high_mhz = (round(hz / 1e6) for hz in value)
            lock_clock = getattr(nvml, f"nvmlDeviceSet{clock_name}LockedClocks")
            self._set(lock_clock, f"lock the {knob} clock at {high_mhz} MHz", low_mhz, high_mhz)

    def _request_profiles(self, mask: int) -> None:
        """Request the power profiles of a mask, and withdraw all others."""
        nvml = self._nvml
        earlier = int(self.read_optional_knob("profiles") or 0.0)
        for bits, name, what in (
            (mask & ~earlier, "Set", "request"),  # first: what is refused leaves the earlier ones
            (earlier & ~mask, "Clear", "withdraw"),
        ):
            if not bits:
                continue
            request = nvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
            for word in range(MASK_WORDS):
                request.requestedProfilesMask.mask[word] = bits >> 32 * word & 0xFFFFFFFF
            function = getattr(nvml, f"nvmlDeviceWorkloadPowerProfile{name}RequestedProfiles")
            self._set(function, f"{what} power profiles", ctypes.byref(request))

    def _set(
        self,
        function: Any,
        what: str,
        *arguments: Any,
    ) -> None:
        try:
            self._call(function, self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
                raise Refused(f"no permission to {what} on {self.name}. Run as root.") from None
            raise Refused(f"{self.name} will not {what}: {error}.") from None

    def _optional(
        self,
        function: Any,
        *arguments: Any,
    ) -> Any:
        """Return a reading that we can do without; None when the card does not have it."""
        try:
            return self._call(function, *arguments)
        except self._nvml.NVMLError:
            return None

    def _call(
        self,
        function: Callable[..., T],
        *arguments: Any,
    ) -> T:
        assert self._caller is not None, "open the card first"
        nvml = self._nvml
        try:
            return self._caller.call(function, *arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED):
                lost = f"the card {self.name or self.index} is lost ({error})."
                raise MissingTool(lost) from None
            if self._handle is None:
                missing = f"no NVIDIA card {self.index}: the driver says {error}."
                raise MissingTool(missing) from None
            raise


def _join_mask(mask: Any) -> int:
    """Return a mask of NVML, of words of 32 bits, as one number."""
    return sum(int(word) << 32 * place for place, word in enumerate(mask.mask))


def count_cards() -> int:
    """Count the NVIDIA cards of this machine; 0 where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return 0
    caller = _Caller(CALL_TIMEOUT_S)
    try:
        caller.call(pynvml.nvmlInit)
        return int(caller.call(pynvml.nvmlDeviceGetCount))
    except pynvml.NVMLError:
        return 0


_late_answers: list[Future[Any]] = []  # of calls of this process that passed their deadline


def _check_late_calls() -> None:
    """Raise ``MissingTool`` while many calls hang: each holds a thread, and one more would hang
    too.
    """
    _late_answers[:] = [answer for answer in _late_answers if not answer.done()]
    if len(_late_answers) >= MOST_LATE_CALLS:
        raise MissingTool(f"the driver hangs: {len(_late_answers)} calls have not returned.")


class _Caller:
    """Runs calls one after another on a thread of its own, each with a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._requests: Queue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = Queue()
        self._late_answer: Future[Any] | None = None  # of the call that passed its deadline
        _check_late_calls()
        threading.Thread(
            target=self._serve,
            daemon=True,
            name="nvml",
        ).start()

    @property
    def has_call_under_way(self) -> bool:
        """Tell whether the call that passed its deadline has not returned yet."""
        return self._late_answer is not None and not self._late_answer.done()

    def call(
        self,
        function: Callable[..., T],
        *arguments: Any,
    ) -> T:
        if self._late_answer is not None:
            raise MissingTool("the driver no longer answers.")
        answer: Future[T] = Future()
        self._requests.put((answer, function, arguments))
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            self._late_answer = answer
            _late_answers.append(answer)
            reason = f"the driver has not answered for {self._timeout_s:g} s."
            raise MissingTool(reason) from None

    def _serve(self) -> None:
        while self._late_answer is None:
            answer, function, arguments = self._requests.get()
            try:
                answer.set_result(function(*arguments))
            except Exception as error:
                answer.set_exception(error)


class _Gpm:
    """GPU performance monitoring (Hopper and later): activity between two samples, without a
    profiler.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
    ) -> None:
        self._nvml = nvml
        self._handle = handle
        self._old = nvml.nvmlGpmSampleAlloc()
        self._new = nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._old)

    @classmethod
    def start(
        cls,
        nvml: Any,
        handle: Any,
    ) -> _Gpm | None:
        """Start monitoring; return None where the card or the binding has no such thing."""
        try:
            is_supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
            return cls(nvml, handle) if is_supported else None
        except (nvml.NVMLError, AttributeError):  # an old driver, or an old binding
            return None

    def read(self) -> dict[str, float]:
        """Return the utilisation of SMs, DRAM and pipes since the last call, each as a share."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._new)
        metrics = tuple(GPM_COUNTERS.values())
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        request.sample1 = self._old
        request.sample2 = self._new
        for place, metric in enumerate(metrics):
            request.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(request)
        self._old, self._new = self._new, self._old

        shares = {}
        for place, name in enumerate(GPM_COUNTERS):
            answer = request.metrics[place]
            shares[name] = answer.value / 100.0 if answer.nvmlReturn == 0 else math.nan
        return shares
