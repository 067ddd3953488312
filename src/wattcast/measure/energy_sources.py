"""Read energy, power and clocks of a device: NVIDIA through NVML, AMD through amdsmi, CPU packages
through RAPL.

A source only reads; it never sets anything. A value that it cannot read is NaN.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Protocol,
    TypeVar,
)

from wattcast.core import MissingTool, unknown_name
from wattcast.measure.visible_devices import (
    DeviceChoice,
    ListedCard,
    choose_amd_card,
    choose_nvidia_card,
)

if TYPE_CHECKING:
    from wattcast.measure.counter_ticks import UnwrappedCounter

T = TypeVar("T")


@dataclass(frozen=True)
class SlowReadings:
    """Readings that change slowly or cost more, in the order of the ring's columns; NaN where the
    device has none.
    """

    memory_clock_hz: float = math.nan
    instant_w: float = math.nan
    average_w: float = math.nan
    memory_w: float = math.nan
    temperature_c: float = math.nan
    throttle: float = math.nan


@dataclass(frozen=True)
class DeviceIdentity:
    """Which device, and with which driver."""

    name: str
    uuid: str = ""
    serial: str = ""
    board: str = ""  # part number; cards of one name differ in what their memory draws
    driver: str = ""
    library: str = ""
    power_limit_w: float | None = None
    top_clock_hz: float | None = None
    index: int = 0  # as its driver numbers it
    note: str = ""  # what a user should know about the choice of this device
    flag: str = ""  # why its energy is not that of the program alone


class ReadError(Exception):
    """A reading failed. ``lost`` says the device itself is gone."""

    def __init__(
        self,
        message: str,
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.lost = lost


class EnergySource(Protocol):
    """A device whose energy, power and clocks can be read."""

    energy_range_j: float | None = None  # where its energy counter wraps, if it does

    def open(self) -> DeviceIdentity:
        """Connect; raises ``MissingTool`` when there is nothing to read."""

    def energy_j(self) -> float:
        """Return the energy counter, or NaN when there is none."""

    def sm_clock_hz(self) -> float:
        """Return the core clock as the driver reports it, or NaN when it does not."""
        return math.nan

    def slow(self) -> SlowReadings:
        """Return everything else that the device can tell."""
        return SlowReadings()

    def close(self) -> None:
        """Disconnect."""


def find_source_makers(name: str) -> dict[str, Callable[[int | None], EnergySource]]:
    """Return what makes the source called ``name``, or with ``auto`` all of them in the order they
    are tried.
    """
    makers: dict[str, Callable[[int | None], EnergySource]] = {
        "nvml": NvmlSource,
        "amd": AmdSource,
        "jetson": JetsonSource,
        "rapl": RaplSource,
    }
    if name == "auto":
        return makers
    if name not in makers:
        raise unknown_name("energy source", name, makers, f"Known: auto, {', '.join(makers)}.")
    return {name: makers[name]}


def open_source(
    name: str = "auto", index: int | None = None
) -> tuple[EnergySource, DeviceIdentity]:
    """Open the source called ``name`` (``nvml``, ``amd``, ``jetson``, ``rapl``), or with ``auto``
    the first that answers.

    Without an ``index``, the card is the first that ``CUDA_VISIBLE_DEVICES`` and its relatives
    show.
    """
    refusals: list[str] = []
    for label, make in find_source_makers(name).items():
        source = make(index)
        try:
            return source, source.open()
        except MissingTool as error:
            source.close()  # one that has no such card may be open
            refusals.append(f"{label}: {error}")
    raise MissingTool(
        "no energy source on this machine: measuring needs an NVIDIA GPU with its driver "
        "and nvidia-ml-py, an AMD GPU with amdsmi, a Jetson, or a CPU whose RAPL counters "
        f"may be read. Tried {' '.join(refusals)}"
    )


# Fields of a power reading: NVML_FI_DEV_POWER_AVERAGE, NVML_FI_DEV_POWER_INSTANT.
AVERAGE = 185
INSTANT = 186
# Their scopes: NVML_POWER_SCOPE_*.
GPU = 0
MEMORY = 2
POWER_FIELDS = [(AVERAGE, GPU), (INSTANT, GPU), (AVERAGE, MEMORY)]
# Clocks: NVML_CLOCK_SM, NVML_CLOCK_MEM.
SM_CLOCK = 1
MEMORY_CLOCK = 2
COUNTER_RANGE_J = 2.0**32 / 1e3  # the counter is 64 bits of mJ; some firmware keeps 32


def choose_nvml_index(nvml: Any, environ: Mapping[str, str]) -> DeviceChoice:
    """Return the card that a CUDA program with this environment uses; NVML is open."""
    cards = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = decode_text(nvml.nvmlDeviceGetUUID(handle))
            name = decode_text(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError:  # a lost card keeps its number
            uuid = ""
            name = "lost"
        cards.append(ListedCard(index, name, uuid))

    def find_mig_parent(uuid: str) -> str | None:
        try:
            instance = nvml.nvmlDeviceGetHandleByUUID(uuid)
            parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
            return decode_text(nvml.nvmlDeviceGetUUID(parent))
        except nvml.NVMLError:
            return None

    return choose_nvidia_card(cards, environ, find_mig_parent)


class NvmlSource(EnergySource):
    """One GPU, by NVML index, or the one that this process's CUDA programs use."""

    energy_range_j: float | None = COUNTER_RANGE_J

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self._nvml: Any = None
        self._handle: Any = None

    def open(self) -> DeviceIdentity:
        try:
            import pynvml
        except ImportError:
            raise MissingTool(
                "nvidia-ml-py is not installed (pip install 'wattcast[measure]')."
            ) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            chosen = DeviceChoice(self._index or 0)
            if self._index is None:
                chosen = choose_nvml_index(pynvml, os.environ)
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(chosen.index)
            name = decode_text(pynvml.nvmlDeviceGetName(self._handle))
        except pynvml.NVMLError as error:
            raise MissingTool(f"NVML answers {error}.") from None
        return self._identify(name, chosen)

    def _identify(
        self,
        name: str,
        chosen: DeviceChoice,
    ) -> DeviceIdentity:
        """Describe the card; what it does not report stays empty."""
        nvml = self._nvml
        handle = self._handle
        limit_mw = self._or(None, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        top_clock_mhz = self._or(None, nvml.nvmlDeviceGetMaxClockInfo, handle, SM_CLOCK)
        return DeviceIdentity(
            name,
            uuid=decode_text(self._or("", nvml.nvmlDeviceGetUUID, handle)),
            serial=decode_text(self._or("", nvml.nvmlDeviceGetSerial, handle)),
            board=decode_text(self._or("", nvml.nvmlDeviceGetBoardPartNumber, handle)),
            driver=decode_text(self._or("", nvml.nvmlSystemGetDriverVersion)),
            library=decode_text(self._or("", nvml.nvmlSystemGetNVMLVersion)),
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            top_clock_hz=None if top_clock_mhz is None else top_clock_mhz * 1e6,
            index=chosen.index,
            note=chosen.note,
            flag=chosen.flag,
        )

    def energy_j(self) -> float:
        nvml = self._nvml
        millijoules = self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, needed=True)
        return millijoules / 1e3

    def sm_clock_hz(self) -> float:
        return 1e6 * self._read(self._nvml.nvmlDeviceGetClockInfo, SM_CLOCK, needed=True)

    def slow(self) -> SlowReadings:
        nvml = self._nvml
        average_w, instant_w, memory_w = self._read_powers_w()
        return SlowReadings(
            memory_clock_hz=1e6 * self._read(nvml.nvmlDeviceGetClockInfo, MEMORY_CLOCK),
            average_w=average_w,
            instant_w=instant_w,
            memory_w=memory_w,
            temperature_c=self._read(nvml.nvmlDeviceGetTemperature, 0),
            throttle=self._read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )

    def _read_powers_w(self) -> tuple[float, float, float]:
        """Return average and instant power of the card, and average power of its memory."""
        fields = self._ask(self._nvml.nvmlDeviceGetFieldValues, POWER_FIELDS)
        watts = [math.nan] * len(POWER_FIELDS)
        for place, reading in enumerate(fields or ()):
            if reading.nvmlReturn == 0:
                watts[place] = reading.value.uiVal / 1e3
        average_w, instant_w, memory_w = watts
        if math.isnan(average_w) and math.isnan(instant_w):
            # Older cards have one reading for all.
            instant_w = self._read(self._nvml.nvmlDeviceGetPowerUsage) / 1e3
        return average_w, instant_w, memory_w

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _read(
        self,
        call: Callable[..., float],
        *arguments: Any,
        needed: bool = False,
    ) -> float:
        """Return a reading; NaN where the card does not have it, or where one fails that we can do
        without.
        """
        value = self._ask(call, *arguments, needed=needed)
        return math.nan if value is None else float(value)

    def _ask(
        self,
        call: Callable[..., Any],
        *arguments: Any,
        needed: bool = False,
    ) -> Any:
        """Return what the driver answers, None where it refuses; a lost card is an error."""
        nvml = self._nvml
        try:
            return call(self._handle, *arguments)
        except nvml.NVMLError as error:
            is_lost = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED)
            if is_lost or (needed and error.value != nvml.NVML_ERROR_NOT_SUPPORTED):
                raise ReadError(str(error), is_lost) from None
            return None

    def _or(
        self,
        otherwise: Any,
        call: Any,
        *arguments: Any,
    ) -> Any:
        """Return what the driver answers; ``otherwise`` where it refuses."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return otherwise


def decode_text(value: str | bytes) -> str:
    """Return a name as text, which older bindings give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class AmdSource(EnergySource):
    """One GPU, by its place in amdsmi's list, or the one that this process's HIP programs use."""

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self._smi: Any = None
        self._handle: Any = None

    def open(self) -> DeviceIdentity:
        try:
            import amdsmi
        except (ImportError, OSError):
            raise MissingTool("amdsmi is not installed (it comes with ROCm).") from None
        self._smi = amdsmi
        try:
            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
            chosen = DeviceChoice(self._index or 0)
            if self._index is None:
                chosen = choose_amd_card(self._list_cards(handles), os.environ)
            if chosen.index >= len(handles):
                raise MissingTool(
                    f"amdsmi sees {len(handles)} GPUs; there is no number {chosen.index}."
                )
            self._handle = handles[chosen.index]
            asic = amdsmi.amdsmi_get_gpu_asic_info(self._handle)
        except amdsmi.AmdSmiException as error:
            raise MissingTool(f"amdsmi answers {error}.") from None
        driver: dict[str, Any] = self._or(
            {}, lambda: amdsmi.amdsmi_get_gpu_driver_info(self._handle)
        )
        return DeviceIdentity(
            str(asic.get("market_name", "AMD GPU")),
            uuid=str(self._or("", lambda: amdsmi.amdsmi_get_gpu_device_uuid(self._handle))),
            serial=str(asic.get("asic_serial", "")),
            driver=str(driver.get("driver_version", "")),
            index=chosen.index,
            note=chosen.note,
        )

    def _list_cards(self, handles: list[Any]) -> list[ListedCard]:
        cards = []
        for index, handle in enumerate(handles):
            read_uuid = partial(self._smi.amdsmi_get_gpu_device_uuid, handle)
            uuid = str(self._or("", read_uuid))
            cards.append(ListedCard(index, "AMD GPU", uuid))
        return cards

    def energy_j(self) -> float:
        """Return the counter's value times its resolution (in microjoules per count)."""
        try:
            count = self._smi.amdsmi_get_energy_count(self._handle)
        except self._smi.AmdSmiException as error:
            raise ReadError(str(error)) from None
        value = count.get("energy_accumulator", count.get("power"))
        return float(value) * float(count["counter_resolution"]) * 1e-6

    def sm_clock_hz(self) -> float:
        return self._read_clock_hz(self._smi.AmdSmiClkType.GFX)

    def slow(self) -> SlowReadings:
        smi = self._smi
        sensor = smi.AmdSmiTemperatureType.HOTSPOT
        metric = smi.AmdSmiTemperatureMetric.CURRENT
        power: dict[str, Any] = self._or({}, lambda: smi.amdsmi_get_power_info(self._handle))
        return SlowReadings(
            memory_clock_hz=self._read_clock_hz(smi.AmdSmiClkType.MEM),
            instant_w=self._or(math.nan, lambda: float(power.get("current_socket_power", "N/A"))),
            average_w=self._or(math.nan, lambda: float(power.get("average_socket_power", "N/A"))),
            temperature_c=self._or(
                math.nan, lambda: float(smi.amdsmi_get_temp_metric(self._handle, sensor, metric))
            ),
        )

    def close(self) -> None:
        if self._smi is not None:
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()

    def _read_clock_hz(self, domain: Any) -> float:
        read_clock = self._smi.amdsmi_get_clock_info
        return self._or(math.nan, lambda: float(read_clock(self._handle, domain)["clk"]) * 1e6)

    def _or(
        self,
        otherwise: T,
        call: Callable[[], T],
    ) -> T:
        """Return what a call gives; ``otherwise`` where it fails, or gives the text N/A for a
        number.
        """
        try:
            return call()
        except (self._smi.AmdSmiException, TypeError, ValueError):
            return otherwise


ROOT = Path("/sys/class/powercap")
PACKAGE_W = 2000.0  # no package of a processor draws as much


_MONITORS = "sys/bus/i2c/drivers/ina3221"
_DEVFREQ = "sys/class/devfreq"
_MODEL = "proc/device-tree/model"
_RELEASE = "etc/nv_tegra_release"
_WHOLE_RAILS = ("VDD_IN", "POM_5V_IN")
_GPU_NAMES = ("gpu", "gv11b", "gp10b", "gm20b", "ga10b", "gb10b")


class JetsonSource(EnergySource):
    """The power monitors of one Jetson, from files that every user may read.

    Boards carry INA3221 monitors with three rails each; the kernel lists their labels, millivolts
    and milliamperes (NVIDIA Jetson Linux Developer Guide, "Software-Based Power Consumption
    Modeling"). The rail of the whole module is VDD_IN; boards without it (AGX Orin) are the sum of
    their rails. The GPU's clock is a devfreq file. There is no energy counter.
    """

    energy_range_j: float | None = None

    def __init__(
        self,
        index: int | None = None,
        root: Path = Path("/"),
    ) -> None:
        del index  # a board has one GPU
        self._root = root
        self._rails: list[tuple[str, Path, Path]] = []
        self._clock: Path | None = None

    def open(self) -> DeviceIdentity:
        for label in sorted((self._root / _MONITORS).glob("*/hwmon/hwmon*/in*_label")):
            number = label.name.removeprefix("in").removesuffix("_label")
            millivolt = label.with_name(f"in{number}_input")
            milliampere = label.with_name(f"curr{number}_input")
            if millivolt.exists() and milliampere.exists():
                self._rails.append((label.read_text().strip(), millivolt, milliampere))
        if not self._rails:
            raise MissingTool(f"no INA3221 power monitor below /{_MONITORS}.")
        folders = sorted((self._root / _DEVFREQ).glob("*"))
        gpus = [item for item in folders if any(word in item.name for word in _GPU_NAMES)]
        self._clock = gpus[0] / "cur_freq" if gpus else None
        return DeviceIdentity(
            self._read_text(_MODEL) or "Jetson",
            driver=self._read_text(_RELEASE).partition(",")[0],
            top_clock_hz=_read_number(gpus[0] / "max_freq") if gpus else None,
        )

    def _read_text(self, path: str) -> str:
        file = self._root / path
        return file.read_text().strip("\0\n ") if file.exists() else ""

    def energy_j(self) -> float:
        return math.nan

    def sm_clock_hz(self) -> float:
        return math.nan if self._clock is None else _read_number(self._clock)

    def slow(self) -> SlowReadings:
        watts = {}
        for name, millivolt, milliampere in self._rails:
            watts[name] = 1e-6 * _read_number(millivolt) * _read_number(milliampere)
        whole = [watts[name] for name in _WHOLE_RAILS if name in watts]
        return SlowReadings(instant_w=whole[0] if whole else sum(watts.values()))

    def close(self) -> None:
        self._rails = []


def _read_number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return math.nan


class RaplSource(EnergySource):
    """All packages together. Each package's counter wraps on its own and is unwrapped here.

    A package that falls further than it could have drawn has restarted: the sum then falls too.
    """

    def __init__(
        self,
        index: int | None = None,
        root: Path = ROOT,
    ) -> None:
        self._index = index or 0
        self._root = root
        self._packages: list[tuple[Path, UnwrappedCounter]] = []

    def open(self) -> DeviceIdentity:
        if self._index > 0:
            raise MissingTool(f"all packages are device 0; there is no number {self._index}.")
        # Only packages wrap here, and processes that set cards start without NumPy.
        from wattcast.measure.counter_ticks import UnwrappedCounter

        for folder in sorted(self._root.glob("*-rapl:*")):
            if folder.name.count(":") != 1:  # a sub-domain, counted in its package
                continue
            try:
                range_j = float((folder / "max_energy_range_uj").read_text()) * 1e-6
                now_j = float((folder / "energy_uj").read_text()) * 1e-6
            except PermissionError:
                raise MissingTool(
                    f"{folder}/energy_uj may not be read; run as root or ask for read access."
                ) from None
            except (OSError, ValueError):
                continue
            counter = UnwrappedCounter(range_j, PACKAGE_W)
            counter.follow(now_j, time.monotonic())
            self._packages.append((folder / "energy_uj", counter))
        if not self._packages:
            raise MissingTool("there is no RAPL counter under /sys/class/powercap.")
        return DeviceIdentity(f"CPU, {len(self._packages)} package(s)", library="RAPL")

    def energy_j(self) -> float:
        total_j = 0.0
        for path, counter in self._packages:
            try:
                now_j = float(path.read_text()) * 1e-6
            except (OSError, ValueError) as error:
                raise ReadError(f"RAPL counter cannot be read: {error}") from None
            total_j += counter.follow(now_j, time.monotonic())
        return total_j

    def close(self) -> None:
        self._packages = []
