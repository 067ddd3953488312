"""Machete, vLLM's products of bf16 tokens and int4 weights on Hopper: tiles, shares and energy."""

from __future__ import annotations

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.kernels.kernel_table import (
    KernelWork,
    LibraryStyle,
    ReferenceChip,
)


class MacheteCoefficients(Coefficients):
    """What Machete's kernels do besides multiplying, and when they share out steps."""

    weights_per_cycle: float  # that an SM widens from int4 to bf16
    toggling: float  # energy of its arithmetic in a step, over that of the same on random numbers
    even_tokens: float  # of a product whose arithmetic takes half of its energy
    shared_waves: float  # of tiles, from which SMs no longer share out the steps of all tiles
    full_wave: float  # share of SMs with a tile in the last wave, from which they do not share
    least_steps: float  # along k that a block takes where steps are shared out


MACHETE_FAMILY = "weight_only.machete"
MACHETE = load_coefficients("machete", MacheteCoefficients)


def runs_machete(chip: ReferenceChip) -> bool:
    """Tell whether vLLM has Machete's kernels for a chip: they are made of Hopper's
    instructions.
    """
    return chip.style is LibraryStyle.HOPPER and not chip.is_blackwell


def shares_steps(tiles: float, sm_count: float) -> bool:
    """Tell whether SMs share out the steps of all tiles.

    Machete does so where tiles fill few waves and leave the last one short.
    """
    waves = tiles / sm_count
    return waves < MACHETE.shared_waves and not waves % 1.0 >= MACHETE.full_wave


def machete_energy(work: KernelWork) -> Array:
    """Return the energy of kernels in an engine's step over that of the same alone, ``(kernel,)``.

    It is 1 of all but Machete's products. With m tokens their arithmetic is a share of m / (m + M)
    of the energy, and costs τ of what it does on random numbers: an int4 weight has few values, so
    that fewer bits change from one product to the next. M = ``even_tokens``, τ = ``toggling``.
    """
    by_machete = [name.endswith(MACHETE_FAMILY) for name in work.kernel_family.values]
    if not any(by_machete):
        return np.ones(len(work.units))
    tokens = np.exp2(work.features["log_m"])
    share = tokens / (tokens + MACHETE.even_tokens)
    is_product = np.array(by_machete).take(work.kernel_family.place)
    return np.where(is_product, 1.0 - (1.0 - MACHETE.toggling) * share, 1.0)
