"""NVIDIA GPUs through NVML (``nvidia-ml-py``). Reads only: no function here changes a setting."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from wattcast.errors import MissingTool
from wattcast.measure.source import Identity, ReadError, Slow

AVERAGE, INSTANT = 185, 186  # NVML_FI_DEV_POWER_AVERAGE, NVML_FI_DEV_POWER_INSTANT
GPU, MEMORY = 0, 2  # NVML_POWER_SCOPE_*


class NvmlSource:
    """One GPU, by NVML index."""

    energy_range_j: float | None = 2.0**32 / 1e3  # the counter is 64 bits of mJ; some firmware keeps 32

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._nvml: Any = None
        self._handle: Any = None

    def open(self) -> Identity:
        try:
            import pynvml
        except ImportError:
            raise MissingTool("nvidia-ml-py is not installed (pip install nvidia-ml-py).") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            name = _text(pynvml.nvmlDeviceGetName(self._handle))
        except pynvml.NVMLError as error:
            raise MissingTool(f"NVML answers {error}.") from None
        return Identity(
            name,
            uuid=_text(self._or("", pynvml.nvmlDeviceGetUUID, self._handle)),
            serial=_text(self._or("", pynvml.nvmlDeviceGetSerial, self._handle)),
            driver=_text(self._or("", pynvml.nvmlSystemGetDriverVersion)),
            library=_text(self._or("", pynvml.nvmlSystemGetNVMLVersion)),
            power_limit_w=self._or(None, lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3),
            top_clock_hz=self._or(None, lambda: pynvml.nvmlDeviceGetMaxClockInfo(self._handle, 1) * 1e6),
        )

    def energy_j(self) -> float:
        return self._read(lambda n: n.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)

    def sm_clock_hz(self) -> float:
        return self._read(lambda n: n.nvmlDeviceGetClockInfo(self._handle, 1) * 1e6)

    def slow(self) -> Slow:
        average_w, instant_w, memory_w = self._powers()
        return Slow(
            memory_clock_hz=self._soft(lambda n: n.nvmlDeviceGetClockInfo(self._handle, 2) * 1e6),
            instant_w=instant_w,
            average_w=average_w,
            memory_w=memory_w,
            temperature_c=self._soft(lambda n: float(n.nvmlDeviceGetTemperature(self._handle, 0))),
            throttle=self._soft(lambda n: float(n.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))),
        )

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _powers(self) -> tuple[float, float, float]:
        """Average and instant board power and average memory power; older cards have one reading for all."""
        wanted = [(AVERAGE, GPU), (INSTANT, GPU), (AVERAGE, MEMORY)]
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
            watts = [v.value.uiVal / 1e3 if v.nvmlReturn == 0 else math.nan for v in values]
        except self._nvml.NVMLError as error:
            self._raise_if_lost(error)
            watts = [math.nan] * 3
        if math.isnan(watts[0]) and math.isnan(watts[1]):
            watts[1] = self._soft(lambda n: n.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
        return watts[0], watts[1], watts[2]

    def _read(self, call: Any) -> float:
        """A reading that must work; a card that does not have it gives NaN."""
        try:
            return float(call(self._nvml))
        except self._nvml.NVMLError as error:
            self._raise_if_lost(error)
            if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return math.nan
            raise ReadError(str(error), error.value) from None

    def _soft(self, call: Any) -> float:
        """A reading we can do without."""
        try:
            return float(call(self._nvml))
        except self._nvml.NVMLError as error:
            self._raise_if_lost(error)
            return math.nan

    def _raise_if_lost(self, error: Any) -> None:
        gone = {self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_UNINITIALIZED}
        if error.value in gone:
            raise ReadError(str(error), error.value, lost=True) from None

    def _or(self, otherwise: Any, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return otherwise


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
