"""The coefficients of designs that nobody built."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class DesignCoefficients(Coefficients):
    """How area, leakage and energies follow the sizes of a chip, and what its kernels may do."""

    sm_area_share: float  # of the base's die
    memory_area_share: float
    l2_area_share: float
    tensor_of_sm: (
        float  # of an SM's area: tensor cores, and as much lanes, registers, shared memory
    )
    static_memory_share: float  # of the idle power at the lowest clock
    static_chip_share: float
    shared_margin: float  # times what the base's tiles need
    most_growth: float  # of the area of a tile, over the base's
    sparse_weight_share: float  # bytes of 2:4 weights over dense ones
    die_link_energy_j_per_byte: float


DESIGNS = load_coefficients("designs", DesignCoefficients)
