"""Compute what each kernel would take on the reference chip if nothing were lost.

Fitted λ scale these terms (``predictor.kernel_phases`` has the equations for any GPU and clock);
what the terms miss is learned, and the learned factor on energy sees how busy the reference chip
is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Sweepable,
    map_distinct,
)
from wattcast.kernels import Kernels, ReferenceChip
from wattcast.kernels.kernel_table import KernelWork
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.predictor.timeline import count_rounds, count_waves

RATE_FEATURES = ("log_time", "rate_dram", "rate_l2", "rate_pipe", "rate_active")

_SHORTEST_US = 1e-3  # of a kernel whose logarithm is taken


@dataclass(frozen=True, eq=False, repr=False)
class IdealTerms:
    """Ideal terms of the phases of each kernel, ``(kernel,)``; ``predictor.kernel_phases`` says how
    λ scale them.
    """

    compute_cycle: Array
    l2_cycle: Array
    dram_s: Array
    serial_step: Array
    launches: Array
    between_cycle: Array
    between_s: Array
    turn_cycle: Array
    store_cycle: Array
    store_s: Array

    def seconds(
        self,
        log_corrections: Array,
        effective_hz: Array | float,
    ) -> Array:
        """Compute latency from log λ of compute, memory, fixed seconds, L2 and steps, ``(kernel,
        5)`` or ``(5,)``.
        """
        return self.corrected(np.moveaxis(np.exp(log_corrections), -1, 0), effective_hz)

    def corrected(
        self,
        corrections: Array,
        effective_hz: Array | float,
    ) -> Array:
        """Return the latency with the five λ themselves, on the first axis."""
        compute, memory, fixed_s, l2, serial = corrections
        main_cycle = np.maximum(compute * self.compute_cycle, l2 * self.l2_cycle)
        main_s = np.maximum(main_cycle / effective_hz, memory * self.dram_s)
        between_cycle = np.maximum(l2 * self.between_cycle, self.turn_cycle)
        between_s = np.maximum(between_cycle / effective_hz, memory * self.between_s)
        store_s = np.maximum(l2 * self.store_cycle / effective_hz, memory * self.store_s)
        start_s = fixed_s * self.launches
        serial_s = serial * self.serial_step / effective_hz
        return np.asarray(start_s + serial_s + main_s + between_s + store_s)

    def select_rows(self, rows: npt.NDArray[np.int64]) -> IdealTerms:
        """Return the terms of some of the kernels."""
        return IdealTerms(*(column[rows] for column in vars(self).values()))


def compute_ideal_terms(kernels: Kernels, reference: ReferenceChip) -> IdealTerms:
    """Compute the ideal terms of every kernel on the reference chip."""
    work = kernels.work
    sms = reference.sm_count
    waves = count_waves(kernels, sms)

    compute_cycle = waves * work.unit_flop / _find_pipe_rate(kernels, reference)
    if reference.sfu_per_cycle > 0:
        sfu_cycle = kernels.sfu_op / (sms * reference.sfu_per_cycle)
        compute_cycle = np.maximum(compute_cycle, sfu_cycle)
    busiest_l2_byte = work.l2_byte * load_imbalance(kernels, sms, waves)

    dram_byte_per_s = reference.dram_byte_per_cycle * reference.top_hz
    stored_byte = late_dram_byte(work)
    main_byte = work.dram_read_byte + (work.dram_write_byte - stored_byte)
    return IdealTerms(
        compute_cycle=compute_cycle,
        l2_cycle=busiest_l2_byte / reference.l2_byte_per_cycle,
        dram_s=memory_tail(kernels, sms, reference.lone_sm_share) * main_byte / dram_byte_per_s,
        serial_step=work.steps * count_rounds(kernels, sms),
        launches=work.launches,
        between_cycle=work.between_byte / reference.l2_byte_per_cycle,
        between_s=work.between_dram_byte / dram_byte_per_s,
        turn_cycle=work.turn_element / (KERNEL_TIMES.turns_per_cycle * sms),
        store_cycle=work.store_byte / reference.l2_byte_per_cycle,
        store_s=stored_byte / dram_byte_per_s,
    )


def load_imbalance(
    kernels: Kernels,
    sms: Sweepable,
    waves: Array,
) -> Sweepable:
    """Return what the busiest SM loads over what an SM loads on average, ``(*sweep, kernel)``.

    It is above 1 for tiles of convolutions only. Products have it too, but their loads hide behind
    more arithmetic: it fitted them worse.
    """
    if "conv2d" not in kernels.family.values:
        return 1.0
    uneven = np.asarray(waves * sms / np.maximum(kernels.work.units, 1.0))
    uneven[..., map_distinct("conv2d".__ne__, kernels.work.root_family)] = 1.0
    return uneven


def memory_tail(
    kernels: Kernels,
    sms: Sweepable,
    lone_sm_share: float = 0.0,
) -> Sweepable:
    """Return the time that decode attention reads its cache over that of an even load, ``(*sweep,
    kernel)``.

    Tiles of U/S = w + r waves keep all SMs busy for w. In the remaining r an SM reads at most κ
    times its even share of the rate (``lone_sm_share``; 0: as on an H200), so the factor is
    (w + max(r, 1/κ)) / (w + r), for sequences of one length.
    """
    groups = kernels.work.kernel_family
    is_paged_group = [name.startswith("attention.engine.paged.decode") for name in groups.values]
    if not any(is_paged_group):
        return 1.0
    is_paged = np.array(is_paged_group).take(groups.place)
    has_one_length = kernels.work.features["kinds"] == 1.0
    waves = np.asarray(kernels.work.units / sms)
    tail = waves % 1.0
    tail_s = np.maximum(tail, 1.0 / (lone_sm_share or KERNEL_TIMES.lone_sm_share))
    is_uneven = is_paged & has_one_length & (tail > 0.0)
    return np.where(is_uneven, (waves - tail + tail_s) / waves, 1.0)


def late_dram_byte(work: KernelWork) -> Array:
    """Return the bytes of device memory that results take after a kernel's main loop; all others
    overlap it.
    """
    return np.where(work.store_byte > 0, work.dram_write_byte, 0.0)


def busy_rates(
    kernels: Kernels,
    reference: ReferenceChip,
    seconds: Array,
    fixed_s: Array,
) -> Array:
    """Return the log of the time and shares of the reference chip's peak rates, ``(RATE_FEATURES,
    kernel)``.
    """
    work = kernels.work
    sms = reference.sm_count
    cycles = np.maximum(seconds * reference.top_hz, 1.0)
    dram_byte = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    l2_byte = work.l2_byte + work.store_byte + work.between_byte
    flop_per_cycle = sms * _find_pipe_rate(kernels, reference)

    active_share = work.units / (sms * np.maximum(count_waves(kernels, sms), 1e-30))
    working_share = 1.0 - fixed_s / np.maximum(seconds, 1e-12)
    working_share = np.minimum(np.maximum(working_share, 0.0), 1.0)
    rates = {
        "log_time": np.log2(np.maximum(seconds * 1e6, _SHORTEST_US)),
        "rate_dram": dram_byte / (cycles * reference.dram_byte_per_cycle),
        "rate_l2": l2_byte / (cycles * reference.l2_byte_per_cycle),
        "rate_pipe": kernels.flop / (cycles * flop_per_cycle),
        "rate_active": active_share * working_share,
    }
    return np.array([rates[name] for name in RATE_FEATURES])


def _find_pipe_rate(kernels: Kernels, reference: ReferenceChip) -> Array:
    """Return the arithmetic of an SM per cycle on each kernel's pipe."""
    return map_distinct(reference.per_cycle.__getitem__, kernels.pipe_event)
