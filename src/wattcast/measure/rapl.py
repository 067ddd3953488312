"""CPU package energy through RAPL (Linux powercap); readable by root on most machines."""

from __future__ import annotations

import math
from pathlib import Path

from wattcast.errors import MissingTool
from wattcast.measure.source import Identity, ReadError, Slow

ROOT = Path("/sys/class/powercap")


class RaplSource:
    """All packages together. Each package's counter wraps on its own and is unwrapped here."""

    energy_range_j: float | None = None

    def __init__(self, index: int = 0, root: Path = ROOT) -> None:
        self._root = root
        self._packages: list[tuple[Path, float]] = []
        self._last_j: list[float] = []
        self._offset_j: list[float] = []

    def open(self) -> Identity:
        for folder in sorted(self._root.glob("*-rapl:*")):
            if folder.name.count(":") != 1:  # a sub-domain, counted in its package
                continue
            try:
                range_j = float((folder / "max_energy_range_uj").read_text()) * 1e-6
                last_j = float((folder / "energy_uj").read_text()) * 1e-6
            except PermissionError:
                raise MissingTool(
                    f"{folder}/energy_uj may not be read; run as root or ask for read access."
                ) from None
            except (OSError, ValueError):
                continue
            self._packages.append((folder / "energy_uj", range_j))
            self._last_j.append(last_j)
            self._offset_j.append(0.0)
        if not self._packages:
            raise MissingTool("there is no RAPL counter under /sys/class/powercap.")
        return Identity(f"CPU, {len(self._packages)} package(s)", library="RAPL", notes=("package energy, no GPU",))

    def energy_j(self) -> float:
        total = 0.0
        for place, (path, range_j) in enumerate(self._packages):
            try:
                now_j = float(path.read_text()) * 1e-6
            except (OSError, ValueError) as error:
                raise ReadError(f"RAPL counter cannot be read: {error}") from None
            if now_j < self._last_j[place]:
                self._offset_j[place] += range_j
            self._last_j[place] = now_j
            total += now_j + self._offset_j[place]
        return total

    def sm_clock_hz(self) -> float:
        return math.nan

    def slow(self) -> Slow:
        return Slow()

    def close(self) -> None:
        self._packages = []
