"""When a training job that ran is said to differ from its prediction."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class JobCheckCoefficients(Coefficients):
    """Half-widths of intervals, and shares from which something is said."""

    power: float  # of a GPU's watts, as a share
    clock: float  # of its clock
    busy: float  # of the share of time in which a kernel runs
    tokens: float  # of a step's tokens
    pauses: float  # of the time between steps
    wait: float  # of a step that waits for data
    other_card: float  # between one GPU and the median of all
    floor: float  # of an adopted job's figures


JOB_CHECK = load_coefficients("training_check", JobCheckCoefficients)
