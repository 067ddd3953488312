"""What engines and frameworks run where neither a workload nor its options say it."""

from __future__ import annotations

from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.model_options import ModelOptions


def find_splits(batch: int) -> int:
    """Return the parts that attention in a decode step of llama3-8b may cut a sequence into."""
    options = ModelOptions.from_names(phase="decode", batch=batch, seq=512, stack="engine")
    graph = build_graph("llama3-8b", options)
    ops = [op for block in graph.blocks for op in block.ops]
    return next(op.splits for op in ops if isinstance(op, PagedAttention))


def test_a_step_of_400_sequences_replays_a_graph_and_one_of_640_does_not() -> None:
    """vLLM captures steps of up to 512 tokens; in them the parts of a sequence are fixed."""
    assert find_splits(400) > 0
    assert find_splits(640) == 0


def test_parts_in_a_graph_leave_a_lone_sequence_a_quarter_of_an_h200s_sms_for_each_head() -> None:
    assert 0.2 < find_splits(1) / 132 < 0.3
