"""The coefficients of the times of kernels, which several steps of a prediction use."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class KernelCoefficients(Coefficients):
    """What the times of kernels are made of, besides the corrections that a bundle has."""

    turns_per_cycle: float  # elements of a layout kernel that an SM turns in a cycle
    lone_sm_share: float  # of the memory's even rate: what an SM reads at when few others do
    process_share: float  # of the Gaussian process in the average with the trees
    padded_rows: int  # beyond, no product gains from rows to spare
    table_slack: float  # by which products of a table may take longer than larger ones


class ClockCoefficients(Coefficients):
    """How time follows a low clock, besides the law of effective clocks that a bundle has."""

    memory_knee: float  # of the top clock, below which time in device memory may follow the clock
    notable_slowdown: float  # by which a run must take longer there for an assumption to say so


KERNEL_TIMES = load_coefficients("kernel_times", KernelCoefficients)
CLOCK_LAW = load_coefficients("clock_law", ClockCoefficients)
MEMORY_KNEE = CLOCK_LAW.memory_knee
