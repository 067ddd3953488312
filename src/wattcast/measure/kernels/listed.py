"""Operators that a file lists, one JSON object a line, in place of the plan: what ``--suggest`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput, bad_value
from wattcast.measure.kernels.spec import Spec
from wattcast.records import read_lines

_FIELDS = ("family", "operator", "layout", "rotated", "detail", "chosen")


def read_listed(path: Path) -> list[Spec]:
    """The operators of a file, none twice."""
    if not path.is_file():
        raise BadInput(
            f"--plan: there is no file {path}. `wattcast measure kernels --suggest N --out DIR` writes one."
        )
    found: dict[str, Spec] = {}
    for number, line in enumerate(read_lines(path), start=1):
        given = {name: line[name] for name in _FIELDS if name in line}
        if not isinstance(given.get("operator"), dict) or "family" not in given:
            raise bad_value(f"{path.name}: line {number}", "an operator and its family", ", ".join(line))
        spec = Spec(**given)
        found.setdefault(spec.id, spec)
    if not found:
        raise bad_value(path.name, "at least one operator", "none")
    return list(found.values())


def write_listed(path: Path, specs: Iterable[tuple[Spec, dict[str, Any]]]) -> None:
    """Operators and what is to be said of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as stream:
        for spec, more in specs:
            stream.write(json.dumps({name: getattr(spec, name) for name in _FIELDS} | more) + "\n")


def from_operator(plain: dict[str, Any]) -> Spec | None:
    """A model's operator (as a workload file writes it) as the campaign runs it; None where it cannot.

    Weights of linear layers and convolutions and the cache of decode come from DRAM, as in a model. Strided,
    broadcast and transposing elementwise operators do not say their two-dimensional shape, and are left out.
    """
    from wattcast.measure.kernels.elementwise_plan import BINARY, UNARY

    operator = {k: v for k, v in plain.items() if k not in ("count", "label")}
    match operator["op"]:
        case "linear":
            narrow = {"weight_dtype", "out_dtype"} & set(operator)
            return None if narrow else Spec("linear", {"bias": False, **operator}, "nt", "weights")
        case "bmm":
            return None if {"weight_dtype", "out_dtype"} & set(operator) else Spec("bmm", operator, "nn")
        case "conv2d":
            return _convolution(operator)
        case "softmax" | "layernorm" | "rmsnorm":
            return Spec(operator["op"], operator, "contiguous")
        case "attention":
            decode = operator["q_len"] == 1
            given = {"causal": False, **operator}
            layout, rotated = ("bhsd", "all") if decode else ("bshd", "none")
            return Spec("attention", given, layout, rotated, {"backend": "default"})
        case name if name in (*UNARY, *BINARY, "cast", "copy") and not {"layout", "read", "write"} & set(operator):
            columns = operator["n"] & -operator["n"]  # the largest power of two in it
            detail = {"form": "contiguous", "rows": operator["n"] // columns, "cols": columns}
            return Spec(
                "elementwise", {**operator, "op": "elementwise", "function": name}, "contiguous", "none", detail
            )
    return None


_CONVOLUTION = ("op", "n", "c", "k", "h", "w", "r", "s", "stride", "padding", "groups", "channels_last", "dtype")


def _convolution(operator: dict[str, Any]) -> Spec | None:
    """A forward convolution with one stride and no dilation."""
    given = {"stride": 1, "padding": 0, "groups": 1, "channels_last": False, **operator}
    if set(given) - set(_CONVOLUTION):
        return None
    return Spec("conv2d", given, "nhwc" if given["channels_last"] else "nchw", "weights")
