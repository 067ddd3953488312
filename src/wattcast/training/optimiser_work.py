"""List the operators with which the optimiser ends a training step on one GPU.

AdamW and its like are one fused pass over all weights. Muon and Adafactor run several operators for
each matrix (``_MatrixUpdate``), and a fused pass for what is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from wattcast.core import Dtype
from wattcast.options.training_options import (
    STATE_BYTE,
    Optimizer,
    Sharding,
    TrainingRecipe,
)
from wattcast.training.microbatch import MicrobatchWork, SectionWork
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Elementwise,
    Layout,
    Linear,
)
from wattcast.workload.program import optimiser_block
from wattcast.workload.workload_coefficients import WORKLOADS

_ITERATIONS = WORKLOADS.muon_iterations  # of Newton-Schulz, for each matrix and step

FP32_BYTE = Dtype.FP32.byte
# Passes of Adafactor over a matrix: scalings, norms and means, and operators on vectors alone.
_SCALINGS, _NORMS, _VECTOR_OPERATORS = 4, 3, 12


def optimiser_graph(
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
) -> Graph:
    """Return the operators with which one GPU updates its share of the weights in one step.

    Pipeline stages are taken as equally large. A sharded optimiser (ZeRO, FSDP) divides weights
    among the GPUs that hold copies of them, and hands out whole matrices: at least one to each GPU.
    """
    is_sharded = strategy.sharding is not Sharding.NONE
    sharing_gpus = strategy.dp * strategy.cp if is_sharded else 1
    expert_sharing_gpus = strategy.expert_dp if is_sharded else 1

    # Weights that the fused pass updates, on all pipeline stages
    shared_weights = 0
    expert_weights = 0
    updates: list[Operator] = []
    for section in work.sections:
        shared_weights += (section.trained - section.expert_trained) * section.repeat
        expert_weights += section.expert_trained * section.repeat
        if not _updates_matrices(section, recipe):
            continue
        for number, rows, columns, is_expert in section.matrices:
            elements = number * rows * columns * section.repeat
            if is_expert:
                expert_weights -= elements
                owners = expert_sharing_gpus
            else:
                shared_weights -= elements
                owners = sharing_gpus
            times = max(round(number * section.repeat / strategy.pp / owners), 1)
            ops = _MatrixUpdate(recipe, rows, columns).list_operators()
            updates += [replace(op, count=op.count * times) for op in ops]

    weights = shared_weights / sharing_gpus + expert_weights / expert_sharing_gpus
    fused_pass = _fused_pass(max(int(weights / strategy.pp), 1), recipe)
    blocks = (fused_pass, Block(tuple(updates), 1)) if updates else (fused_pass,)
    return Graph("optimiser", blocks)


def _updates_matrices(section: SectionWork, recipe: TrainingRecipe) -> bool:
    """Whether the matrices of a section are updated one by one instead of in the fused pass.

    Muon updates those of layers so and leaves embedding and head to AdamW; Adafactor updates all.
    """
    is_muon = recipe.optimizer is Optimizer.MUON and section.is_layer
    return is_muon or recipe.optimizer is Optimizer.ADAFACTOR


def _fused_pass(weights: int, recipe: TrainingRecipe) -> Block:
    """Return the fused pass that reads and writes each of ``weights`` with its state once.

    AdamW with fp32 masters reads gradient, master and two moments. It writes master, moments and
    the weight in the format of the model. Where products run in fp8 or nvfp4, it also writes the
    weight in that format, once by rows and once by columns.
    """
    # Muon leaves all but the matrices of layers to AdamW
    is_muon = recipe.optimizer is Optimizer.MUON
    pass_recipe = replace(recipe, optimizer=Optimizer.ADAMW) if is_muon else recipe

    # Bytes for each weight; the state includes the master
    weight_byte = recipe.dtype.byte
    state_byte = pass_recipe.state_byte
    read_byte = recipe.gradient_byte + state_byte
    if not recipe.has_masters:
        read_byte += weight_byte
    written_byte = state_byte + weight_byte + recipe.narrow_byte
    dtype = Dtype.FP32 if recipe.has_masters else recipe.dtype
    return optimiser_block(weights, dtype, read_byte, written_byte)


@dataclass(frozen=True)
class _MatrixUpdate:
    """The operators that update one matrix of ``rows`` by ``columns`` weights.

    Each is a pass over the elements or a matrix product.
    """

    recipe: TrainingRecipe
    rows: int
    columns: int

    def list_operators(self) -> list[Operator]:
        """Return the operators in the order in which they run."""
        recipe = self.recipe
        ops: list[Operator] = []
        if recipe.has_masters:
            ops.append(self._make_pass("cast", FP32_BYTE, recipe.dtype.byte + recipe.narrow_byte))
        elif recipe.narrow_byte:
            ops.append(self._make_pass("cast", recipe.dtype.byte, recipe.narrow_byte))
        if recipe.optimizer is Optimizer.ADAFACTOR:
            return [*ops, *self._list_adafactor()]
        return [*ops, *self._list_muon()]

    def _list_adafactor(self) -> list[Operator]:
        """Return the operators of Adafactor (``transformers.Adafactor``, without a first moment).

        It works in fp32. It squares the gradient and averages the squares by rows (a vector for the
        rows) and by columns. The product of both vectors, one element for each weight, says how far
        to step: the gradient is divided by its root, then by its own norm, scaled, and added to the
        weight. Another 12 operators work on vectors and norms alone; each counts as a pass over a
        vector as long as the longer side.
        """
        weight_byte = self.recipe.dtype.byte
        gradient_byte = self.recipe.gradient_byte
        has_narrow_weights = weight_byte < FP32_BYTE and not self.recipe.has_masters

        # Casts to fp32, by the bytes that they read
        casts: Counter[float] = Counter()
        if gradient_byte < FP32_BYTE:
            casts[gradient_byte] += 1
        if has_narrow_weights:
            casts[weight_byte] += 1
        ops = [self._make_pass("cast", byte, FP32_BYTE, times) for byte, times in casts.items()]
        ops += [
            self._make_pass("scale", FP32_BYTE, FP32_BYTE, _SCALINGS),
            self._make_pass("add", 2 * FP32_BYTE, FP32_BYTE, 2),
            # Norms and the mean by rows: passes that read only
            self._make_pass("abs", FP32_BYTE, 0, _NORMS),
            self._make_pass(
                "scale", FP32_BYTE, FP32_BYTE, _VECTOR_OPERATORS, elements=self._long_side
            ),
            # The mean by columns
            self._make_pass(
                "mean",
                FP32_BYTE,
                0,
                result_byte=FP32_BYTE * self.columns,
                layout=Layout.TRANSPOSED,
            ),
            # The product of both vectors, whose reads are negligible; then the division by a norm
            self._make_pass("mul", 0, FP32_BYTE, layout=Layout.BROADCAST),
            self._make_pass("div", FP32_BYTE, FP32_BYTE, layout=Layout.BROADCAST),
        ]
        if has_narrow_weights:
            ops.append(self._make_pass("cast", FP32_BYTE, weight_byte))
        return ops

    def _list_muon(self) -> list[Operator]:
        """Return the operators of Muon (``torch.optim.Muon``).

        It updates the moment, makes it orthogonal by Newton-Schulz iterations, and adds it to the
        weight. An iteration is X <- aX + (bA + cA²)X with A = XXᵀ and constants a, b and c. For
        sides m <= n it takes 4m²n + 2m³ operations in bf16 [Jordan2024]. A product that adds to a
        matrix copies it first: to X of m x n, and to A of m x m. A tall matrix is transposed
        without a copy, so the first copy of X and the last sum read it across its order in memory.
        """
        m = self._short_side
        n = self._long_side
        gradient_byte = self.recipe.gradient_byte
        weight_byte = FP32_BYTE if self.recipe.has_masters else self.recipe.dtype.byte
        # The moment has the format of the weight; the table states it for fp32
        moment_byte = STATE_BYTE[Optimizer.MUON] * weight_byte / FP32_BYTE
        transposed: dict[str, Any] = {}
        if self.rows > self.columns:
            transposed = {
                "layout": Layout.TRANSPOSED,
                "rows": n,
                "run": 1,
            }

        # Moment and Nesterov's step, then the norm by which X is divided
        ops: list[Operator] = [
            self._make_pass("add", gradient_byte + moment_byte, moment_byte),
            self._make_pass("add", gradient_byte + moment_byte, gradient_byte),
            self._make_pass("abs", 2, 0),
        ]
        if gradient_byte > 2:
            ops.append(self._make_pass("cast", gradient_byte, 2))
        ops += [
            self._make_pass("div", 2, 2, layout=Layout.BROADCAST),
            # Weight decay, and the sum of weight and update
            self._make_pass("scale", weight_byte, weight_byte),
            self._make_pass("add", weight_byte + 2, weight_byte, **transposed),
            # Copies of X, of which the first is transposed, and of A
            self._make_pass("copy", 2, 2, _ITERATIONS - 1),
            self._make_pass("copy", 2, 2, **transposed),
            self._make_pass("copy", 2, 2, _ITERATIONS, elements=m * m),
        ]
        # XXᵀ, AA and (bA + cA²)X
        for sizes in ((m, m, n), (m, m, m), (m, n, m)):
            product = Linear(
                *sizes,
                dtype=Dtype.BF16,
                count=_ITERATIONS,
                label="newton-schulz",
            )
            ops.append(product)
        return ops

    @property
    def _short_side(self) -> int:
        return min(self.rows, self.columns)

    @property
    def _long_side(self) -> int:
        return max(self.rows, self.columns)

    def _make_pass(
        self,
        function: str,
        read_byte: float,
        written_byte: float,
        times: int = 1,
        elements: int | None = None,
        result_byte: int | None = None,
        **layout: Any,
    ) -> Operator:
        """Return ``times`` passes of a pointwise ``function`` over the matrix.

        ``read_byte`` and ``written_byte`` count for each element. A pass may go over fewer
        ``elements`` than the matrix has, or write ``result_byte`` in all. ``layout`` stands for the
        fields of ``Elementwise`` that describe the walk through memory.
        """
        if elements is None:
            elements = self.rows * self.columns
        if result_byte is None:
            result_byte = int(elements * written_byte)
        operands = 2 if function == "add" else 1
        is_fp32 = max(read_byte / operands, written_byte) > 2
        return Elementwise(
            function,
            elements,
            dtype=Dtype.FP32 if is_fp32 else self.recipe.dtype,
            read=int(elements * read_byte),
            write=result_byte,
            count=times,
            label="optimiser",
            **layout,
        )
