"""Learned factors of a bundle <-> ``arrays.npz``: plain arrays under dotted names, never a pickle."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wattcast.errors import bad_value
from wattcast.forest import Forest
from wattcast.kernels import Reference, choose
from wattcast.timeline.kriging import Kriging
from wattcast.timeline.residual import Learned, Residuals


def residuals_to_bytes(residuals: Residuals) -> bytes:
    """The bytes of an ``arrays.npz``."""
    arrays: dict[str, Any] = choose.to_arrays(residuals.reference.choice or {}, "choice")
    for kind, models in (("time", residuals.time), ("energy", residuals.energy)):
        for family, model in models.items():
            prefix = f"{kind}.{family}"
            arrays[f"{prefix}.range"] = np.array([model.low, model.high])
            if model.forest is not None:
                arrays |= model.forest.to_arrays(f"{prefix}.forest")
            if model.kriging is not None:
                arrays |= model.kriging.to_arrays(f"{prefix}.kriging")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def residuals_from(data: bytes, reference: Reference) -> Residuals:
    """What :func:`residuals_to_bytes` saved."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise bad_value("arrays.npz", "arrays saved by `wattcast fit kernels`", str(error)) from None
    choice = choose.from_arrays(arrays, "choice")
    reference = replace(reference, choice=choice or None)
    return Residuals(reference, _models(arrays, "time"), _models(arrays, "energy"))


def _models(arrays: Mapping[str, Any], kind: str) -> dict[str, Learned]:
    families = [name.split(".")[1] for name in arrays if name.startswith(f"{kind}.") and name.endswith(".range")]
    found = {}
    for family in families:
        prefix = f"{kind}.{family}"
        low, high = (float(x) for x in arrays[f"{prefix}.range"])
        forest = f"{prefix}.forest" if f"{prefix}.forest.features" in arrays else None
        kriging = f"{prefix}.kriging" if f"{prefix}.kriging.features" in arrays else None
        found[family] = Learned(
            Forest.from_arrays(arrays, forest) if forest else None,
            Kriging.from_arrays(arrays, kriging) if kriging else None,
            low,
            high,
        )
    return found
