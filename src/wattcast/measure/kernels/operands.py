"""Operands without waiting: large pools of values drawn once, from which every row takes views.

Drawing and allocating per row would cost more than measuring it. Each dtype has one pool; views are
handed out in order, aligned to 512 bytes, and the pool starts over with the next row.
"""

from __future__ import annotations

from typing import Any

from wattcast.errors import BadInput, unknown_name

PATTERNS = ("random", "zeros", "ones", "relu")
_ALIGN_BYTE = 512
_CHUNK = 2**28


class Operands:
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
        """Draw all pools anew. ``random`` is standard normal; ``relu`` the same with its negatives at zero."""
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
        values = torch.randn(count, dtype=torch.float32, device=self.device)
        return values.clamp_(min=0.0) if pattern == "relu" else values


def torch_dtype(torch: Any, name: str) -> Any:
    """PyTorch's name of a Wattcast dtype."""
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }[name]
