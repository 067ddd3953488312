"""Short convolutions and scans of state-space models, from bytes and FLOPs.

The delta rule alone was measured, in whole steps and by the times of its kernels.

A prompt's scan is cut as the Triton code of mamba-ssm and flash-linear-attention cuts it: five
kernels (decay, states of the chunks, states passed along, scores, outputs), six by the delta rule.
States of chunks pass in fp32. By the delta rule a chunk's state needs that of the chunk before, so
that the chunks of a sequence follow one another. Mamba's first rule is one kernel, with a block for
each channel of each sequence.
"""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
)
from wattcast.kernels.kernel_table import MOVED_SUM_BYTE
from wattcast.workload.scan_operators import CausalConv, StateScan


class EngineScanCoefficients(Coefficients):
    """What scans do besides reading, multiplying and writing."""

    delta_chunk_steps: float  # dependent steps from a chunk's state to the next one's
    slots: float  # blocks that an SM holds at once
    block_values: float  # of a convolution, or of the state that a token changes
    chunk_launches: float  # kernels of a scan by chunks
    delta_launches: float  # the same of the delta rule


ENGINE_SCANS = load_coefficients("engine_scans", EngineScanCoefficients)


def count_scan(op: CausalConv | StateScan, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of a short convolution or a scan."""
    launches = 1.0
    steps = 1.0
    between = 0.0
    if isinstance(op, StateScan) and op.rule == "mamba":
        units = float(op.batch * op.heads)
    elif isinstance(op, StateScan) and op.length > 1:
        chunks = -(-op.length // op.chunk)
        units = float(op.batch * chunks * op.heads)
        launches = ENGINE_SCANS.chunk_launches
        if op.rule == "delta":
            launches = ENGINE_SCANS.delta_launches
            # Only one chunk of each head of each sequence is worked on at a time: a chunk is a
            # unit here, and slots beyond those heads stay empty.
            busy_slots = min(float(op.batch * op.heads), ENGINE_SCANS.slots * run.chip.sm_count)
            steps = (
                ENGINE_SCANS.delta_chunk_steps * ENGINE_SCANS.slots * run.chip.sm_count / busy_slots
            )
        between = MOVED_SUM_BYTE * units * op.key_dim * op.value_dim
    else:
        units = max(op.write_byte / op.dtype.byte / ENGINE_SCANS.block_values, 1.0)

    byte = op.read_byte + op.write_byte
    missing = run.missing_share(byte + between)
    work = EngineWork(
        units=units,
        unit_flop=op.flop / units,
        steps=steps,
        launches=launches,
        l2_byte=byte,
        shared_byte=2.0 * (byte + between),
        dram_read_byte=op.read_byte * missing,
        dram_write_byte=op.write_byte * missing,
        between_byte=between,
        slots=ENGINE_SCANS.slots,
    )
    return CountedKernel("gemm.scan" if between else "elementwise.scan", work, {}, {})


register_kernels(CausalConv, StateScan, mapping=count_each(count_scan))
