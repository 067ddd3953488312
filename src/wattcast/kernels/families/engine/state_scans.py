"""Short convolutions and scans of state-space models, from bytes and FLOPs: none was measured.

A prompt's scan is cut as the Triton code of mamba-ssm and flash-linear-attention cuts it: five
kernels (decay, states of the chunks, states passed along, scores, outputs), six by the delta rule.
States of chunks pass in fp32. Mamba's first rule is one kernel, with a block for each channel of
each sequence.
"""

from __future__ import annotations

from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
)
from wattcast.workload.scan_operators import CausalConv, StateScan

# Values of a block of a convolution, or of the state that a single token changes
_BLOCK_VALUES = 4096.0


def count_scan(op: CausalConv | StateScan, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of a short convolution or a scan."""
    launches = 1.0
    between = 0.0
    if isinstance(op, StateScan) and op.rule == "mamba":
        units = float(op.batch * op.heads)
    elif isinstance(op, StateScan) and op.length > 1:
        chunks = -(-op.length // op.chunk)
        units = float(op.batch * chunks * op.heads)
        launches = 6.0 if op.rule == "delta" else 5.0
        between = 8.0 * units * op.key_dim * op.value_dim
    else:
        units = max(op.write_byte / op.dtype.byte / _BLOCK_VALUES, 1.0)

    byte = op.read_byte + op.write_byte
    missing = run.missing_share(byte + between)
    work = EngineWork(
        units=units,
        unit_flop=op.flop / units,
        steps=1.0,
        launches=launches,
        l2_byte=byte,
        shared_byte=2.0 * (byte + between),
        dram_read_byte=op.read_byte * missing,
        dram_write_byte=op.write_byte * missing,
        between_byte=between,
        slots=2.0,
    )
    return CountedKernel("gemm.scan" if between else "elementwise.scan", work, {}, {})


register_kernels(CausalConv, StateScan, mapping=count_each(count_scan))
