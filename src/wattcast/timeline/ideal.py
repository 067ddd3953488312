"""The scaffold's ideal terms on the reference chip: what λ scale, and what the learned energy factor sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar
from wattcast.kernels import Kernels, Reference
from wattcast.kernels.work import Work
from wattcast.timeline.waves import rounds, waves

# Elements of a layout kernel that an SM turns in a cycle: 575e9 a second on 132 SMs at 1.98 GHz, of two
# and of four bytes alike, from the times of layout kernels in the H200 database.
TURNS_PER_CYCLE = 2.2


@dataclass(frozen=True)
class Terms:
    """Ideal terms, ``(kernel,)`` each; see :mod:`wattcast.timeline.phases` for how λ scale them."""

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

    def seconds(self, log_corrections: Array, effective_hz: Array | float) -> Array:
        """Latency with log λ of compute, memory, fixed seconds, L2, cycles a step: ``(kernel, 5)`` or ``(5,)``."""
        return self.corrected(np.moveaxis(np.exp(log_corrections), -1, 0), effective_hz)

    def corrected(self, corrections: Array, effective_hz: Array | float) -> Array:
        """The same with the five λ themselves, on the first axis."""
        compute, memory, fixed, l2, serial = corrections
        on_chip = np.maximum(compute * self.compute_cycle, l2 * self.l2_cycle)
        main = np.maximum(on_chip / effective_hz, memory * self.dram_s)
        on_chip = np.maximum(l2 * self.between_cycle, self.turn_cycle)
        between = np.maximum(on_chip / effective_hz, memory * self.between_s)
        store = np.maximum(l2 * self.store_cycle / effective_hz, memory * self.store_s)
        return np.asarray(fixed * self.launches + serial * self.serial_step / effective_hz + main + between + store)

    def at(self, rows: npt.NDArray[np.int64]) -> Terms:
        """The terms of some kernels."""
        return Terms(*(column[rows] for column in vars(self).values()))


def ideal(kernels: Kernels, reference: Reference) -> Terms:
    """Ideal terms of every kernel on the reference chip."""
    work, sms = kernels.work, reference.sm_count
    in_waves = waves(kernels, sms)
    cycles = in_waves * work.unit_flop / _rate(kernels, reference)
    if reference.sfu_per_cycle > 0:
        cycles = np.maximum(cycles, kernels.sfu_op / (sms * reference.sfu_per_cycle))
    dram = reference.dram_byte_per_cycle * reference.top_hz
    stored_byte = late_dram_byte(work)
    return Terms(
        compute_cycle=cycles,
        l2_cycle=work.l2_byte * loads(kernels, sms, in_waves) / reference.l2_byte_per_cycle,
        dram_s=(work.dram_read_byte + (work.dram_write_byte - stored_byte)) / dram,
        serial_step=work.steps * rounds(kernels, sms),
        launches=work.launches,
        between_cycle=work.between_byte / reference.l2_byte_per_cycle,
        between_s=work.between_dram_byte / dram,
        turn_cycle=work.turn_element / (TURNS_PER_CYCLE * sms),
        store_cycle=work.store_byte / reference.l2_byte_per_cycle,
        store_s=stored_byte / dram,
    )


def loads(kernels: Kernels, sms: Scalar, in_waves: Array) -> Scalar:
    """Imbalance of what tiles of convolutions load, which bounds the busiest SM; other kernels spread evenly.

    What the busiest SM loads over what an SM loads on average, ``(*sweep, kernel)``; 1 where no kernel has any.
    Products, too, have it, but their loads hide behind more arithmetic: it fitted them worse.
    """
    if "conv2d" not in kernels.family:
        return 1.0
    uneven = np.asarray(in_waves * sms / np.maximum(kernels.work.units, 1.0))
    uneven[..., [name != "conv2d" for name in kernels.work.learner]] = 1.0
    return uneven


def late_dram_byte(work: Work) -> Array:
    """Bytes of device memory that results take after a kernel's main loop; all others overlap it."""
    return np.where(work.store_byte > 0, work.dram_write_byte, 0.0)


RATES = ("log_time", "rate_dram", "rate_l2", "rate_pipe", "rate_active")


def rates(kernels: Kernels, reference: Reference, seconds: Array, fixed_s: Array) -> Array:
    """How busy the reference chip would be, as features of the energy, ``(RATES, kernel)``.

    Shares of peak rates, and the time in logs.
    """
    work, sms = kernels.work, reference.sm_count
    cycles = np.maximum(seconds * reference.top_hz, 1.0)
    found = np.empty((len(RATES), len(cycles)))
    log_time, dram, l2, pipe, active = found
    np.log2(np.maximum(seconds * 1e6, 1e-3), out=log_time)
    moved = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    np.divide(moved, cycles * reference.dram_byte_per_cycle, out=dram)
    moved = work.l2_byte + work.store_byte + work.between_byte
    np.divide(moved, cycles * reference.l2_byte_per_cycle, out=l2)
    np.divide(kernels.flop, cycles * (sms * _rate(kernels, reference)), out=pipe)
    share = work.units / (sms * np.maximum(waves(kernels, sms), 1e-30))
    drawn_in = np.minimum(np.maximum(1.0 - fixed_s / np.maximum(seconds, 1e-12), 0.0), 1.0)
    np.multiply(share, drawn_in, out=active)
    return found


def _rate(kernels: Kernels, reference: Reference) -> Array:
    """Arithmetic of an SM per cycle on each kernel's pipe."""
    return np.array([reference.per_cycle[event] for event in kernels.pipe_event])
