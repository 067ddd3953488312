"""Read power and clock of a Jetson from files that every user may read.

Boards carry INA3221 monitors with three rails each; the kernel lists their labels, millivolts and
milliamperes below ``/sys/bus/i2c/drivers/ina3221`` (NVIDIA Jetson Linux Developer Guide, "Software-
Based Power Consumption Modeling"; L4T 35 and newer use hwmon). The rail of the whole module is
VDD_IN; boards without it (AGX Orin) are the sum of their rails. The GPU's clock is a devfreq file.
There is no energy counter.
"""

from __future__ import annotations

import math
from pathlib import Path

from wattcast.core.errors import MissingTool
from wattcast.measure.energy_sources import DeviceIdentity, EnergySource, SlowReadings

_MONITORS = "sys/bus/i2c/drivers/ina3221"
_DEVFREQ = "sys/class/devfreq"
_MODEL = "proc/device-tree/model"
_RELEASE = "etc/nv_tegra_release"
_WHOLE_RAILS = ("VDD_IN", "POM_5V_IN")
_GPU_NAMES = ("gpu", "gv11b", "gp10b", "gm20b", "ga10b", "gb10b")


class JetsonSource(EnergySource):
    """The power monitors of one board."""

    energy_range_j: float | None = None

    def __init__(self, index: int | None = None, root: Path = Path("/")) -> None:
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
