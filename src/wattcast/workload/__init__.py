"""What is asked of a GPU: operators with shapes and dtypes, from models, captures and files."""

from wattcast.workload.build import build
from wattcast.workload.graph import Block, Graph, Operator
from wattcast.workload.options import AttentionMode, Head, Options, Phase, Stack

__all__ = ["AttentionMode", "Block", "Graph", "Head", "Operator", "Options", "Phase", "Stack", "build"]
