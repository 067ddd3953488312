"""Count what the optimiser of a training step computes on a GPU."""

from __future__ import annotations

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

NEWTON_SCHULZ = WORKLOADS.muon_iterations


def optimiser_graph(
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
) -> Graph:
    """Return the optimiser's work on the weights that one GPU updates.

    A fused optimiser passes once over weights, gradients and state: AdamW with fp32 masters reads
    gradient, master and two moments, and writes those but the gradient, and the weight. Weights of
    fp8 products are written in fp8 as well, in both orders. Muon updates the matrices of layers
    operator by operator, AdamW all else; Adafactor all matrices so. GPUs that share the state take
    a share of the matrices.
    """
    is_whole = strategy.sharding is Sharding.NONE
    copies = 1 if is_whole else strategy.dp * strategy.cp
    expert_copies = 1 if is_whole else strategy.expert_dp
    shared_weights = 0  # of one fused pass
    expert_weights = 0
    updates: list[Operator] = []
    for section in work.sections:
        shared_weights += (section.trained - section.expert_trained) * section.repeat
        expert_weights += section.expert_trained * section.repeat
        if not _updates_matrices(section, recipe):
            continue
        for many, rows, columns in section.matrices:
            elements = many * rows * columns * section.repeat
            if many > 1:
                expert_weights -= elements
                owners = expert_copies
            else:
                shared_weights -= elements
                owners = copies
            times = max(round(many * section.repeat / strategy.pp / owners), 1)
            ops = _MatrixUpdate(recipe, rows, columns).list_operators()
            updates += [replace(op, count=op.count * times) for op in ops]

    weights = shared_weights / copies + expert_weights / expert_copies
    block = _fused_pass(max(int(weights / strategy.pp), 1), recipe)
    return Graph("optimiser", (block, Block(tuple(updates), 1)) if updates else (block,))


def _updates_matrices(section: SectionWork, recipe: TrainingRecipe) -> bool:
    """Whether the matrices of a section are updated operator by operator."""
    is_muon = recipe.optimizer is Optimizer.MUON and section.is_layer
    return is_muon or recipe.optimizer is Optimizer.ADAFACTOR


def _fused_pass(weights: int, recipe: TrainingRecipe) -> Block:
    """Return one pass over weights, gradients and state."""
    byte = recipe.dtype.byte
    # Muon leaves what is no matrix of a layer to AdamW
    is_muon = recipe.optimizer is Optimizer.MUON
    pass_recipe = replace(recipe, optimizer=Optimizer.ADAMW) if is_muon else recipe
    state_byte = pass_recipe.state_byte
    read = recipe.gradient_byte + state_byte + (0 if recipe.has_masters else byte)
    written = state_byte + byte + recipe.narrow_byte
    dtype = Dtype.FP32 if recipe.has_masters else recipe.dtype
    return optimiser_block(weights, dtype, read, written)


@dataclass(frozen=True)
class _MatrixUpdate:
    """The operators that update a matrix, each a pass over its elements or a product."""

    recipe: TrainingRecipe
    rows: int
    columns: int

    def list_operators(self) -> list[Operator]:
        """Return the operators in the order in which they run."""
        recipe = self.recipe
        ops: list[Operator] = []
        if recipe.has_masters or recipe.narrow:
            ops.append(self._walk("cast", 4, recipe.dtype.byte + recipe.narrow_byte))
        if recipe.optimizer is Optimizer.ADAFACTOR:
            return [*ops, *self._list_adafactor()]
        return [*ops, *self._list_muon()]

    def _list_adafactor(self) -> list[Operator]:
        """Return the operators of Adafactor (``transformers.Adafactor``, without a first moment).

        It works in fp32: it squares the gradient, averages squares by rows and columns, divides the
        gradient by the root of their product, a matrix made of a row and a column, then by its
        norm, a number that the GPU holds, scales, and adds; twelve steps more work on rows, columns
        and norms only.
        """
        byte = self.recipe.dtype.byte
        has_masters = self.recipe.has_masters
        has_narrow_gradient = self.recipe.gradient_byte < 4
        ops: list[Operator] = []
        if has_narrow_gradient or not has_masters:
            ops.append(self._walk("cast", byte, 4, has_narrow_gradient + (not has_masters)))
        ops += [
            self._walk("scale", 4, 4, 4),
            self._walk("add", 8, 4, 2),
            self._walk("abs", 4, 0, 3),
            self._walk(
                "scale",
                4,
                4,
                12,
                size=self._long_side,
            ),
            self._walk(
                "mean",
                4,
                0,
                written=4 * self.columns,
                layout=Layout.TRANSPOSED,
            ),
            self._walk("mul", 0, 4, layout=Layout.BROADCAST),
            self._walk("div", 4, 4, layout=Layout.BROADCAST),
        ]
        if not has_masters:
            ops.append(self._walk("cast", 4, byte))
        return ops

    def _list_muon(self) -> list[Operator]:
        """Return the operators of Muon (``torch.optim.Muon``).

        It updates the moment, makes it orthogonal by five Newton-Schulz iterations
        X <- aX + (bA + cA²)X with A = XXᵀ, 4m²n + 2m³ operations each in bf16 for sides m <= n
        [Jordan2024], and adds it to the weight. Products that add to a matrix copy it first. A tall
        matrix is transposed in place: its first copy and the last sum cross it against the order in
        memory.
        """
        m = self._short_side
        n = self._long_side
        gradient = self.recipe.gradient_byte
        weight = 4 if self.recipe.has_masters else self.recipe.dtype.byte
        moment = STATE_BYTE[Optimizer.MUON] * weight / 4
        crossed: dict[str, Any] = {}
        if self.rows > self.columns:
            crossed = {
                "layout": Layout.TRANSPOSED,
                "rows": n,
                "run": 1,
            }
        ops: list[Operator] = [
            self._walk("add", gradient + moment, moment),
            self._walk("add", gradient + moment, gradient),
            self._walk("abs", 2, 0),
        ]
        if gradient > 2:
            ops.append(self._walk("cast", gradient, 2))
        ops += [
            self._walk("div", 2, 2, layout=Layout.BROADCAST),
            self._walk("scale", weight, weight),
            self._walk("add", weight + 2, weight, **crossed),
            self._walk("copy", 2, 2, NEWTON_SCHULZ - 1),
            self._walk("copy", 2, 2, **crossed),
            self._walk(
                "copy",
                2,
                2,
                NEWTON_SCHULZ,
                size=m * m,
            ),
        ]
        for sizes in ((m, m, n), (m, m, m), (m, n, m)):
            label = "newton-schulz"
            ops.append(
                Linear(
                    *sizes,
                    dtype=Dtype.BF16,
                    count=NEWTON_SCHULZ,
                    label=label,
                )
            )
        return ops

    @property
    def _short_side(self) -> int:
        return min(self.rows, self.columns)

    @property
    def _long_side(self) -> int:
        return max(self.rows, self.columns)

    def _walk(
        self,
        function: str,
        read: float,
        write: float,
        times: int = 1,
        size: int = 0,
        written: int = 0,
        **layout: Any,
    ) -> Operator:
        """Return a pass over the elements that reads and writes so many bytes of each."""
        elements = size or self.rows * self.columns
        operands = 2 if function == "add" else 1
        is_wide = max(read / operands, write) > 2
        return Elementwise(
            function,
            elements,
            dtype=Dtype.FP32 if is_wide else self.recipe.dtype,
            read=int(elements * read),
            write=written or int(elements * write),
            count=times,
            label="optimiser",
            **layout,
        )
