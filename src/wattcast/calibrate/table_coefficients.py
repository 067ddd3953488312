"""The coefficients of calibrating on public tables of kernels."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class TableCoefficients(Coefficients):
    """Which rows of a table are used, and for what."""

    least_rows: int  # of a family, to calibrate it
    popularity_exponent: float  # of experts, over the exponent that a table names
    least_group_rows: int  # of a kind of kernels in it
    # of a latency that a row's own kernel keeps when what was timed beside it is taken off
    least_own_share: float
    # of a latency, from which a row says how long what was timed beside its product takes
    least_beside_share: float
    least_beside_s: float  # shorter rows are launches more than work
    least_beside_rows: int  # of a kind of operator, to fit its corrections
    least_write_rows: int  # of prompts over a format of the cache, to say how long writing takes
    write_shares: tuple[float, ...]  # of the time of writes into the cache, that are tried
    uncapped_share: float  # of the power limit, below which a card runs at its top clock
    bands_ms: tuple[float, float]  # latencies between which rows are drawn in equal numbers
    held_out_parts: int  # one shape in so many is never fitted to
    sibling_sure: float  # how well a row of a sibling says what a card's own row would, 0 to 1
    # of the time of a model's and a split's experts over what their format usually takes beside the
    # forecast, beyond which TensorRT-LLM had not tuned them
    untuned_excess: float
    # vLLM's fp8_block products are launched one by one. Those that take a card some microseconds
    # show how long the host takes; rows that are not beyond nearly all of these may be bound by it.
    host_bound_work_flop: float
    host_bound_size_byte: float
    host_bound_quantile: float
    host_bound_margin: float
    least_host_bound_s: float


TABLE = load_coefficients("table_calibration", TableCoefficients)
