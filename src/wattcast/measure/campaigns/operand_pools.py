"""Hand out operands as views of large pools of values that are drawn once.

Drawing and allocating for each row would cost more than measuring it. Each number format has one pool; views are
handed out in order, aligned to 512 bytes, and the pool starts over with the next row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattcast.core.errors import BadInput, unknown_name
from wattcast.measure.campaigns.kernel_plan import OperatorSpec

PATTERNS = ("random", "zeros", "ones", "relu", "tiny", "uniform")
_ALIGN_BYTE = 512
_CHUNK = 2**28


class OperandPools:
    """Pools of one pattern of values on one device."""

    def __init__(self, torch: Any, device: str, pool_byte: dict[str, int]) -> None:
        self._torch, self.device = torch, device
        self.pattern = ""
        self._next: dict[str, int] = {}
        self._pools = {
            name: torch.empty(
                byte // torch_dtype(torch, name).itemsize, dtype=torch_dtype(torch, name), device=device
            )
            for name, byte in pool_byte.items()
        }

    def fill(self, pattern: str) -> None:
        """Fill all pools with new values of ``pattern``.

        ``random`` is standard normal, ``relu`` the same with its negatives at zero. ``tiny`` is uniform between
        -0.001 and 0.001, as an engine's dummy weights are; ``uniform`` lies between -1 and 1, as these weights do
        once they have been quantized with a scale.
        """
        if pattern not in PATTERNS:
            raise unknown_name("data pattern", pattern, PATTERNS)
        if pattern == self.pattern:
            return
        self._torch.manual_seed(1)
        for pool in self._pools.values():
            for start in range(0, len(pool), _CHUNK):
                part = pool[start : start + _CHUNK]
                part.copy_(self._draw(pattern, len(part)))
        self.pattern = pattern

    def reset(self) -> None:
        """Start over; views handed out before may share memory with later ones."""
        self._next = dict.fromkeys(self._pools, 0)

    def take(self, dtype: str, *shape: int, extra: int = 0) -> Any:
        """A contiguous view of ``shape``; ``extra`` elements more are reserved behind it."""
        pool = self._pools["fp32" if dtype == "tf32" else dtype]
        size = 1
        for side in shape:
            size *= side
        step = _ALIGN_BYTE // pool.element_size()
        start = self._next["fp32" if dtype == "tf32" else dtype]
        end = start + size + extra
        if end > len(pool):
            raise BadInput(f"operands of {end * pool.element_size()} bytes do not fit the {dtype} pool.")
        self._next["fp32" if dtype == "tf32" else dtype] = -(-end // step) * step
        return pool[start : start + size].view(shape)

    def _draw(self, pattern: str, count: int) -> Any:
        torch = self._torch
        if pattern == "zeros":
            return torch.zeros(count, dtype=torch.bfloat16, device=self.device)
        if pattern == "ones":
            return torch.ones(count, dtype=torch.bfloat16, device=self.device)
        if pattern in ("tiny", "uniform"):
            side = 1e-3 if pattern == "tiny" else 1.0
            return torch.empty(count, dtype=torch.float32, device=self.device).uniform_(-side, side)
        values = torch.randn(count, dtype=torch.float32, device=self.device)
        return values.clamp_(min=0.0) if pattern == "relu" else values


def torch_dtype(torch: Any, name: str) -> Any:
    """Return PyTorch's number format of a Wattcast one."""
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }[name]


DROPPED = 0.1  # share of weights or activations, as models train
L2_TIMES = 3.0
MOST_SETS = 256


@dataclass(frozen=True)
class OperatorCall:
    """One operator, ready to run; outputs are returned and may be dropped."""

    run: Callable[[int], Any]
    sets: int  # operand sets that ``run`` cycles through
    fixed_byte: int  # operands and outputs all copies share
    set_byte: int  # what each set adds

    def footprint_byte(self, copies: int) -> int:
        """Bytes that ``copies`` copies touch."""
        return self.fixed_byte + self.set_byte * min(self.sets, copies)


@dataclass(frozen=True)
class CallBuilder:
    """What building a call needs: PyTorch, the pools and the size of the L2."""

    torch: Any
    operands: OperandPools
    l2_byte: float

    def sets(self, spec: OperatorSpec, byte: float, rotate: bool) -> int:
        """Operand sets so that ``byte`` each pass three times the L2; one when not rotating."""
        if not rotate:
            return 1
        return max(1, min(math.ceil(L2_TIMES * self.l2_byte / max(byte, 1.0)), MOST_SETS))

    def image(self, dtype: str, n: int, c: int, h: int, w: int, channels_last: bool) -> Any:
        """(pictures, channels, rows, columns), channels outermost or innermost in memory."""
        if channels_last:
            return self.operands.take(dtype, n, h, w, c).permute(0, 3, 1, 2)
        return self.operands.take(dtype, n, c, h, w)

    def places(self, o: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation of rows and columns."""
        stride = [o["stride"], o.get("stride_w") or o["stride"]]
        wide = o.get("padding_w")
        return stride, [o["padding"], o["padding"] if wide is None else wide], 2 * [o.get("dilation", 1)]

    def heads(self, spec: OperatorSpec, batch: int, heads: int, length: int, dim: int) -> Any:
        """(batch, heads, length, dim): from a projection (bshd in memory) or a cache (bhsd)."""
        if spec.layout == "bhsd":
            return self.operands.take(spec.operator["dtype"], batch, heads, length, dim)
        return self.operands.take(spec.operator["dtype"], batch, length, heads, dim).transpose(1, 2)
