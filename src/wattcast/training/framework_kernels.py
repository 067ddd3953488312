"""Count the kernels that training frameworks run beside a model's own arithmetic.

They are those of Megatron-LM: around the products of experts (``core/transformer/moe/experts.py``,
``core/fusions/fused_bias_geglu.py``), and for the rotary embedding of a model with YaRN's factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.core import Dtype
from wattcast.options.training_options import TrainingRecipe
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Layout

FP32_BYTE = Dtype.FP32.byte
_LIMITS = 3  # of a gate and of the half that it weighs


@dataclass(frozen=True)
class FrameworkKernels:
    """The kernels that frameworks run beside the arithmetic of experts and of attention."""

    recipe: TrainingRecipe
    rows: int = 0  # hidden elements of all rows of experts
    inner: int = 0  # elements inside the experts
    label: str = "experts"

    def move_rows(self) -> list[Operator]:
        """Cast rows to fp8, sort them by expert and pad them to whole blocks."""
        byte = self.recipe.dtype.byte
        fp8 = self.recipe.narrow
        times = fp8 + (2 + 2 * fp8) * self.recipe.expert_copies
        return (
            [
                self._walk(
                    "copy",
                    self.rows,
                    byte,
                    byte,
                    times,
                )
            ]
            if times
            else []
        )

    def clamp_gates(self) -> list[Operator]:
        """Clamp both halves of a gate with limits, and join them again."""
        byte = self.recipe.dtype.byte
        return [
            self._walk(
                "scale",
                self.inner,
                byte,
                byte,
                2,
                Layout.STRIDED,
            ),
            self._walk("cat", 2 * self.inner, byte, byte),
        ]

    def clamp_gate_gradients(self) -> list[Operator]:
        """Do the same with the gradients.

        The gate has an upper limit and the other half has two: each comparison writes a byte, and
        a gradient is picked by them [PyTorch, ``clamp_backward``].
        """
        byte = self.recipe.dtype.byte
        return [
            self._walk("compare", self.inner, byte, 1, _LIMITS, Layout.STRIDED),
            self._walk("mul", self.inner, 2, 1, dtype=Dtype.BOOL),
            self._walk("where", self.inner, byte + 1, byte, 2, Layout.STRIDED),
            self._walk("cat", 2 * self.inner, byte, byte),
        ]

    def add_biases(self) -> list[Operator]:
        """Add the last bias expert by expert to rows of a weight."""
        byte = self.recipe.dtype.byte
        return [
            self._walk(
                "mul",
                self.rows,
                0,
                FP32_BYTE,
                1,
                Layout.BROADCAST,
            ),
            self._walk("add", self.rows, byte + FP32_BYTE, FP32_BYTE),
            self._walk("cat", self.rows, FP32_BYTE, FP32_BYTE),
            self._walk("cast", self.rows, FP32_BYTE, byte),
        ]

    def add_bias_gradients(self) -> list[Operator]:
        """Do the same with the gradients of rows, of the biases and of the weights."""
        byte = self.recipe.dtype.byte
        return [
            self._walk("cast", self.rows, byte, FP32_BYTE),
            self._walk("cast", self.rows, FP32_BYTE, byte),
            self._walk("cat", self.rows, byte, byte),
            self._walk(
                "mul",
                self.rows,
                FP32_BYTE,
                FP32_BYTE,
                2,
                Layout.BROADCAST,
            ),
            self._walk(
                "scale",
                self.rows,
                FP32_BYTE,
                0,
                2,
            ),
        ]

    def sum_bias_gradients(self) -> list[Operator]:
        """Sum the gradients of biases that products add: rows are read once more."""
        return [self._walk("sum", self.rows, self.recipe.dtype.byte, 0)]

    def turn_rows(self, elements: int) -> list[Operator]:
        """Turn queries or keys by angles whose sines and cosines have a factor.

        Transformer Engine's kernel takes none, so that each step is a kernel of its own: x·cos,
        the halves swapped and one of them negated, times sin, the sum, joined with the part that
        is not turned [Megatron-LM, ``rope_utils.py``, ``apply_rotary_pos_emb``].
        """
        byte = self.recipe.dtype.byte
        narrow = self.recipe.dtype
        return [
            self._walk("mul", elements, byte, byte, 2, Layout.BROADCAST),
            self._walk("scale", elements // 2, byte, byte, 1, Layout.STRIDED),
            self._walk("cat", elements, byte, byte, 2),
            self._walk("add", elements, 2 * byte, byte, dtype=narrow),
        ]

    def turn_row_gradients(self, elements: int) -> list[Operator]:
        """Do the same with the gradients, beyond their products with sines and cosines."""
        byte = self.recipe.dtype.byte
        narrow = self.recipe.dtype
        return [
            self._walk("scale", elements // 2, byte, byte, 1, Layout.STRIDED),
            self._walk("cat", elements, byte, byte),
            self._walk("add", elements, 2 * byte, byte, 2, dtype=narrow),
            self._walk("fill", elements, 0, byte, 2),
            self._walk("copy", elements, byte, byte),
        ]

    def _walk(
        self,
        function: str,
        elements: int,
        read: float,
        write: float,
        times: int = 1,
        layout: Layout = Layout.CONTIGUOUS,
        dtype: Dtype | None = None,
    ) -> Operator:
        """Return a pass over the elements that reads and writes so many bytes of each."""
        is_wide = max(read, write) > self.recipe.dtype.byte
        return Elementwise(
            function,
            elements,
            dtype=dtype or (Dtype.FP32 if is_wide else self.recipe.dtype),
            layout=layout,
            read=int(elements * read),
            write=int(elements * write),
            count=times,
            label=self.label,
        )
