"""Graph -> Kernels."""

from wattcast.kernels.kernel_table import (
    Kernels,
    LibraryStyle,
    ReferenceChip,
    RunCondition,
)
from wattcast.kernels.lowering import (
    build_kernels,
    lower_graph,
    lower_graphs,
    reference_chip,
)

__all__ = [
    "Kernels",
    "LibraryStyle",
    "ReferenceChip",
    "RunCondition",
    "build_kernels",
    "lower_graph",
    "lower_graphs",
    "reference_chip",
]
