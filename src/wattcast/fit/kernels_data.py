"""The kernel database as arrays: one entry a measured row, with its operator and how it was run.

``DB`` is a folder with ``rows.parquet``, that file itself, the name of a database that ships, or a folder of
journals (``*.jsonl``) as a campaign leaves them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.kernels.work import Condition
from wattcast.records import ROWS_FILE, Plain, database_folder, read_lines, read_table
from wattcast.workload import from_json
from wattcast.workload.graph import Operator

Mask = npt.NDArray[np.bool_]
# Flags that make a row unfit: the campaign saw the figures move while it measured.
UNFIT = ("unsettled", "clock_low", "clock_drift", "period_beats_with_sensor")
_NUMBERS = (
    *("latency_s", "power_w", "sm_clock_hz", "effective_clock_hz", "memory_power_w", "on_power_w"),
    *("settled_power_w", "settled_clock_hz", "temperature_c", "duty", "idle_power_w"),
)


@dataclass(frozen=True)
class Rows:
    """Measured rows; arrays are ``(row,)``, NaN where a row has no such figure."""

    kind: tuple[str, ...]
    ops: tuple[Operator, ...]
    conditions: tuple[Condition, ...]
    data: tuple[str, ...]
    spec: tuple[str, ...]
    repeat: npt.NDArray[np.int64]
    names: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[int, ...], ...]  # of each named kernel
    number: dict[str, Array]
    fit: Mask  # not flagged
    source: str
    card: str

    def __len__(self) -> int:
        return len(self.ops)

    def of(self, name: str) -> Array:
        """One measured column."""
        return self.number[name]

    def where(self, mask: Mask) -> Rows:
        """The rows of a mask."""
        at: list[int] = np.flatnonzero(mask).tolist()

        def take(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[i] for i in at)

        return Rows(
            take(self.kind),
            take(self.ops),
            take(self.conditions),
            take(self.data),
            take(self.spec),
            self.repeat[at],
            take(self.names),
            take(self.blocks),
            {name: values[at] for name, values in self.number.items()},
            self.fit[at],
            self.source,
            self.card,
        )

    def is_kind(self, *kinds: str) -> Mask:
        """Rows measured in one of these ways."""
        return np.array([kind in kinds for kind in self.kind], dtype=bool)

    @property
    def family(self) -> tuple[str, ...]:
        """Family of each row, as predictions name them."""
        return tuple({"linear": "gemm", "bmm": "gemm"}.get(op.kind, op.kind) for op in self.ops)


def load(database: str | Path) -> Rows:
    """Every row with an operator and a figure, and its idle rows apart (:func:`idle`)."""
    plain = [row for row in _plain(database) if row.get("kind") != "idle" and not row.get("error")]
    if not plain:
        raise BadInput(f"{database}: no measured rows. Pack a campaign with `wattcast measure pack`.")
    ops = _operators([row["operator"] for row in plain], str(database))
    first = plain[0]
    return Rows(
        kind=tuple(row["kind"] for row in plain),
        ops=ops,
        conditions=tuple(_condition(row) for row in plain),
        data=tuple(row.get("data") or "random" for row in plain),
        spec=tuple(row.get("spec") or (row.get("detail") or {}).get("spec", "") for row in plain),
        repeat=np.array([int(row.get("repeat") or 0) for row in plain]),
        names=tuple(tuple(row.get("kernel_names") or ()) for row in plain),
        blocks=tuple(tuple(math.prod(grid) for grid in row.get("kernel_grids") or ()) for row in plain),
        number={name: np.array([_number(row.get(name)) for row in plain]) for name in _NUMBERS},
        fit=np.array([not set(row.get("flags") or ()) & set(UNFIT) for row in plain], dtype=bool),
        source=Path(str(database)).name,
        card=" ".join(str(first.get(name)) for name in ("card_name", "driver") if first.get(name)),
    )


def idle(database: str | Path) -> list[tuple[float, float, float]]:
    """Clock (Hz), power (W) and temperature (C) of the idle rows."""
    plain = _plain(database)
    rows = [row for row in plain if row.get("kind") == "idle" and row.get("power_w")]
    power_w, degrees = (np.array([float(row[name]) for row in rows]) for name in ("power_w", "temperature_c"))
    card = [str(row.get("card_uuid") or "") for row in rows]
    weight = Counter(str(row.get("card_uuid") or "") for row in plain if row.get("kind") == "sustained")
    levelled_w = _at_one_level(power_w, degrees, card, weight)
    return [
        (float(row["sm_clock_hz"]), float(watts), float(row["temperature_c"]))
        for row, watts in zip(rows, levelled_w, strict=True)
    ]


def _at_one_level(power_w: Array, degrees: Array, card: list[str], weight: Mapping[str, float]) -> Array:
    """Idle power of several cards as of one: P = level of the card + slope · T, and levels averaged by ``weight``.

    Cards differ by some watts and are met at different temperatures: pooled as they are, the slope is that of none.
    """
    names = list(dict.fromkeys(card))
    if len(names) < 2:
        return power_w
    own = np.array([[name == c for name in names] for c in card], dtype=np.float64)  # (row, card)
    mean_w, mean_c = ((own.T @ values) / own.sum(axis=0) for values in (power_w, degrees))
    warmer = degrees - own @ mean_c
    slope = float(warmer @ (power_w - own @ mean_w)) / max(float(warmer @ warmer), 1e-9)
    level_w = mean_w - slope * mean_c
    share = np.array([float(weight.get(name, 0)) for name in names])
    common_w = float(level_w @ share / share.sum()) if share.sum() > 0 else float(level_w.mean())
    return np.asarray(power_w + common_w - own @ level_w)


def _plain(database: str | Path) -> list[Plain]:
    path = Path(database)
    if path.is_dir() and not (path / ROWS_FILE).exists():
        found = (row for file in sorted(path.rglob("*.jsonl")) for row in read_lines(file))
        rows = [row for row in found if row.get("record") == "row"]
        return list({(row.get("id"), row.get("run")): row for row in rows}.values())  # journals repeat earlier rows
    if path.is_dir():
        path = path / ROWS_FILE
    elif not path.exists():
        path = database_folder(str(database)) / ROWS_FILE
    return read_table(path)


def _operators(entries: list[Plain], where: str) -> tuple[Operator, ...]:
    """Operators through the workload reader, so that a row means what a workload file means."""
    named = [
        {"op": e["function"], **{k: v for k, v in e.items() if k not in ("op", "function")}}
        if e.get("op") == "elementwise"
        else e
        for e in entries
    ]
    graph = from_json.parse(json.dumps({"name": "database", "ops": named}).encode(), where)
    return tuple(op for block in graph.blocks for op in block.ops)


def _condition(row: Plain) -> Condition:
    detail = row.get("detail") or {}
    return Condition(
        str(row.get("layout") or ""),
        str(row.get("rotated") or ""),
        str(detail.get("backend") or ""),
        int(detail.get("rows") or 0),
        int(detail.get("inner") or 0),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
