"""What operators cost among others (:mod:`wattcast.timeline.cold`), from layers of made-up models.

A layer was run as a model runs it, and each of its operators by itself. The two coefficients, none negative, make the
relative error of the layers' times least. What laws that saw no layer of the same architecture leave over widens the
intervals of workloads (:class:`wattcast.fitted.widening.Among`). Whole models take no part, so they can judge it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fit.kernels_interval import conformal
from wattcast.fit.suggest import operators_of
from wattcast.fitted.widening import Among
from wattcast.hardware import Gpu
from wattcast.kernels import kernels_of, reference_of
from wattcast.kernels.table import Segment
from wattcast.kernels.work import USUAL
from wattcast.records import CHAINS_FILE, Plain, database_folder, read_table
from wattcast.timeline.cold import Cold, terms

LEAST_LAYERS = 20  # to say how far workloads of several kernels may be from their sum


@dataclass(frozen=True)
class Layers:
    """Measured layers, ``(layer,)`` each; ``terms`` are what the coefficients multiply, ``(layer, 2)``."""

    name: tuple[str, ...]
    layer_s: Array
    alone_s: Array  # of all its operators, each by itself
    kernels: Array
    terms: Array

    def at(self, rows: npt.NDArray[np.bool_]) -> Layers:
        """Some of them."""
        names = tuple(name for name, wanted in zip(self.name, rows, strict=True) if wanted)
        return Layers(names, self.layer_s[rows], self.alone_s[rows], self.kernels[rows], self.terms[rows])

    @property
    def architecture(self) -> npt.NDArray[np.str_]:
        """Whose layers each is like: ``llama`` of ``stack llama-2048 decode 1 512``."""
        return np.array([name.split()[1].partition("-")[0] for name in self.name])


def layers_of(chains: Sequence[Plain], gpu: Gpu) -> Layers:
    """Layers among the chains of a database whose operators were all measured by themselves."""
    whole = [row for row in chains if row.get("handed_on") and row.get("latency_s") and row.get("alone_s")]
    good = [row for row in whole if not (row.get("error") or row.get("flags"))]
    if not good:
        raise BadInput("no layer has all its operators measured by themselves. Measure them: `--steps stack`.")
    reference = reference_of(gpu)
    found = []
    for row in good:
        listed = list(row["operators"])
        distinct = list(dict.fromkeys(listed))
        calls = np.array([listed.count(text) for text in distinct], np.float64)
        ops = operators_of([json.loads(text) for text in distinct])
        order = (Segment(np.arange(len(ops)), calls, 2),)  # a layer follows another like it
        kernels = kernels_of(ops, (USUAL,) * len(ops), gpu, reference, order)
        found.append((calls @ kernels.work.launches, *(terms(kernels, reference.l2_byte) @ calls)))
    table = np.array(found)
    layer_s, alone_s = np.array([(float(row["latency_s"]), float(sum(row["alone_s"]))) for row in good]).T
    return Layers(tuple(str(row["name"]) for row in good), layer_s, alone_s, table[:, 0], table[:, 1:])


def fit_cold(layers: Layers) -> Cold:
    """Coefficients, none negative, that make the relative error of the layers' times least."""
    from scipy.optimize import nnls

    scale = np.maximum(layers.terms.max(axis=0), 1e-30)
    value, _ = nnls(layers.terms / scale / layers.layer_s[:, None], 1.0 - layers.alone_s / layers.layer_s)
    operator_s, s_per_byte = (float(f"{x:.3g}") for x in value / scale)
    return Cold(operator_s, s_per_byte, len(layers.name))


def predicted_s(layers: Layers, law: Cold) -> Array:
    """Seconds of each layer: its operators by themselves, and what the law says they take more."""
    return np.asarray(layers.alone_s + layers.terms @ np.array([law.operator_s, law.s_per_byte]))


def held_out_s(layers: Layers) -> Array:
    """Seconds of each layer from a law that saw no layer of its architecture."""
    found = np.empty(len(layers.name))
    for architecture in dict.fromkeys(layers.architecture.tolist()):
        own = layers.architecture == architecture
        found[own] = predicted_s(layers.at(own), fit_cold(layers.at(~own)))
    return found


def measured_layers(database: str | Path, gpu: Gpu) -> Layers | None:
    """The layers of a database; None where it has too few."""
    folder = Path(database) if Path(database).is_dir() else database_folder(str(database))
    if not (folder / CHAINS_FILE).is_file():
        return None
    handed_on = [row for row in read_table(folder / CHAINS_FILE) if row.get("handed_on")]
    return layers_of(handed_on, gpu) if len(handed_on) >= LEAST_LAYERS else None


def among_of(layers: Layers) -> Among:
    """Low and high ends of what 90 % of layers took beyond what a law without their architecture said."""
    rest_s = layers.layer_s - held_out_s(layers)
    share, kernel_s = (conformal(one, 0.9) for one in (rest_s / layers.alone_s, rest_s / layers.kernels))
    return Among(
        (round(share[0], 4), round(share[1], 4)),
        (float(f"{kernel_s[0]:.3g}"), float(f"{kernel_s[1]:.3g}")),
        len(layers.name),
    )
