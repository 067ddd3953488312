"""Leave out operators that an engine's attention and all-reduces do themselves.

Graphs of served models are those of vLLM, whose rotary embedding and whose conversions of queries
and of attention's output to fp8 are kernels of their own. TensorRT-LLM's attention takes queries,
keys and values in bf16 before the rotary embedding, and writes its output in fp8 where the next
product wants it (TensorRT-LLM's documentation of attention: "RoPE fusion", "FP8 input/output"). Its
public rows were timed so: the collector gives the attention ``rope_gpt_neox`` and bf16
(aiconfigurator, ``collector/trtllm/collect_attn.py``). Latent attention has other kernels and keeps
what it has. On Blackwell attention writes fp4 as well (``TRTLLM_ENABLE_ATTENTION_NVFP4_OUTPUT``).

Where GPUs share a model, TensorRT-LLM's all-reduce adds the residual, norms the sum and converts it
to fp8 or fp4 before it is written (``AllReduceFusionOp``, by default of Llama, Qwen3, DeepSeek and
gpt-oss: ``TRTLLM_LLAMA_EAGER_FUSION_DISABLED`` and the like). Messages beyond its workspace take
NCCL and kernels of their own.
"""

from __future__ import annotations

from dataclasses import replace

from wattcast.kernels.families.collectives import COLLECTIVES
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.engine_row_operators import (
    CompiledRows,
    EngineRotary,
    Quantize,
)
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Collective

_FUSING_ENGINES = ("trtllm",)
_WRITTEN_MODES = (
    "static",
    "tensor",
    "token",
    "fp4",
)  # of conversions that a kernel does as it writes


def fuse_operators(graph: Graph, engine: str) -> Graph:
    """Return a graph without what the attention and the all-reduces of ``engine`` do themselves."""
    if engine not in _FUSING_ENGINES:
        return graph
    blocks = [_fuse_attention(block) for block in graph.blocks]
    if any(_is_fused_exchange(op) for block in blocks for op in block.ops):
        blocks = [_fuse_norms(block) for block in blocks]
    if tuple(blocks) == graph.blocks:
        return graph
    return replace(graph, blocks=tuple(blocks))


def _is_fused_exchange(op: Operator) -> bool:
    """Tell whether an operator is an all-reduce that an engine's own kernels may fuse."""
    if not isinstance(op, Collective) or op.collective != "all_reduce":
        return False
    return op.software == "engine" and op.bytes <= COLLECTIVES.fused_exchange_byte


def _fuse_norms(block: Block) -> Block:
    """Return a block without the norms of sums, which the all-reduces before them do.

    With them go conversions that begin with a norm's result.
    """
    ops: list[Operator] = []
    after_norm = False
    for op in block.ops:
        is_norm = isinstance(op, CompiledRows) and op.function.startswith("add_rms_norm")
        is_conversion = isinstance(op, Quantize) and op.mode in _WRITTEN_MODES
        if not (is_norm or (after_norm and is_conversion)):
            ops.append(op)
        after_norm = is_norm
    return replace(block, ops=tuple(ops)) if len(ops) < len(block.ops) else block


def _fuse_attention(block: Block) -> Block:
    """Return a block without the rotary embedding and the conversions beside paged attention."""
    ops: list[Operator] = []
    for place, op in enumerate(block.ops):
        neighbours = block.ops[max(place - 1, 0) : place + 2]
        is_beside = any(isinstance(other, PagedAttention) for other in neighbours)
        is_conversion = isinstance(op, Quantize) and op.mode in _WRITTEN_MODES
        if not (is_beside and is_conversion):
            ops.append(op)
    if not any(isinstance(op, PagedAttention) for op in ops):
        return block
    kept = tuple(op for op in ops if not isinstance(op, EngineRotary))
    return replace(block, ops=kept)
