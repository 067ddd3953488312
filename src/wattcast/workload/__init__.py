"""Workloads: the operators a GPU has to run, with shapes and number formats, from models, captures
and files.
"""

from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_options import (
    AttentionMode,
    ModelOptions,
    OutputHead,
    SoftwareStack,
    WorkloadPhase,
)
from wattcast.workload.operator_base import Operator

__all__ = [
    "AttentionMode",
    "Block",
    "Graph",
    "ModelOptions",
    "Operator",
    "OutputHead",
    "SoftwareStack",
    "WorkloadPhase",
    "build_graph",
]
