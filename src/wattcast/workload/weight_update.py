"""The AdamW update at the end of a training step, as programs compute it.

A fused kernel passes once over weights, gradients and moments. Two other ways are common:

- *Masters*: weights of half precision have masters in fp32 (Micikevicius et al. 2018, "Mixed
  precision training"; apex O2). Gradients are cast to fp32 and divided by the loss scale, their
  norm is taken and they are clipped, a fused kernel updates masters and moments, and the masters
  are copied into the weights. Each of these is a pass over all tensors together.
- *Separate*: each tensor is updated by itself, operator by operator. The operators are those of
  ``BertAdam`` in NVIDIA's DeepLearningExamples (PyTorch/LanguageModeling/BERT/optimization.py),
  which trains BERT in fp32 and TF32.
"""

from __future__ import annotations

from collections import Counter

from wattcast.core import Dtype
from wattcast.workload.graph import Block
from wattcast.workload.model_options import WeightUpdate
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import (
    ADAMW_ELEMENTS_PER_LAUNCH,
    Program,
    optimiser_block,
)

# Passes of masters before and after the fused kernel: function, and bytes of one weight that it
# reads and writes. Weights and gradients have two bytes.
_BEFORE_MASTERS = (
    ("cast", 2, 4),  # and divide by the loss scale
    ("sum", 4, 0),  # the norm of all gradients
    ("scale", 4, 4),  # clip
)
_AFTER_MASTERS = (("cast", 4, 2), ("fill", 0, 2))  # into the weights; gradients are set to zero
_FP32_ADAMW = (16, 12)  # gradient, master and two moments are read; all but the gradient written

# Operators of a separate update: function, and how many tensors like the weights each reads and
# writes, p the weight, g its gradient, m and v the moments, u the update.
_SEPARATE = (
    ("sum", 1, 0),  # the norm of all gradients
    ("scale", 1, 1),  # clip
    ("scale", 1, 1),
    ("scale", 1, 1),  # m *= beta1
    ("add", 2, 1),  # m += (1 - beta1) g
    ("scale", 1, 1),  # v *= beta2
    ("add", 2, 1),  # v += (1 - beta2) g g
    ("sqrt", 1, 1),
    ("shift", 1, 1),  # + epsilon
    ("div", 2, 1),  # u = m / ...
    ("scale", 1, 1),  # weight decay: d p
    ("add", 2, 1),  # u += d p
    ("scale", 1, 1),  # learning rate: r u
    ("add", 2, 1),  # p -= r u
    ("fill", 0, 1),  # the gradient is set to zero
)


def update_block(
    program: Program,
    dtype: Dtype,
    update: WeightUpdate,
) -> Block:
    """Return the AdamW update of a program's weights, which have ``dtype``."""
    if update is WeightUpdate.FUSED:
        return optimiser_block(program.parameter_count, dtype)
    if update is WeightUpdate.MASTERS:
        return _update_masters(program.parameter_count)
    return _update_separately(program, dtype)


def _update_masters(weights: int) -> Block:
    """Return the passes over all weights together, each in launches of many tensors."""
    fused = optimiser_block(weights, Dtype.FP32, *_FP32_ADAMW)
    launches = max(-(-weights // ADAMW_ELEMENTS_PER_LAUNCH), 1)
    elements = -(-weights // launches)

    def walk(
        function: str,
        read: int,
        written: int,
    ) -> Elementwise:
        return Elementwise(
            function,
            elements,
            dtype=Dtype.FP32,
            read=read * elements,
            write=written * elements or Dtype.FP32.byte,  # a norm is one number
            count=launches,
            label="optimiser",
        )

    before = [walk(*one) for one in _BEFORE_MASTERS]
    after = [walk(*one) for one in _AFTER_MASTERS]
    return Block((*before, *fused.ops, *after), 1, "optimiser")


def _update_separately(program: Program, dtype: Dtype) -> Block:
    """Return the operators of each tensor; tensors of one size are counted together."""
    tensors: Counter[int] = Counter()
    for section in program.sections:
        for weight in section.tape.parameters:
            tensors[weight.numel] += section.repeat
    ops = []
    for elements, count in tensors.items():
        byte = elements * dtype.byte
        for function, read, written in _SEPARATE:
            ops.append(
                Elementwise(
                    function,
                    elements,
                    dtype=dtype,
                    read=read * byte,
                    write=written * byte or dtype.byte,  # a norm is one number
                    count=count,
                    label="optimiser",
                )
            )
    return Block(tuple(ops), 1, "optimiser")
