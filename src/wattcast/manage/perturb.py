"""Perturbed plants: the simulated card as it might have been, to see what hangs on a number we assumed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from wattcast.arrays import Array
from wattcast.manage.hd7970 import Card, Simulated, Work
from wattcast.manage.plant import Tables

SHARES = {"occupancy": (0.1, 1.0), "divergence": (0.0, 0.95), "thrash": (0.0, 0.5)}  # kept inside these


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm of each kind of number."""

    demand: float = 0.15  # what kernels ask for, kernel by kernel
    card: float = 0.15  # power coefficients
    path: float = 0.10  # latencies, widths and efficiency of the memory path
    counter: float = 0.05  # counters, kernel by kernel


def perturbed(plant: Simulated, seed: int, spread: Spread | None = None) -> Tables:
    """One perturbed card with perturbed kernels; the same ``seed`` gives the same card."""
    spread = spread or Spread()
    rng = np.random.default_rng(seed)
    card = _card(plant.card, rng, spread)
    tables = replace(plant, card=card, work=_work(plant, rng, spread)).tables(f"hd-7970 perturbed {seed}")
    return replace(tables, counters=_counters(tables, rng, spread))


def _card(card: Card, rng: np.random.Generator, spread: Spread) -> Card:
    factors = {}
    for entry in fields(card):
        width = spread.card if entry.name.endswith("_w") else spread.path
        factors[entry.name] = float(np.exp(width * rng.standard_normal()))
    moved = {name: getattr(card, name) * factor for name, factor in factors.items()}
    return replace(card, **(moved | {"efficiency": min(moved["efficiency"], 0.95)}))


def _work(plant: Simulated, rng: np.random.Generator, spread: Spread) -> Work:
    """Each kernel's numbers times one factor, the same for all its phases."""
    names, which = np.unique(plant.kernels, return_inverse=True)
    moved: dict[str, Array] = {}
    for entry in fields(plant.work):
        value = getattr(plant.work, entry.name)
        if entry.name not in ("work", "fits"):
            value = value * np.exp(spread.demand * rng.standard_normal(len(names)))[which]
        moved[entry.name] = np.clip(value, *SHARES[entry.name]) if entry.name in SHARES else value
    return Work(**moved)


def _counters(tables: Tables, rng: np.random.Generator, spread: Spread) -> dict[str, Array]:
    names, which = np.unique(tables.kernels, return_inverse=True)
    most = {"NormVGPR": 1.0, "NormSGPR": 1.0, "icActivity": 1.0}
    return {
        name: np.clip(
            table * np.exp(spread.counter * rng.standard_normal(len(names)))[which][:, np.newaxis],
            0.0,
            most.get(name, 100.0),
        )
        for name, table in tables.counters.items()
    }
