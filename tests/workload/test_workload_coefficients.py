"""What engines and frameworks run where neither a workload nor its options say it."""

from __future__ import annotations

from types import SimpleNamespace

from wattcast.options.training_options import TrainingRecipe
from wattcast.training.microbatch import trace_microbatch
from wattcast.workload.build_model import WORKSPACE_BYTE, build_graph
from wattcast.workload.engine_operators import PagedAttention
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.models.sparse_layers import _count_shared_launches
from wattcast.workload.operator_types import Bmm

# Operators of a shared expert, as PyTorch and vLLM name them
EAGER = ("gate_proj", "up_proj", "act_fn", "mul", "down_proj")
ENGINE = ("gate_up_proj", "silu_and_mul", "down_proj")
# What PyTorch's notes say of CUBLAS_WORKSPACE_CONFIG on Hopper: eight buffers of 4,096 KiB
HOPPER_WORKSPACE = ":4096:8"


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


def test_a_shared_expert_launches_the_operators_of_its_module() -> None:
    eager, engine = (SimpleNamespace(engine=engine, recipe=None) for engine in (False, True))
    assert _count_shared_launches(eager) == len(EAGER)
    assert _count_shared_launches(engine) == len(ENGINE)


def test_a_graph_counts_the_workspace_that_pytorch_configures_on_hopper() -> None:
    kib, buffers = (int(number) for number in HOPPER_WORKSPACE.strip(":").split(":"))
    assert 1024 * kib * buffers == WORKSPACE_BYTE


def test_rows_of_trained_experts_come_in_whole_blocks_of_32() -> None:
    """A block of MXFP8 shares its scale among 32 values (OCP Microscaling v1.0): experts of 62 and of
    63 rows compute 64.
    """
    work = trace_microbatch(load_model("qwen3-30b-a3b"), TrainingRecipe(), 1, 1000)
    ops = [op for section in work.sections for op in section.forward]
    rows = {op.m for op in ops if isinstance(op, Bmm)}
    assert rows
    assert all(count % 32 == 0 for count in rows)
    assert max(rows) - 1000 * 8 / 128 < 32
