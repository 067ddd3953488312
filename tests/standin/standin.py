"""Compiles the stand-in NVML library and points child processes at it.

``nvidia-ml-py`` loads ``libnvidia-ml.so.1`` by name, so a child process with this folder first in
``LD_LIBRARY_PATH`` meets the stand-in through the real binding. The script it follows is a text
file that may be rewritten at any time; ``nvml.c`` describes its lines."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISTURBED = {"late_polls", "late_periods"}  # flags of a measurement whose host was stalled
SOURCE = Path(__file__).with_name("nvml.c")


@dataclass(frozen=True)
class StandIn:
    """A compiled library and the script it follows."""

    folder: Path
    script: Path
    always: tuple[str, ...] = ()  # lines that every script has

    @property
    def environment(self) -> dict[str, str]:
        """Variables a child process needs to meet the stand-in."""
        return {"LD_LIBRARY_PATH": str(self.folder), "WATTCAST_STANDIN": str(self.script)}

    def follow(self, *lines: str) -> float:
        """Follow these lines from now on; returns the epoch their times count from."""
        epoch_s = time.monotonic()
        beside = self.script.with_suffix(".new")
        beside.write_text("\n".join([f"epoch {epoch_s:.6f}", *self.always, *lines]) + "\n")
        beside.replace(self.script)
        return epoch_s


def compile_library(folder: Path) -> Path | None:
    """``libnvidia-ml.so.1`` in ``folder``; None when there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
        str(library),
        str(SOURCE),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return library


def undisturbed(measure: Callable[[], Any], patience_s: float = 240.0) -> Any:
    """What ``measure`` gives, again while its ``flags`` say that the machine was too busy to poll
    in time.
    """
    end_s = time.monotonic() + patience_s
    attempts = 0
    while True:
        measured = measure()
        attempts += 1
        flags = DISTURBED & set(measured.flags)
        if not flags:
            return measured
        assert time.monotonic() < end_s, f"{attempts} attempts on a stalled machine: {flags}"
