"""The kernel choice against the kernels that ran: tiles of products, parsed from their names."""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.fit import kernels_data
from wattcast.fit.kernels import random
from wattcast.fitted import bundle_for
from wattcast.kernels import kernels_of
from wattcast.kernels.names import parse_kernel_name
from wattcast.validate.rows import Row, row


def choice_rows(gpu: str) -> list[Row]:
    """How often the scaffold's fastest tile is the library's, exactly and to a factor of two of its area.

    The choice has no fitted part, so no row was used to fit it. Names give the side along outputs first.
    """
    rows = kernels_data.load(gpu)
    rows = rows.where(rows.is_kind("burst") & random(rows) & (rows.repeat == 0))
    named = [parse_kernel_name(names[0]) if names else None for names in rows.names]
    product = np.array([family == "gemm" for family in rows.family])
    at = product & np.array([name is not None and name.tiled for name in named])
    some = rows.where(at)
    tiles = [(name.tile_m, name.tile_n) for name, keep in zip(named, at, strict=True) if keep and name is not None]
    measured = np.array(tiles, dtype=np.float64)
    chip = hardware.load(gpu)
    work = kernels_of(some.ops, some.conditions, chip, bundle_for(chip).reference, ()).work
    chosen = np.stack([work.features["tile_n"], work.features["tile_m"]], axis=-1)
    exact = (chosen == measured).all(axis=-1)
    near = np.abs(np.log2(chosen.prod(axis=-1) / measured.prod(axis=-1))) <= 1.0
    more: dict[str, Any] = {
        "exact": round(float(100 * exact.mean()), 1),
        "area_within_a_factor_of_two": round(float(100 * near.mean()), 1),
        "distinct_tiles": len({tuple(tile) for tile in measured.tolist()}),
        "names_not_parsed": int((product & ~at).sum()),
    }
    return [row(f"{gpu} kernel choice", "tile of a product", len(measured), None, **more)]
