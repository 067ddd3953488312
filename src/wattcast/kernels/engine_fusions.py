"""Leave out operators that an engine's attention does itself.

Graphs of served models are those of vLLM, whose rotary embedding and whose conversions of queries
and of attention's output to fp8 are kernels of their own. TensorRT-LLM's attention takes queries,
keys and values in bf16 before the rotary embedding, and writes its output in fp8 where the next
product wants it (TensorRT-LLM's documentation of attention: "RoPE fusion", "FP8 input/output"). Its
public rows were timed so: the collector gives the attention ``rope_gpt_neox`` and bf16
(aiconfigurator, ``collector/trtllm/collect_attn.py``). Latent attention has other kernels and keeps
what it has.
"""

from __future__ import annotations

from dataclasses import replace

from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.engine_row_operators import EngineRotary, Quantize
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator

_FUSING_ENGINES = ("trtllm",)
_FP8_MODES = ("static", "tensor", "token")  # of conversions that a kernel can do as it writes


def fuse_attention(graph: Graph, engine: str) -> Graph:
    """Return a graph without what the attention of ``engine`` does itself."""
    if engine not in _FUSING_ENGINES:
        return graph
    blocks = tuple(_fuse_block(block) for block in graph.blocks)
    if blocks == graph.blocks:
        return graph
    return replace(graph, blocks=blocks)


def _fuse_block(block: Block) -> Block:
    """Return a block without the rotary embedding and the conversions beside paged attention."""
    ops: list[Operator] = []
    for place, op in enumerate(block.ops):
        neighbours = block.ops[max(place - 1, 0) : place + 2]
        is_beside = any(isinstance(other, PagedAttention) for other in neighbours)
        is_conversion = isinstance(op, Quantize) and op.mode in _FP8_MODES
        if not (is_beside and is_conversion):
            ops.append(op)
    if not any(isinstance(op, PagedAttention) for op in ops):
        return block
    kept = tuple(op for op in ops if not isinstance(op, EngineRotary))
    return replace(block, ops=kept)
