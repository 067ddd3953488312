"""Kernels -> Timeline by the roofline: the busiest unit sets the time, the rest overlaps with it.

cycles = λ_c·max(F/π, S/σ, B/β_L2), seconds = λ_m·Q/β_DRAM [Williams2009], with per-family
corrections λ and a fixed time per kernel from the bundle. Bytes are compulsory traffic: each operand
once. Units whose rate nobody published do not bound anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.errors import MissingSpecification
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels
from wattcast.kernels.lower import PIPE_EVENTS
from wattcast.timeline.timeline import Phase, Timeline


@dataclass(frozen=True)
class Correction:
    """How far a family of kernels stays from the ideal: λ on cycles, λ on DRAM seconds, fixed time."""

    compute: float
    memory: float
    fixed_s: float


@dataclass(frozen=True)
class Launch:
    """What the host and the links add: seconds per operator issued and per message sent."""

    host_s_per_operator: Scalar
    link_s_per_message: float


def schedule(kernels: Kernels, gpu: Gpu, corrections: Mapping[str, Correction], launch: Launch) -> Timeline:
    """The clock-free timeline of ``kernels`` on ``gpu``."""
    of = [corrections[family] for family in kernels.family]
    compute = np.array([c.compute for c in of])
    memory = np.array([c.memory for c in of])
    fixed_s = np.array([c.fixed_s for c in of])
    off_chip_s = memory * (kernels.read_byte + kernels.write_byte) / gpu.memory.byte_per_s
    events, value = _counts(kernels)
    tensor_rows = np.flatnonzero([event.startswith("tensor") for event in kernels.pipe_event])
    calls = kernels.calls
    return Timeline(
        kernels=kernels,
        phases=(
            Phase("fixed", None, fixed_s),
            Phase("main", compute * _cycles(kernels, gpu), np.maximum(off_chip_s, _link_s(kernels, gpu, launch))),
        ),
        tensor_rows=tensor_rows,
        tensor_cycles=np.asarray(kernels.flop / kernels.pipe_per_cycle)[..., tensor_rows],
        events=events,
        value=value,
        total=np.einsum("...ke,k->...e", value, calls),
        calls=calls,
        host_s=launch.host_s_per_operator * np.ones(len(kernels.ops)),
    )


def _cycles(kernels: Kernels, gpu: Gpu) -> Array:
    """Cycles of the busiest on-chip unit, ``(*sweep, kernel)``."""
    cycles = np.asarray(kernels.flop / kernels.pipe_per_cycle)
    if gpu.pipes.sfu_op_per_cycle is not None:
        cycles = np.maximum(cycles, kernels.sfu_op / (gpu.sm_count * gpu.pipes.sfu_op_per_cycle))
    if gpu.l2.byte_per_cycle is not None:
        cycles = np.maximum(cycles, (kernels.read_byte + kernels.write_byte) / gpu.l2.byte_per_cycle)
    return cycles


def _link_s(kernels: Kernels, gpu: Gpu, launch: Launch) -> Scalar:
    """Seconds on the links: bytes over one direction's bandwidth, plus a latency per message."""
    if not kernels.link_byte.any():
        return 0.0
    links = gpu.links
    both_ways = links.nvlink_byte_per_s if links.nvlink_byte_per_s is not None else links.pcie_byte_per_s
    if both_ways is None:
        raise MissingSpecification(f"{gpu.name}: no link to other GPUs is known. Use --tp 1 --pp 1 --dp 1.")
    return kernels.link_byte / (both_ways / 2.0) + kernels.link_hops * launch.link_s_per_message


def _counts(kernels: Kernels) -> tuple[tuple[str, ...], Array]:
    """Event counts of one run of each kernel; L2 carries at least what DRAM does.

    Every pipe has a column: that a kernel leaves a pipe alone is something the prediction knows.
    """
    pipe = np.array(kernels.pipe_event)
    columns = {name: np.where(pipe == name, kernels.flop, 0.0) for name in PIPE_EVENTS}
    columns |= {
        "sfu_op": kernels.sfu_op,
        "l2_byte": kernels.read_byte + kernels.write_byte,
        "dram_read_byte": kernels.read_byte,
        "dram_write_byte": kernels.write_byte,
        "link_byte": kernels.link_byte,
    }
    return tuple(columns), np.stack(list(columns.values()), axis=-1)
