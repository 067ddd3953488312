"""The same workloads in NumPy, frame by frame, which the kernels must match."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

WIDTH, HEIGHT, FRAMES = 1920, 1080, 80
LUMA, CHROMA = WIDTH * HEIGHT, WIDTH * HEIGHT // 4
FRAME_BYTE = LUMA + 2 * CHROMA
BLOCKS_X, BLOCKS_Y = WIDTH // 8, HEIGHT // 8
LARGE = ((-2, 0), (-1, -1), (0, -2), (1, -1), (2, 0), (1, 1), (0, 2), (-1, 1))
SMALL = ((-1, 0), (0, -1), (1, 0), (0, 1))
KEPT = 9  # coefficients with u + v beyond this are dropped


def _lattice(x: Ints, y: Ints) -> Ints:
    h = ((x & 0xFFFFFFFF) * 0x9E3779B9 & 0xFFFFFFFF) ^ ((y & 0xFFFFFFFF) * 0x85EBCA6B & 0xFFFFFFFF)
    h ^= h >> 15
    h = h * 0x2C1B3C6D & 0xFFFFFFFF
    h ^= h >> 12
    return h & 255


def noise(x: Ints, y: Ints) -> Ints:
    """Value noise on a lattice of 16 pixels, 0 to 255."""
    cx, cy, fx, fy = x >> 4, y >> 4, x & 15, y & 15
    top = _lattice(cx, cy) * (16 - fx) + _lattice(cx + 1, cy) * fx
    low = _lattice(cx, cy + 1) * (16 - fx) + _lattice(cx + 1, cy + 1) * fx
    return np.asarray((top * (16 - fy) + low * fy) >> 8)


@lru_cache(maxsize=4)
def frame(number: int) -> Frame:
    """Frame ``number`` of the clip: a scene that pans by (2, 1) a frame, a square that moves against it."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    inside = (x >= 900 - 3 * number) & (x < 1100 - 3 * number) & (y >= 500) & (y < 700)
    pan = noise(x + 2 * number + 4096, y + number + 4096)
    luma = np.where(inside, 255 - noise(x + 3 * number, y), pan)
    cy, cx = np.mgrid[0 : HEIGHT // 2, 0 : WIDTH // 2]
    chroma = [noise(2 * cx + 2 * number, 2 * cy + number + 7000 * (plane + 1)) for plane in range(2)]
    values = np.concatenate([luma.ravel(), *(plane.ravel() for plane in chroma)])
    return (16 + values * 219 // 255).astype(np.uint8)


def turns(frames: int = FRAMES) -> npt.NDArray[np.int32]:
    """Cosine and sine of each frame's angle, which grows to a whole turn, times 65536 (Eq. 4 with -θ)."""
    angle = [2.0 * math.pi * f / frames for f in range(frames)]
    return np.array([[round(65536 * math.cos(a)), round(65536 * math.sin(a))] for a in angle], dtype=np.int32)


def _planes() -> list[tuple[int, int, int, int]]:
    """Begin, width, height and black of the three planes."""
    return [
        (0, WIDTH, HEIGHT, 16),
        (LUMA, WIDTH // 2, HEIGHT // 2, 128),
        (LUMA + CHROMA, WIDTH // 2, HEIGHT // 2, 128),
    ]


def rotate(source: Frame, cosine: int, sine: int) -> Frame:
    """Eq. 4: each pixel from where the rotation by -θ about the middle puts it, nearest below."""
    out = np.empty_like(source)
    for begin, width, height, black in _planes():
        y, x = np.mgrid[0:height, 0:width]
        x, y = x - width // 2, y - height // 2
        u = ((cosine * x + sine * y) >> 16) + width // 2
        v = ((cosine * y - sine * x) >> 16) + height // 2
        within = (u >= 0) & (u < width) & (v >= 0) & (v < height)
        plane = source[begin : begin + width * height]
        taken = plane[np.where(within, v * width + u, 0)]
        out[begin : begin + width * height] = np.where(within, taken, black).ravel()
    return out


def barrel_map(strength: float = 0.12) -> npt.NDArray[np.int32]:
    """Where each pixel of a frame comes from: radius r from the middle is read at r (1 + k r²); -1 outside."""
    parts = []
    for begin, width, height, _ in _planes():
        y, x = np.mgrid[0:height, 0:width].astype(np.float64)
        dx, dy = (x - width / 2) / (width / 2), (y - height / 2) / (width / 2)
        grow = 1.0 + strength * (dx * dx + dy * dy)
        u = np.floor(dx * grow * (width / 2) + width / 2).astype(np.int64)
        v = np.floor(dy * grow * (width / 2) + height / 2).astype(np.int64)
        within = (u >= 0) & (u < width) & (v >= 0) & (v < height)
        parts.append(np.where(within, begin + v * width + u, -1).ravel())
    return np.concatenate(parts).astype(np.int32)


def debarrel(source: Frame, where: npt.NDArray[np.int32]) -> Frame:
    """The map applied to one frame."""
    black = np.where(np.arange(FRAME_BYTE) < LUMA, 16, 128)
    return np.where(where >= 0, source[np.maximum(where, 0)], black).astype(np.uint8)


def motion(now: Frame, before: Frame, blocks: Ints | None = None) -> npt.NDArray[np.int16]:
    """Diamond search: (block, 3) of dx, dy and the sum of absolute differences; ties keep the first found."""
    wanted = np.arange(BLOCKS_X * BLOCKS_Y) if blocks is None else blocks
    x0, y0 = wanted % BLOCKS_X * 8, wanted // BLOCKS_X * 8
    current, previous = now[:LUMA].reshape(HEIGHT, WIDTH), before[:LUMA].reshape(HEIGHT, WIDTH)
    inner = np.arange(8)
    ys, xs = y0[:, None] + inner, x0[:, None] + inner
    own = current[ys[:, :, None], xs[:, None, :]].astype(np.int64)

    def sad(dx: Ints, dy: Ints) -> Ints:
        rows = np.clip(ys + dy[:, None], 0, HEIGHT - 1)
        columns = np.clip(xs + dx[:, None], 0, WIDTH - 1)
        other = previous[rows[:, :, None], columns[:, None, :]].astype(np.int64)
        return np.asarray(np.abs(own - other).sum(axis=(1, 2)))

    dx, dy = np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.int64)
    best, open_ = sad(dx, dy), np.ones(len(wanted), dtype=bool)
    for _ in range(3):
        to_x, to_y, best = _try(sad, dx, dy, best, open_, LARGE)
        open_ = open_ & ((to_x != 0) | (to_y != 0))
        dx, dy = dx + to_x, dy + to_y
    to_x, to_y, best = _try(sad, dx, dy, best, np.ones(len(wanted), dtype=bool), SMALL)
    return np.stack([dx + to_x, dy + to_y, best], axis=1).astype(np.int16)


def _try(
    sad: Callable[[Ints, Ints], Ints],
    dx: Ints,
    dy: Ints,
    best: Ints,
    open_: npt.NDArray[np.bool_],
    pattern: tuple[tuple[int, int], ...],
) -> tuple[Ints, Ints, Ints]:
    """The first candidate of ``pattern`` with the lowest difference, where the search still goes on."""
    to_x, to_y = np.zeros_like(dx), np.zeros_like(dy)
    for step_x, step_y in pattern:
        found = sad(dx + step_x, dy + step_y)
        better = open_ & (found < best)
        best = np.where(better, found, best)
        to_x, to_y = np.where(better, step_x, to_x), np.where(better, step_y, to_y)
    return to_x, to_y, best


def cosines() -> npt.NDArray[np.float64]:
    """gamma(u) cos(π/8 (x + 1/2) u) as [u][x] (Eq. 5), orthonormal."""
    u, x = np.mgrid[0:8, 0:8]
    gamma = np.where(u == 0, math.sqrt(1.0 / 8.0), math.sqrt(2.0 / 8.0))
    return np.asarray(gamma * np.cos(math.pi / 8.0 * (x + 0.5) * u))


def dct(source: Frame) -> npt.NDArray[np.float64]:
    """Coefficients of all 8 x 8 blocks of luma as (block, v, u), not rounded; high frequencies dropped."""
    blocks = source[:LUMA].reshape(BLOCKS_Y, 8, BLOCKS_X, 8).transpose(0, 2, 1, 3).reshape(-1, 8, 8)
    table = cosines()
    out = np.einsum("vy,byx,ux->bvu", table, blocks.astype(np.float64) - 128.0, table)
    v, u = np.mgrid[0:8, 0:8]
    return np.where(u + v > KEPT, 0.0, out)
