"""AMD GPUs through amdsmi, the vendor's library. Reads only."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from wattcast.errors import MissingTool
from wattcast.measure.source import Identity, ReadError, Slow


class AmdSource:
    """One GPU, by its place in amdsmi's list."""

    energy_range_j: float | None = None

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._smi: Any = None
        self._handle: Any = None

    def open(self) -> Identity:
        try:
            import amdsmi
        except (ImportError, OSError):
            raise MissingTool("amdsmi is not installed (it comes with ROCm).") from None
        self._smi = amdsmi
        try:
            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
            if self._index >= len(handles):
                raise MissingTool(f"amdsmi sees {len(handles)} GPUs; there is no number {self._index}.")
            self._handle = handles[self._index]
            asic = amdsmi.amdsmi_get_gpu_asic_info(self._handle)
        except amdsmi.AmdSmiException as error:
            raise MissingTool(f"amdsmi answers {error}.") from None
        return Identity(
            str(asic.get("market_name", "AMD GPU")),
            uuid=str(self._or("", lambda: amdsmi.amdsmi_get_gpu_device_uuid(self._handle))),
            serial=str(asic.get("asic_serial", "")),
            driver=str(
                self._or({}, lambda: amdsmi.amdsmi_get_gpu_driver_info(self._handle)).get("driver_version", "")
            ),
        )

    def energy_j(self) -> float:
        """Counter value times its resolution (in microjoules per count)."""
        try:
            count = self._smi.amdsmi_get_energy_count(self._handle)
        except self._smi.AmdSmiException as error:
            raise ReadError(str(error)) from None
        value = count.get("energy_accumulator", count.get("power"))
        return float(value) * float(count["counter_resolution"]) * 1e-6

    def sm_clock_hz(self) -> float:
        return self._number(lambda: self._clock(self._smi.AmdSmiClkType.GFX))

    def slow(self) -> Slow:
        sensor = self._smi.AmdSmiTemperatureType.HOTSPOT, self._smi.AmdSmiTemperatureMetric.CURRENT
        power = self._or({}, lambda: self._smi.amdsmi_get_power_info(self._handle))
        return Slow(
            memory_clock_hz=self._number(lambda: self._clock(self._smi.AmdSmiClkType.MEM)),
            instant_w=_watts(power.get("current_socket_power")),
            average_w=_watts(power.get("average_socket_power")),
            temperature_c=self._number(lambda: self._smi.amdsmi_get_temp_metric(self._handle, *sensor)),
        )

    def close(self) -> None:
        if self._smi is not None:
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()

    def _clock(self, domain: Any) -> float:
        return float(self._smi.amdsmi_get_clock_info(self._handle, domain)["clk"]) * 1e6

    def _number(self, call: Any) -> float:
        try:
            return float(call())
        except (self._smi.AmdSmiException, TypeError, ValueError):
            return math.nan

    def _or(self, otherwise: Any, call: Any) -> Any:
        try:
            return call()
        except self._smi.AmdSmiException:
            return otherwise


def _watts(value: object) -> float:
    """amdsmi gives a number or the text ``N/A``."""
    return float(value) if isinstance(value, (int, float)) else math.nan
