"""The multimedia workloads on a device: a clip in memory, one launch for all its frames, checked against NumPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.errors import WattcastError
from wattcast.measure.microbench.device import Device, Kernel
from wattcast.measure.multimedia import reference
from wattcast.measure.multimedia.reference import BLOCKS_X, BLOCKS_Y, FRAME_BYTE, LUMA
from wattcast.measure.nvrtc import compile_cubin

TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
THREADS = 256
DCTS = ("dct_fp32_cached", "dct_fp32_uncached", "dct_fp64_cached", "dct_fp64_uncached")
NAMES = ("rotate", "motion", "debarrel", *DCTS)
ROUNDED_OFF = 2e-3  # share of coefficients that may round to the other side


class CheckFailed(WattcastError):
    """A workload's output is not NumPy's."""


def source() -> str:
    """CUDA C of all workloads."""
    return files("wattcast.measure.multimedia").joinpath("kernels.cu").read_text(encoding="utf-8")


@dataclass
class Clip:
    """A clip in device memory, room for a result, and the tables the workloads read."""

    device: Device
    cubin: bytes
    frames: int
    taken: int  # address of the frames
    result: int
    tables: dict[str, int]
    kernels: dict[str, Kernel]
    verdicts: dict[str, str] = field(default_factory=dict)  # of the checks done so far

    @classmethod
    def make(cls, device: Device, frames: int = reference.FRAMES) -> Clip:
        """Compile, allocate and draw the clip; its first and last frame must be NumPy's."""
        cubin = compile_cubin(source(), device.architecture, "multimedia.cu")
        taken, result = device.allocate(frames * FRAME_BYTE), device.allocate(frames * LUMA * 2)
        cosines = reference.cosines()
        wanted: dict[str, npt.NDArray[Any]] = {
            "turns": reference.turns(frames),
            "map": reference.barrel_map(),
            "fp32": cosines.astype(np.float32),
            "fp64": cosines,
        }
        tables = {}
        for name, values in wanted.items():
            tables[name] = device.allocate(values.nbytes)
            device.upload(tables[name], values)
        clip = cls(device, cubin, frames, taken, result, tables, {})
        clip._launch("clip", frames * FRAME_BYTE, taken, tables["turns"], result)
        for number in (0, frames - 1):
            if not np.array_equal(clip.frame(taken, number), reference.frame(number)):
                raise CheckFailed(f"frame {number} of the clip is not what NumPy draws.")
        return clip

    def frame(self, address: int, number: int) -> npt.NDArray[np.uint8]:
        """One frame, downloaded."""
        values = self.device.download(address + number * FRAME_BYTE, FRAME_BYTE, np.uint8)
        return values.astype(np.uint8, copy=False)

    def items(self, name: str, frames: int = 0) -> int:
        """Threads a workload needs for so many frames, or for all."""
        count = frames or self.frames
        if name == "motion":
            return (count - 1) * BLOCKS_X * BLOCKS_Y
        return count * (LUMA if name.startswith("dct") else FRAME_BYTE)

    def enqueue(self, name: str, frames: int = 0) -> None:
        """One launch over the first ``frames`` frames, or over all."""
        table = {"rotate": "turns", "debarrel": "map", "motion": "turns"}.get(name) or name.split("_")[1]
        addresses = (self.taken, self.tables[table], self.result)
        self._launch(name, self.items(name, frames), *addresses, frames=frames)

    def _launch(self, name: str, items: int, *addresses: int, frames: int = 0) -> None:
        if name not in self.kernels:
            self.kernels[name] = self.device.load(self.cubin, f"media_{name}")
        blocks = -(-items // THREADS)
        self.device.launch(self.kernels[name], blocks, THREADS, (*addresses, frames or self.frames), TYPES)

    def check(self, name: str) -> str:
        """Run once, on the first call, and compare one frame with NumPy; :class:`CheckFailed` when they differ."""
        number = min(2, self.frames - 1)
        if name not in self.verdicts:
            self.device.zero(self.result, self.frames * LUMA * 2)
            self.enqueue(name)
            how = {"rotate": self._rotate, "debarrel": self._debarrel, "motion": self._motion}
            self.verdicts[name] = how.get(name, self._dct)(number)
        if self.verdicts[name]:
            raise CheckFailed(f"{name}: {self.verdicts[name]} of frame {number} differ from NumPy.")
        return "passed"

    def _rotate(self, number: int) -> str:
        cosine, sine = (int(value) for value in reference.turns(self.frames)[number])
        wanted = reference.rotate(reference.frame(number), cosine, sine)
        return _pixels(self.frame(self.result, number), wanted)

    def _debarrel(self, number: int) -> str:
        wanted = reference.debarrel(reference.frame(number), reference.barrel_map())
        return _pixels(self.frame(self.result, number), wanted)

    def _motion(self, number: int) -> str:
        blocks = np.arange(0, BLOCKS_X * BLOCKS_Y, 7)
        wanted = reference.motion(reference.frame(number), reference.frame(number - 1), blocks)
        place = self.result + (number - 1) * BLOCKS_X * BLOCKS_Y * 8
        found = self.device.download(place, BLOCKS_X * BLOCKS_Y * 4, np.int16).reshape(-1, 4)[blocks, :3]
        wrong = int((found != wanted).any(axis=1).sum())
        return f"{wrong} of {len(blocks)} blocks" if wrong else ""

    def _dct(self, number: int) -> str:
        wanted = reference.dct(reference.frame(number)).reshape(-1)
        found = self.device.download(self.result + number * LUMA * 2, LUMA, np.int16).astype(np.float64)
        off = np.abs(found - wanted)
        share = float((off > 0.501).mean())
        wrong = share > ROUNDED_OFF or off.max() > 1.01
        return f"{share:.2%} of the coefficients (largest error {off.max():.2f})" if wrong else ""


def _pixels(found: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> str:
    wrong = int((found != wanted).sum())
    return f"{wrong} pixels" if wrong else ""
