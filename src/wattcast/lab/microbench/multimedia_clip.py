"""Run the multimedia workloads of paper 000 on a synthetic full-HD clip, and check each against
NumPy.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import files
from wattcast.core.errors import WattcastError
from wattcast.measure.cuda_device import (
    CudaDevice,
    CudaKernel,
    compile_cubin,
)

Frame = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

WIDTH = 1920
HEIGHT = 1080
FRAMES = 80
LUMA = WIDTH * HEIGHT
CHROMA = WIDTH * HEIGHT // 4
FRAME_BYTE = LUMA + 2 * CHROMA
# begin, width, height and black of the three planes
PLANES = (
    (0, WIDTH, HEIGHT, 16),
    *((LUMA + n * CHROMA, WIDTH // 2, HEIGHT // 2, 128) for n in range(2)),
)
BLOCKS_X = WIDTH // 8
BLOCKS_Y = HEIGHT // 8
LARGE = ((-2, 0), (-1, -1), (0, -2), (1, -1), (2, 0), (1, 1), (0, 2), (-1, 1))
SMALL = ((-1, 0), (0, -1), (1, 0), (0, 1))
KEPT = 9  # coefficients with u + v beyond this are dropped


def _hash_lattice(x: Ints, y: Ints) -> Ints:
    h = ((x & 0xFFFFFFFF) * 0x9E3779B9 & 0xFFFFFFFF) ^ ((y & 0xFFFFFFFF) * 0x85EBCA6B & 0xFFFFFFFF)
    h ^= h >> 15
    h = h * 0x2C1B3C6D & 0xFFFFFFFF
    h ^= h >> 12
    return h & 255


def draw_noise(x: Ints, y: Ints) -> Ints:
    """Draw value noise on a lattice of 16 pixels, 0 to 255."""
    cx = x >> 4
    cy = y >> 4
    fx = x & 15
    fy = y & 15
    top = _hash_lattice(cx, cy) * (16 - fx) + _hash_lattice(cx + 1, cy) * fx
    low = _hash_lattice(cx, cy + 1) * (16 - fx) + _hash_lattice(cx + 1, cy + 1) * fx
    return np.asarray((top * (16 - fy) + low * fy) >> 8)


@lru_cache(maxsize=4)
def draw_frame(number: int) -> Frame:
    """Draw frame ``number``: a scene that pans by (2, 1) a frame and a square that moves against
    it.
    """
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    inside = (x >= 900 - 3 * number) & (x < 1100 - 3 * number) & (y >= 500) & (y < 700)
    pan = draw_noise(x + 2 * number + 4096, y + number + 4096)
    luma = np.where(inside, 255 - draw_noise(x + 3 * number, y), pan)
    cy, cx = np.mgrid[0 : HEIGHT // 2, 0 : WIDTH // 2]
    chroma = [
        draw_noise(2 * cx + 2 * number, 2 * cy + number + 7000 * (plane + 1)) for plane in range(2)
    ]
    values = np.concatenate([luma.ravel(), *(plane.ravel() for plane in chroma)])
    return (16 + values * 219 // 255).astype(np.uint8)


def make_turns(frames: int = FRAMES) -> npt.NDArray[np.int32]:
    """Cosine and sine of each frame's angle, which grows to a whole turn, times 65536 (Eq. 4 with
    -θ).
    """
    angle = [2.0 * math.pi * f / frames for f in range(frames)]
    return np.array(
        [[round(65536 * math.cos(a)), round(65536 * math.sin(a))] for a in angle], dtype=np.int32
    )


def rotate_frame(
    source: Frame,
    cosine: int,
    sine: int,
) -> Frame:
    """Eq. 4: each pixel from where the rotation by -θ about the middle puts it, nearest below."""
    out = np.empty_like(source)
    for begin, width, height, black in PLANES:
        y, x = np.mgrid[0:height, 0:width]
        x = x - width // 2
        y = y - height // 2
        u = ((cosine * x + sine * y) >> 16) + width // 2
        v = ((cosine * y - sine * x) >> 16) + height // 2
        within = (u >= 0) & (u < width) & (v >= 0) & (v < height)
        plane = source[begin : begin + width * height]
        turned = plane[np.where(within, v * width + u, 0)]
        out[begin : begin + width * height] = np.where(within, turned, black).ravel()
    return out


def make_barrel_map(strength: float = 0.12) -> npt.NDArray[np.int32]:
    """Where each pixel of a frame comes from: radius r from the middle is read at r (1 + k r²); -1
    outside.
    """
    parts = []
    for begin, width, height, _ in PLANES:
        y, x = np.mgrid[0:height, 0:width].astype(np.float64)
        dx = (x - width / 2) / (width / 2)
        dy = (y - height / 2) / (width / 2)
        grow = 1.0 + strength * (dx * dx + dy * dy)
        u = np.floor(dx * grow * (width / 2) + width / 2).astype(np.int64)
        v = np.floor(dy * grow * (width / 2) + height / 2).astype(np.int64)
        within = (u >= 0) & (u < width) & (v >= 0) & (v < height)
        parts.append(np.where(within, begin + v * width + u, -1).ravel())
    return np.concatenate(parts).astype(np.int32)


def debarrel_frame(source: Frame, where: npt.NDArray[np.int32]) -> Frame:
    """Apply the map to one frame."""
    black = np.where(np.arange(FRAME_BYTE) < LUMA, 16, 128)
    return np.where(where >= 0, source[np.maximum(where, 0)], black).astype(np.uint8)


def search_motion(
    now: Frame,
    before: Frame,
    blocks: Ints | None = None,
) -> npt.NDArray[np.int16]:
    """Diamond search: (block, 3) of dx, dy and the sum of absolute differences; ties keep the first
    found.
    """
    block_numbers = np.arange(BLOCKS_X * BLOCKS_Y) if blocks is None else blocks
    x0 = block_numbers % BLOCKS_X * 8
    y0 = block_numbers // BLOCKS_X * 8
    current = now[:LUMA].reshape(HEIGHT, WIDTH)
    previous = before[:LUMA].reshape(HEIGHT, WIDTH)
    inner = np.arange(8)
    ys = y0[:, None] + inner
    xs = x0[:, None] + inner
    block = current[ys[:, :, None], xs[:, None, :]].astype(np.int64)

    def sad(dx: Ints, dy: Ints) -> Ints:
        rows = np.clip(ys + dy[:, None], 0, HEIGHT - 1)
        columns = np.clip(xs + dx[:, None], 0, WIDTH - 1)
        candidate = previous[rows[:, :, None], columns[:, None, :]].astype(np.int64)
        return np.asarray(np.abs(block - candidate).sum(axis=(1, 2)))

    dx = np.zeros(len(block_numbers), dtype=np.int64)
    dy = np.zeros(len(block_numbers), dtype=np.int64)
    best = sad(dx, dy)
    open_ = np.ones(len(block_numbers), dtype=bool)
    for pattern in (LARGE, LARGE, LARGE, SMALL):
        # the last step is taken everywhere
        open_ = open_ if pattern is LARGE else np.ones_like(open_)
        to_x = np.zeros_like(dx)
        to_y = np.zeros_like(dy)
        for step_x, step_y in pattern:
            difference = sad(dx + step_x, dy + step_y)
            better = open_ & (difference < best)
            best = np.where(better, difference, best)
            to_x = np.where(better, step_x, to_x)
            to_y = np.where(better, step_y, to_y)
        open_ = open_ & ((to_x != 0) | (to_y != 0))
        dx = dx + to_x
        dy = dy + to_y
    return np.stack([dx, dy, best], axis=1).astype(np.int16)


def make_cosines() -> npt.NDArray[np.float64]:
    """gamma(u) cos(π/8 (x + 1/2) u) as [u][x] (Eq. 5), orthonormal."""
    u, x = np.mgrid[0:8, 0:8]
    gamma = np.where(u == 0, math.sqrt(1.0 / 8.0), math.sqrt(2.0 / 8.0))
    return np.asarray(gamma * np.cos(math.pi / 8.0 * (x + 0.5) * u))


def transform_blocks(source: Frame) -> npt.NDArray[np.float64]:
    """Coefficients of all 8 x 8 blocks of luma as (block, v, u), not rounded; high frequencies
    dropped.
    """
    blocks = source[:LUMA].reshape(BLOCKS_Y, 8, BLOCKS_X, 8).transpose(0, 2, 1, 3).reshape(-1, 8, 8)
    table = make_cosines()
    out = np.einsum("vy,byx,ux->bvu", table, blocks.astype(np.float64) - 128.0, table)
    v, u = np.mgrid[0:8, 0:8]
    return np.where(u + v > KEPT, 0.0, out)


TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
THREADS = 256
DCTS = ("dct_fp32_cached", "dct_fp32_uncached", "dct_fp64_cached", "dct_fp64_uncached")
NAMES = ("rotate", "motion", "debarrel", *DCTS)
ROUNDED_OFF = 2e-3  # share of coefficients that may round to the other side


class ClipCheckFailed(WattcastError):
    """A workload's output is not NumPy's."""


def read_kernel_source() -> str:
    """Read the CUDA C of all workloads."""
    return (
        files("wattcast.lab.microbench")
        .joinpath("multimedia_kernels.cu")
        .read_text(encoding="utf-8")
    )


@dataclass
class MediaClip:
    """A clip in device memory, room for a result, and the tables the workloads read."""

    device: CudaDevice
    cubin: bytes
    frames: int
    frames_at: int  # address of the frames
    result: int
    tables: dict[str, int]
    kernels: dict[str, CudaKernel]
    verdicts: dict[str, str] = field(default_factory=dict)  # of the checks done so far

    @classmethod
    def make(
        cls,
        device: CudaDevice,
        frames: int = FRAMES,
    ) -> MediaClip:
        """Compile, allocate and draw the clip; its first and last frame must be NumPy's."""
        cubin = compile_cubin(read_kernel_source(), device.architecture, "multimedia.cu")
        buffer = device.allocate(frames * FRAME_BYTE)
        result = device.allocate(frames * LUMA * 2)
        matrix = make_cosines()
        table_values: dict[str, npt.NDArray[Any]] = {
            "turns": make_turns(frames),
            "map": make_barrel_map(),
            "fp32": matrix.astype(np.float32),
            "fp64": matrix,
        }
        tables = {}
        for name, values in table_values.items():
            tables[name] = device.allocate(values.nbytes)
            device.upload(tables[name], values)
        clip = cls(
            device,
            cubin,
            frames,
            buffer,
            result,
            tables,
            {},
        )
        clip._launch(
            "clip",
            frames * FRAME_BYTE,
            buffer,
            tables["turns"],
            result,
        )
        for number in (0, frames - 1):
            if not np.array_equal(clip.frame(buffer, number), draw_frame(number)):
                raise ClipCheckFailed(f"frame {number} of the clip is not what NumPy draws.")
        return clip

    def frame(
        self,
        address: int,
        number: int,
    ) -> npt.NDArray[np.uint8]:
        """Download one frame."""
        values = self.device.download(address + number * FRAME_BYTE, FRAME_BYTE, np.uint8)
        return values.astype(np.uint8, copy=False)

    def items(
        self,
        name: str,
        frames: int = 0,
    ) -> int:
        """Return the threads that a workload needs for so many frames, or for all."""
        count = frames or self.frames
        if name == "motion":
            return (count - 1) * BLOCKS_X * BLOCKS_Y
        return count * (LUMA if name.startswith("dct") else FRAME_BYTE)

    def enqueue(
        self,
        name: str,
        frames: int = 0,
    ) -> None:
        """Put one launch over the first ``frames`` frames, or over all, on the stream."""
        table = {
            "rotate": "turns",
            "debarrel": "map",
            "motion": "turns",
        }.get(name) or name.split("_")[1]
        addresses = (self.frames_at, self.tables[table], self.result)
        self._launch(name, self.items(name, frames), *addresses, frames=frames)

    def _launch(
        self,
        name: str,
        items: int,
        *addresses: int,
        frames: int = 0,
    ) -> None:
        if name not in self.kernels:
            self.kernels[name] = self.device.load(self.cubin, f"media_{name}")
        blocks = -(-items // THREADS)
        self.device.launch(
            self.kernels[name],
            blocks,
            THREADS,
            (*addresses, frames or self.frames),
            TYPES,
        )

    def check(self, name: str) -> str:
        """Run once, on the first call, and compare one frame with NumPy; raise when they differ."""
        number = min(2, self.frames - 1)
        if name not in self.verdicts:
            self.device.zero(self.result, self.frames * LUMA * 2)
            self.enqueue(name)
            self.verdicts[name] = self._compare_frame(name, number)
        if self.verdicts[name]:
            raise ClipCheckFailed(
                f"{name}: {self.verdicts[name]} of frame {number} differ from NumPy."
            )
        return "passed"

    def _compare_frame(
        self,
        name: str,
        number: int,
    ) -> str:
        """Return what differs from NumPy in one frame, or nothing."""
        source = draw_frame(number)
        if name == "motion":
            blocks = np.arange(0, BLOCKS_X * BLOCKS_Y, 7)
            expected = search_motion(source, draw_frame(number - 1), blocks)
            place = self.result + (number - 1) * BLOCKS_X * BLOCKS_Y * 8
            computed = self.device.download(place, BLOCKS_X * BLOCKS_Y * 4, np.int16).reshape(
                -1, 4
            )[blocks, :3]
            wrong = int((computed != expected).any(axis=1).sum())
            return f"{wrong} of {len(blocks)} blocks" if wrong else ""
        if name in DCTS:
            rounded = self.device.download(self.result + number * LUMA * 2, LUMA, np.int16).astype(
                np.float64
            )
            off = np.abs(rounded - transform_blocks(source).reshape(-1))
            share = float((off > 0.501).mean())
            far = share > ROUNDED_OFF or off.max() > 1.01
            return f"{share:.2%} of the coefficients (largest error {off.max():.2f})" if far else ""
        if name == "rotate":
            cosine, sine = (int(value) for value in make_turns(self.frames)[number])
            frame = rotate_frame(source, cosine, sine)
        else:
            frame = debarrel_frame(source, make_barrel_map())
        wrong = int((self.frame(self.result, number) != frame).sum())
        return f"{wrong} pixels" if wrong else ""
