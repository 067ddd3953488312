"""LoRA adapters in an engine: vLLM's Triton kernels that shrink tokens to a rank and expand them.

Both walk over the tokens of each adapter, one launch for all adapters that there may be. They are
bound by the values that they load and add to, not by their products.
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
from wattcast.workload.adapter_operators import AdapterProduct


class EngineAdapterCoefficients(Coefficients):
    """What adapters cost beside bytes and FLOPs."""

    base_steps: float  # dependent steps of both kernels, whatever the adapters
    adapter_steps: float  # further ones for each adapter that the tokens use
    rank_steps: float  # of these, for each of an adapter's ranks
    shrink_cycles: float  # of an SM for an input value of a slice
    expand_cycles: float  # of an SM for an output value
    launches: float  # kernels: zeros for the sums, shrink, expand


ENGINE_ADAPTERS = load_coefficients("engine_adapters", EngineAdapterCoefficients)


def count_adapters(op: AdapterProduct, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of the adapters of one linear layer."""
    sm_count = float(run.chip.sm_count)
    inputs = float(op.m) * op.k * op.slices
    outputs = float(op.m) * op.n
    sm_cycles = ENGINE_ADAPTERS.shrink_cycles * inputs + ENGINE_ADAPTERS.expand_cycles * outputs
    adapter_steps = ENGINE_ADAPTERS.adapter_steps + ENGINE_ADAPTERS.rank_steps * op.rank
    byte = op.read_byte + op.write_byte
    missing = run.missing_share(byte)
    weight_missing = run.missing_share(op.weight_byte, streams=True)
    work = EngineWork(
        units=sm_count,
        unit_flop=run.flop_per_cycle * sm_cycles / sm_count,
        steps=ENGINE_ADAPTERS.base_steps + adapter_steps * op.adapters,
        launches=ENGINE_ADAPTERS.launches,
        l2_byte=byte,
        shared_byte=byte,
        dram_read_byte=op.weight_byte * weight_missing + (op.read_byte - op.weight_byte) * missing,
        dram_write_byte=op.write_byte * missing,
    )
    plain = {"rank": float(op.rank), "adapters": float(op.adapters)}
    logs = {
        "log_m": float(op.m),
        "log_n": float(op.n),
        "log_k": float(op.k),
    }
    return CountedKernel("gemm.engine.lora", work, plain, logs)


register_kernels(AdapterProduct, mapping=count_each(count_adapters))
