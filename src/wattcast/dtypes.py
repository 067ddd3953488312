"""Number formats: the names every layer agrees on, and their width."""

from __future__ import annotations

from enum import StrEnum

from wattcast.errors import unknown_name


class Dtype(StrEnum):
    """A number format. ``tf32`` is stored as 4 bytes and multiplied as tensor-core TF32."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    BOOL = "bool"

    byte: int  # one element takes in memory
    __hash__ = str.__hash__  # as its word, which is what it equals

    @classmethod
    def of(cls, name: str) -> Dtype:
        """The format called ``name``, in our spelling or PyTorch's (``float16``, ``torch.bfloat16``)."""
        folded = name.lower().removeprefix("torch.")
        folded = _ALIASES.get(folded, folded)
        try:
            return cls(folded)
        except ValueError:
            raise unknown_name("dtype", name, [d.value for d in cls], f"Known: {', '.join(cls)}.") from None


_BYTE = {
    Dtype.FP64: 8,
    Dtype.FP32: 4,
    Dtype.TF32: 4,
    Dtype.BF16: 2,
    Dtype.FP16: 2,
    Dtype.FP8: 1,
    Dtype.INT64: 8,
    Dtype.INT32: 4,
    Dtype.INT8: 1,
    Dtype.BOOL: 1,
}
for _dtype, _byte in _BYTE.items():
    _dtype.byte = _byte
_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "long": "int64",
    "int": "int32",
}
