"""Predict what the sections of micro-batches cost on a GPU, each by itself, at several clocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.options.training_options import (
    NVFP4_BIT,
    ExpertKernels,
    Fp8Scales,
    Recompute,
    TrainingRecipe,
)
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import Prediction, predict_graphs, predict_timeline
from wattcast.training.microbatch import (
    MicrobatchWork,
    SectionWork,
    copy_operators,
)
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.engine_operators import BlockProduct, ScaledProduct
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Elementwise,
    Linear,
)

CLOCK_SHARES = np.linspace(0.4, 1.0, 13)  # of the top clock, between which a step is interpolated
_NO_LIMIT_W = 1e6
_BLACKWELL_SFU = 16.0  # exponentials of an SM and cycle; Blackwell Ultra (B300, GB300) has 32
_NOTHING = (Elementwise("fill", 1),)  # stands where a section computes nothing


@dataclass(frozen=True)
class SectionCost:
    """Cost of one repetition of a section, each ``(2, clock)``: rows are seconds and joules."""

    forward: Array
    backward: Array
    again: Array  # full recomputation that ends with the last tensor needed
    selective: Array
    copies: Array  # of weights and gradients
    gathered_copies: Array  # where weights are gathered

    def recomputed(self, strategy: TrainingStrategy) -> Array:
        """Return what is computed a second time.

        Megatron repeats the whole layer, PyTorch stops early.
        """
        if strategy.recompute is Recompute.FULL:
            return self.forward if strategy.tp * strategy.pp > 1 else self.again
        if strategy.recompute is Recompute.SELECTIVE:
            return self.selective
        return np.zeros_like(self.forward)


@dataclass(frozen=True)
class MicrobatchCost:
    """Costs of every section of a micro-batch, and the predictions they were taken from."""

    work: MicrobatchWork
    sections: tuple[SectionCost, ...]
    predictions: tuple[Prediction, ...]  # forward and backward of each section

    def list_assumptions(self) -> tuple[str, ...]:
        """Return what the prediction of the first pass assumes."""
        basis = self.predictions[0].basis
        assert basis is not None
        noted = predict_timeline(basis.timeline, basis.graph, basis.gpu, basis.at, basis.bundle)
        return noted.assumptions


def sweep_clocks(gpu: Gpu, at: OperatingPoint) -> OperatingPoint:
    """Return the clocks at which costs are computed, without a power limit.

    A whole step holds the limit, not its parts.
    """
    top_hz = float(np.mean(gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz))
    clocks_hz = (top_hz * CLOCK_SHARES)[:, np.newaxis]
    return replace(at, clock_hz=clocks_hz, power_limit_w=_NO_LIMIT_W)


def cost_microbatches(
    works: Sequence[MicrobatchWork],
    recipe: TrainingRecipe,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> list[MicrobatchCost]:
    """Predict the sections of several micro-batches at all clocks together.

    Equal operators are analysed once.
    """
    passes_of = {}
    for work in works:
        for section in work.sections:
            passes_of[id(section)] = _list_passes(section, recipe, gpu)
    # copies of weights are the same for all micro-batches
    graphs = list(dict.fromkeys(itertools.chain(*passes_of.values())))
    swept = predict_graphs(graphs, gpu, sweep_clocks(gpu, at), bundle, notes=False)
    prediction_of = dict(zip(graphs, swept, strict=True))

    slowdown = recipe.attention_slowdown
    if gpu.architecture == "blackwell":
        slowdown *= TRAINING.blackwell_attention
        if gpu.pipes.sfu_op_per_cycle is not None:
            is_ultra = float(np.mean(gpu.pipes.sfu_op_per_cycle)) > _BLACKWELL_SFU
            slowdown *= TRAINING.ultra_attention if is_ultra else 1.0
    if recipe.fp8_attention:
        slowdown *= TRAINING.fp8_attention
    products = _PRODUCTS.get(recipe.fp8_scales, 1.0)
    costs = []
    for work in works:
        sections = []
        shown: list[Prediction] = []
        for section in work.sections:
            passes = [prediction_of[graph] for graph in passes_of[id(section)]]
            shown += passes[:2]
            totals = [_sum_pass(prediction, slowdown, products) for prediction in passes]
            sections.append(SectionCost(*(total / section.repeat for total in totals)))
        costs.append(MicrobatchCost(work, tuple(sections), tuple(shown)))
    return costs


def _list_passes(
    section: SectionWork,
    recipe: TrainingRecipe,
    gpu: Gpu,
) -> list[Graph]:
    """Return the graphs of a section in the order of the fields of ``SectionCost``."""
    passes = (
        section.forward,
        section.backward,
        section.again if section.is_layer else (),
        section.selective if section.is_layer else (),
        copy_operators(section, recipe, gathered=False),
        copy_operators(section, recipe, gathered=True),
    )
    graphs = []
    for ops in passes:
        launched: list[Operator] = []
        for op in ops or _NOTHING:
            launched += _as_launched(op, recipe, gpu)
        graphs.append(Graph("pass", (Block(tuple(launched), section.repeat),)))
    return graphs


# Time of fp8 products over that with one scale for a tensor
_PRODUCTS = {
    Fp8Scales.ROW: TRAINING.row_products,
    Fp8Scales.BLOCK: TRAINING.block_products,
}


def _sum_pass(
    prediction: Prediction,
    attention_slowdown: float,
    fp8_slowdown: float,
) -> Array:
    """Return seconds and joules of a pass, with attention of another era and other fp8 products."""
    cost = np.stack([prediction.latency_s, prediction.energy_j])
    if attention_slowdown == 1.0 and fp8_slowdown == 1.0:
        return cost
    for op in prediction.ops:
        slowdown = 1.0
        if isinstance(op.op, Attention):
            slowdown = attention_slowdown
        elif isinstance(op.op, Linear | Bmm) and op.op.dtype is Dtype.FP8:
            slowdown = fp8_slowdown
        if slowdown != 1.0:
            cost = cost + (slowdown - 1.0) * np.stack([op.latency_s, op.energy_j])
    return cost


def _as_launched(
    op: Operator,
    recipe: TrainingRecipe,
    gpu: Gpu,
) -> tuple[Operator, ...]:
    """Return a product as it runs.

    There is one for each expert where they are separate. Tables of Blackwell cards have the
    engines' fp8 and fp4 kernels, not those of training, so these stand for them.
    """
    is_separate = recipe.expert_kernels is ExpertKernels.SEPARATE
    if isinstance(op, Bmm) and "experts" in op.label and is_separate:
        op = _separate_expert(op)
    is_narrow = isinstance(op, Linear | Bmm) and op.dtype is Dtype.FP8
    if isinstance(op, Linear | Bmm) and is_narrow and recipe.product_dtype is Dtype.FP4:
        return (_as_fp4_product(op),)
    if isinstance(op, Linear) and is_narrow and gpu.architecture == "blackwell":
        return (
            ScaledProduct(
                op.m,
                op.n,
                op.k,
                dtype=Dtype.FP8,
                count=op.count,
                label=op.label,
            ),
        )
    return (op,)


def _separate_expert(op: Bmm) -> Linear:
    """Return the products of experts one by one."""
    return Linear(
        op.m,
        op.n,
        op.k,
        dtype=op.dtype,
        out_dtype=op.out_dtype,
        turned=op.turned,
        label=op.label,
        count=op.b * op.count,
    )


def _as_fp4_product(op: Linear | Bmm) -> BlockProduct:
    """Return a product in NVFP4, whose operands are cast already."""
    times = op.count * (op.b if isinstance(op, Bmm) else 1)
    return BlockProduct(
        op.m,
        op.n,
        op.k,
        bit=NVFP4_BIT,
        dtype=Dtype.FP4,
        count=times,
        label=op.label,
    )
