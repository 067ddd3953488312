"""Quantities with units at the edges (``"4.8 TB/s"``), SI floats inside, and the names of number
formats.

This is the only table of prefixes in Wattcast. Inside, a quantity is a float in the unit its
name ends with (``power_w``, ``clock_hz``); a name never changes unit.
"""

from __future__ import annotations

import contextlib
import math
import re
from enum import StrEnum

from wattcast.core.errors import bad_unit, unknown_name

_SMALL = {
    "p": 1e-12,
    "n": 1e-9,
    "u": 1e-6,
    "µ": 1e-6,
    "μ": 1e-6,
    "m": 1e-3,
}
_DECIMAL = {
    **_SMALL,
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}
_BINARY = {
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}

# symbol -> (canonical unit, factor, prefixes it may carry)
_SYMBOLS: dict[str, tuple[str, float, dict[str, float]]] = {
    "B": ("byte", 1.0, _DECIMAL | _BINARY),
    "byte": ("byte", 1.0, _DECIMAL | _BINARY),
    "bit": ("byte", 0.125, _DECIMAL | _BINARY),
    "Hz": ("Hz", 1.0, _DECIMAL),
    "W": ("W", 1.0, _DECIMAL),
    "J": ("J", 1.0, _DECIMAL),
    "Wh": ("J", 3600.0, _DECIMAL),
    "V": ("V", 1.0, _DECIMAL),
    "F": ("F", 1.0, _DECIMAL),
    "A": ("A", 1.0, _DECIMAL),
    "FLOP": ("flop", 1.0, _DECIMAL),
    "flop": ("flop", 1.0, _DECIMAL),
    "OP": ("op", 1.0, _DECIMAL),
    "op": ("op", 1.0, _DECIMAL),
    "s": ("s", 1.0, _DECIMAL),
    "min": ("s", 60.0, {"": 1.0}),
    "h": ("s", 3600.0, {"": 1.0}),
    "cycle": ("cycle", 1.0, {"": 1.0, "M": 1e6}),
    "°C": ("C", 1.0, {"": 1.0}),
    "C": ("C", 1.0, {"": 1.0}),
    "m": (
        "m",
        1.0,
        {
            "n": 1e-9,
            "u": 1e-6,
            "m": 1e-3,
            "": 1.0,
        },
    ),
    "request": ("request", 1.0, {"": 1.0}),
    "token": (
        "token",
        1.0,
        {
            "": 1.0,
            "k": 1e3,
            "M": 1e6,
        },
    ),
    "g": ("g", 1.0, {"": 1.0, "k": 1e3}),
    "USD": ("USD", 1.0, {"": 1.0}),
    "EUR": ("EUR", 1.0, {"": 1.0}),
    "%": ("", 0.01, {"": 1.0}),
}
# every symbol with each of its prefixes -> canonical unit, factor
_PREFIXED = {"": ("", 1.0)} | {
    prefix + symbol: (unit, by * times)
    for symbol, (unit, by, prefixes) in _SYMBOLS.items()
    for prefix, times in prefixes.items()
}
_ALIASES = {
    "FLOPS": "flop/s",
    "FLOP/s": "flop/s",
    "OPS": "op/s",
}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*")
_EXAMPLES = {
    "Hz": "1830 MHz",
    "W": "500 W",
    "s": "500 ms",
    "byte": "80 GB",
    "byte/s": "4.8 TB/s",
    "flop/s": "989.4 TFLOP/s",
    "V": "0.85 V",
    "C": "45 C",
    "J": "1.5 J",
    "request/s": "20 request/s",
    "/s": "5/s",
    "g/J": "400 g/kWh",
}


def parse(
    text: object,
    unit: str,
    where: str = "quantity",
) -> float:
    """Return the value of ``text`` in ``unit``, an SI unit such as ``"byte/s"`` or ``"Hz"``.

    Raises ``UnitError`` for another dimension, a missing unit, NaN or
    infinity. A pure number has ``unit=""``.

    >>> parse("4.8 TB/s", "byte/s"), parse("1830MHz", "Hz"), parse("50 MiB", "byte")
    (4800000000000.0, 1830000000.0, 52428800.0)
    """
    expected = "a pure number"
    if unit:
        expected = f"a quantity in {unit}, such as {_EXAMPLES.get(unit, '1 ' + unit)!r}"
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise bad_unit(where, expected, text)
    if not isinstance(text, str):
        number = _to_float(text)
        if unit or not math.isfinite(number):
            do = "Write the unit beside the number." if unit else ""
            raise bad_unit(where, expected, text, do)
        return number

    match = _NUMBER.fullmatch(text) if len(text) <= 80 else None
    if match is None:
        raise bad_unit(where, expected, text)
    dimension_and_factor = factor(match[2])
    if dimension_and_factor is None or dimension_and_factor[0] != unit:
        do = "Write the unit beside the number." if not match[2] else ""
        raise bad_unit(where, expected, text, do)
    value = float(match[1]) * dimension_and_factor[1]
    if not math.isfinite(value):
        raise bad_unit(where, expected, text)
    return value


def _to_float(number: float) -> float:
    """Return a number as a float; a whole number that no float holds is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def parse_amount(
    value: object,
    unit: str,
    where: str,
    *,
    least: float = 0.0,
    most: float = math.inf,
    inclusive: bool = True,
) -> float:
    """Return a quantity as functions take it: a number is in ``unit`` already, text carries its
    unit.

    A share (``unit=""``) is written ``20%`` or ``0.2``; a bare number above 1 may have been meant
    in percent.

    >>> seconds = parse_amount(0.5, "s", "ttft"), parse_amount("500ms", "s", "ttft")
    >>> *seconds, parse_amount("20%", "", "headroom")
    (0.5, 0.5, 0.2)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    amount = _to_float(value) if is_number else parse(value, unit, where)  # type: ignore[arg-type]
    if not unit and not is_number and amount > 1 and "%" not in str(value):
        raise bad_unit(where, "a share such as 20% or 0.2", value)
    if not (
        math.isfinite(amount)
        and amount <= most
        and (amount > least or (inclusive and amount == least))
    ):
        end = "zero" if least == 0 else f"{least:g}"
        low = f"{end} or more" if inclusive else f"a number above {end}"
        raise bad_unit(where, low if most == math.inf else f"{low}, at most {most:g}", value)
    return amount


def parse_seconds(value: object, where: str = "seconds") -> float:
    """Return a time where the option is called after seconds: a bare number is one of them,
    ``10min`` is a time too.

    >>> parse_seconds("90"), parse_seconds("1.5min"), parse_seconds(90)
    (90.0, 90.0, 90.0)
    """
    with contextlib.suppress(TypeError, ValueError):
        value = float(value)  # type: ignore[arg-type]
    return parse_amount(value, "s", where, inclusive=False)


def factor(unit: str) -> tuple[str, float] | None:
    """Return canonical unit and factor of a unit expression, or None when it is not one.

    >>> factor("GB/s"), factor("pJ/bit"), factor("parsec")
    (('byte/s', 1000000000.0), ('J/byte', 8e-12), None)
    """
    names: list[str] = []
    scale = 1.0
    for short, full in _ALIASES.items():
        unit = unit.removesuffix(short) + full if unit.endswith(short) else unit
    for position, piece in enumerate(unit.split("/")):
        if piece.strip() not in _PREFIXED:
            return None
        name, by = _PREFIXED[piece.strip()]
        names.append(name)
        scale = scale / by if position else scale * by
    return "/".join(names), scale


def show_plain(value: float, digits: int) -> str:
    """Return a number with so many significant digits, and commas where it would need an exponent.

    >>> show_plain(25432.1, 2), show_plain(3317.4, 4), show_plain(0.18123, 3)
    ('25,000', '3317', '0.181')
    """
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def show(
    value: float,
    unit: str,
    digits: int = 4,
) -> str:
    """Return ``value`` in ``unit`` with the prefix that reads best; ``parse`` takes it back.

    >>> show(4.8e12, "byte/s"), show(1.83e9, "Hz"), show(0.0, "W"), show(1.2e-5, "s")
    ('4.8 TB/s', '1.83 GHz', '0 W', '12 us')
    """
    head, _, tail = unit.partition("/")
    prefixes = _SHOWN.get(head, {"": 1.0})
    rounded = abs(float(f"{value:.{digits}g}"))
    fitting = [item for item in prefixes.items() if item[1] <= rounded]
    name, by = fitting[-1] if fitting else next(iter(prefixes.items()))
    if rounded == 0.0:
        name = ""
        by = 1.0
    number = f"{value / by:.{digits}g}"
    number = f"{float(number):.0f}" if "e+" in number and float(number) < 1e7 else number
    symbol = {"byte": "B", "flop": "FLOP"}.get(head, head)
    return f"{number} {name}{symbol}{'/' + tail if tail else ''}".rstrip()


_SHOWN = {
    "byte": {
        "": 1.0,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
    },
    "flop": {
        "": 1.0,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
        "P": 1e15,
    },
    "Hz": {
        "": 1.0,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
    },
    "W": {
        "n": 1e-9,
        "u": 1e-6,
        "m": 1e-3,
        "": 1.0,
        "k": 1e3,
        "M": 1e6,
    },
    "J": {
        "p": 1e-12,
        "n": 1e-9,
        "u": 1e-6,
        "m": 1e-3,
        "": 1.0,
        "k": 1e3,
        "M": 1e6,
    },
    "s": {
        "n": 1e-9,
        "u": 1e-6,
        "m": 1e-3,
        "": 1.0,
    },
    "V": {"m": 1e-3, "": 1.0},
}


class Dtype(StrEnum):
    """A number format. ``tf32`` is stored as 4 bytes and multiplied as tensor-core TF32."""

    FP64 = "fp64", 8
    FP32 = "fp32", 4
    TF32 = "tf32", 4
    BF16 = "bf16", 2
    FP16 = "fp16", 2
    FP8 = "fp8", 1
    FP4 = "fp4", 1  # alone; two share a byte in packed weights, whose operators count their bits
    INT64 = "int64", 8
    INT32 = "int32", 4
    INT8 = "int8", 1
    BOOL = "bool", 1

    byte: int  # that one element takes in memory
    __hash__ = str.__hash__  # as its word, which is what it equals

    def __new__(
        cls,
        word: str,
        byte: int,
    ) -> Dtype:
        member = str.__new__(cls, word)
        member._value_ = word
        member.byte = byte
        return member

    @classmethod
    def parse(cls, name: str) -> Dtype:
        """Return the format called ``name``, or raise an error with the nearest names."""
        dtype = cls.recognise(name)
        if dtype is None:
            raise unknown_name("dtype", name, list(cls), f"Known: {', '.join(cls)}.")
        return dtype

    @classmethod
    def recognise(cls, name: str) -> Dtype | None:
        """Return the format that Wattcast, PyTorch or ONNX calls ``name``, None where it is no
        format.

        >>> [Dtype.recognise(name) for name in ("torch.bfloat16", "c10::Half", "Scalar")]
        [<Dtype.BF16: 'bf16'>, <Dtype.FP16: 'fp16'>, None]
        """
        folded = name.lower().removeprefix("torch.").removeprefix("c10::")
        folded = _DTYPE_ALIASES.get(folded, folded)
        return next((member for member in cls if member == folded), None)


_DTYPE_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8e4m3fn", "float8e5m2"), "fp8"),
    **{
        "long": "int64",
        "long int": "int64",
        "int": "int32",
    },
    **dict.fromkeys(("uint8", "signed char", "unsigned char"), "int8"),
}
