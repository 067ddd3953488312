"""Self-checks: that a kernel does what it says, by its results, before it is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wattcast.errors import WattcastError
from wattcast.measure.microbench.tensor import PRECISIONS, WGMMA_STEPS
from wattcast.measure.microbench.unit import CHECK_SEED

if TYPE_CHECKING:
    from wattcast.measure.microbench.kernels import Ready

ROUNDS = 2  # iterations of a check
LOOKED_BYTE = 64 << 20  # of a copy, at its begin and at its end


class CheckFailed(WattcastError):
    """A kernel's results are not what they must be."""


def run(ready: Ready) -> str:
    """``passed``, or nothing where no check applies; raises when the results are wrong."""
    name = ready.benchmark.check
    if not name:
        return ""
    {"copy": _copy, "fold": _fold, "count": _count, "wgmma": _wgmma}[name](ready)
    return "passed"


def _size(ready: Ready) -> int:
    """Bytes that :data:`ROUNDS` iterations of all blocks cover exactly once (one, where they cover all they may)."""
    size = ready.benchmark.unit.chunk * ready.blocks * _rounds(ready)
    if size > ready.buffers.size:
        raise CheckFailed(f"{ready.benchmark.name}: its check needs {size} bytes, more than the buffer has.")
    return size


def _rounds(ready: Ready) -> int:
    return 1 if ready.benchmark.whole else ROUNDS


def _copy(ready: Ready) -> None:
    held, size = ready.buffers, _size(ready)
    device = held.device
    device.zero(held.b, size)
    ready.launch(_rounds(ready), size=size)
    wrong, looked = 0, min(size, LOOKED_BYTE)
    for at in {0, size - looked}:  # the begin and the end of what is too large to look at as a whole
        source, copied = (device.download(address + at, looked // 4, np.uint32) for address in (held.a, held.b))
        wrong += int((source != copied).sum())
    if wrong:
        raise CheckFailed(f"{ready.benchmark.name} copied {wrong} of the words looked at wrongly.")


def _fold(ready: Ready) -> None:
    held, size = ready.buffers, _size(ready)
    threads = ready.blocks * ready.benchmark.threads
    held.device.zero(held.sink, 4 * threads)
    ready.launch(ROUNDS, seed=CHECK_SEED, size=size)
    seen = np.bitwise_xor.reduce(held.device.download(held.sink, threads, np.uint32))
    wanted = np.bitwise_xor.reduce(held.device.download(held.a, size // 4, np.uint32))
    if seen != wanted:
        raise CheckFailed(f"{ready.benchmark.name} folded to {int(seen):#x}, its buffer to {int(wanted):#x}.")


def _count(ready: Ready) -> None:
    held, benchmark = ready.buffers, ready.benchmark
    threads = min(ready.blocks * benchmark.threads, ready.size // 4)
    held.device.zero(held.b, 4 * threads)
    ready.launch(ROUNDS)
    found = held.device.download(held.b, threads, np.uint32)
    wanted = ROUNDS * benchmark.operations
    if not (found == wanted).all():
        raise CheckFailed(f"{benchmark.name} counted {int(found.min())} to {int(found.max())}, not {wanted}.")


def _wgmma(ready: Ready) -> None:
    """All operands 0.5 (1 for integers): every element of the product is steps x k x 0.25 (x 1)."""
    held, benchmark = ready.buffers, ready.benchmark
    precision = benchmark.name.removeprefix("wgmma_")
    form = PRECISIONS[precision]
    threads = ready.blocks * benchmark.threads
    held.device.zero(held.sink, 4 * threads)
    ready.launch(ROUNDS, seed=CHECK_SEED)
    bits = held.device.download(held.sink, threads, np.uint32)
    found = bits.view(np.int32).astype(float) if precision == "int8" else bits.view(np.float32).astype(float)
    wanted = WGMMA_STEPS * form.k * form.half**2
    if not np.allclose(found, wanted, rtol=1e-3):
        raise CheckFailed(f"{benchmark.name} computed {found.min():g} to {found.max():g}, not {wanted:g}.")
