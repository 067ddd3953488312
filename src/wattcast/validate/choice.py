"""The kernel choice against the kernels that ran: what it took for shapes it had not seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast.fit.kernels_run import held_out_of
from wattcast.fit.kernels_split import HeldOut
from wattcast.validate.rows import Mask, Row, percent, row


def choice_rows(gpu: str, held: HeldOut | None = None) -> list[Row]:
    """How often the fitted choice is the library's: kind, tile and split; and latency with the true kernel."""
    held = held or held_out_of(gpu)
    if held is None:
        return []
    burst = np.array([kind == "burst" for kind in held.kind]) & (np.array(held.data) == "random")
    named = burst & np.array([bool(ran) and bool(chosen) for ran, chosen in zip(held.ran, held.chosen, strict=True)])
    where, family = f"{gpu} kernel choice", np.array(held.family)
    rows = []
    for name in ("gemm", "conv2d"):
        at = named & (family == name)
        rows.append(row(where, f"kernel of {name}", int(at.sum()), None, **_agreement(held, at)))
    for name in ("gemm", "conv2d"):
        at = burst & (family == name) & np.isfinite(held.oracle_latency_s)
        error = percent(held.oracle_latency_s[at], held.latency_s[at])
        more: dict[str, Any] = {
            "without_oracle": round(percent(held.predicted_latency_s[at], held.latency_s[at]) or 0.0, 1)
        }
        rows.append(row(where, f"latency of {name}, kernel that ran (oracle)", int(at.sum()), error, **more))
    return rows


def _agreement(held: HeldOut, at: Mask) -> dict[str, Any]:
    """Shares in percent."""
    ran, took = ([_parts(names[i]) for i in np.flatnonzero(at)] for names in (held.ran, held.chosen))
    pairs = list(zip(ran, took, strict=True))
    near = [abs(np.log2(b[1] * b[2] / (a[1] * a[2]))) <= 1.0 for a, b in pairs]
    return {
        "kind": _share([a[0] == b[0] for a, b in pairs]),
        "tile_exact": _share([a[:3] == b[:3] for a, b in pairs]),
        "area_within_a_factor_of_two": _share(near),
        "split_of_k": _share([a[3] == b[3] for a, b in pairs]),
        "distinct_kernels": len(set(ran)),
    }


def _share(flags: list[Any]) -> float:
    return round(float(100 * np.mean(flags)), 1) if flags else 0.0


def _parts(text: str) -> tuple[str, int, int, bool]:
    kind, tile, *split = text.split()
    n, m = tile.split("x")
    return kind, int(n), int(m), bool(split)
