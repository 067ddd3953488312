"""Graph -> Kernels: merge equal operators and choose the pipe each runs on."""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Scalar
from wattcast.dtypes import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels.collective import link_work
from wattcast.kernels.table import Kernels, Segment
from wattcast.workload.graph import Attention, Bmm, Collective, Conv2d, Graph, Linear, Operator

_MATMUL = (Linear, Bmm, Conv2d, Attention)
_FAMILY = {"linear": "gemm", "bmm": "gemm"}
TENSOR_EVENT = {
    Dtype.FP64: "tensor_fp64_flop",
    Dtype.TF32: "tensor_tf32_flop",
    Dtype.BF16: "tensor_fp16_flop",
    Dtype.FP16: "tensor_fp16_flop",
    Dtype.FP8: "tensor_fp8_flop",
    Dtype.INT8: "tensor_int8_op",
}
CUDA_EVENT = {
    Dtype.FP64: "cuda_fp64_flop",
    Dtype.FP32: "cuda_fp32_flop",
    Dtype.FP16: "cuda_fp16_flop",
    Dtype.BF16: "cuda_fp16_flop",
}
PIPE_EVENTS = tuple(dict.fromkeys([*TENSOR_EVENT.values(), *CUDA_EVENT.values()]))


def lower(graph: Graph, gpu: Gpu) -> Kernels:
    """The kernels a graph becomes on ``gpu``, one a distinct operator, in issue order."""
    row_of: dict[Operator, int] = {}
    segments = []
    for block in graph.blocks:
        rows = [row_of.setdefault(op, len(row_of)) for op in block.ops]
        counts = [float(op.count) for op in block.ops]
        segments.append(Segment(np.array(rows, np.int64), np.array(counts), block.repeat))
    ops = tuple(row_of)
    pipes = [_pipe(op, gpu) for op in ops]
    links = [link_work(op) if isinstance(op, Collective) else (0.0, 0.0) for op in ops]
    return Kernels(
        ops=ops,
        family=tuple(_FAMILY.get(op.kind, op.kind) for op in ops),
        pipe_event=tuple(event for event, _, _ in pipes),
        pipe_per_cycle=_chip_rate([rate for _, rate, _ in pipes], gpu),
        flop=np.array([op.flop for op in ops]),
        sfu_op=np.array([op.sfu_op for op in ops]),
        read_byte=np.array([op.read_byte for op in ops]),
        write_byte=np.array([op.write_byte for op in ops]),
        link_byte=np.array([byte for byte, _ in links]),
        link_hops=np.array([hops for _, hops in links]),
        segments=tuple(segments),
        assumptions=tuple(dict.fromkeys(note for _, _, note in pipes if note)),
    )


def _pipe(op: Operator, gpu: Gpu) -> tuple[str, Scalar, str]:
    """Event, rate per cycle and SM, and an assumption if the dtype has no unit of its own.

    Products run on tensor cores where the chip has them for the dtype, else on CUDA cores; other
    operators compute in fp32 whatever they store, as PyTorch's do. A format without a unit runs at
    the fp32 rate.
    """
    cuda = gpu.pipes.cuda_flop_per_cycle
    if not isinstance(op, _MATMUL):
        dtype = Dtype.FP64 if op.dtype is Dtype.FP64 and Dtype.FP64 in cuda else Dtype.FP32
        return CUDA_EVENT[dtype], cuda[dtype], ""
    if op.dtype in gpu.pipes.tensor_flop_per_cycle:
        return TENSOR_EVENT[op.dtype], gpu.pipes.tensor_flop_per_cycle[op.dtype], ""
    if op.dtype in cuda:
        return CUDA_EVENT[op.dtype], cuda[op.dtype], ""
    note = f"{gpu.name} has no {op.dtype} unit: products in {op.dtype} at the fp32 rate of its CUDA cores"
    return CUDA_EVENT[Dtype.FP32], cuda[Dtype.FP32], note


def _chip_rate(per_sm: list[Scalar], gpu: Gpu) -> Scalar:
    """Rates of the whole chip, ``(*sweep, kernel)``."""
    columns = np.broadcast_arrays(*per_sm, gpu.sm_count)[:-1] if len(per_sm) else []
    stacked = np.stack([c[..., 0] if c.ndim else c for c in columns], axis=-1)
    return np.asarray(stacked * gpu.sm_count)
