"""The plan: every family early, no operator twice, the same on every machine, and each one an
operator we know.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from wattcast.core.errors import BadInput
from wattcast.lab.campaigns.database_files import make_workload_form
from wattcast.lab.campaigns.kernel_campaign import (
    PATTERNS,
    SUSTAINED,
    choose_sustained,
    is_likely_capped,
    spread_evenly,
    write_listed,
)
from wattcast.lab.campaigns.kernel_plan import (
    LARGEST_BYTE,
    LONGEST_S,
    read_kernel_plan,
    take_subset,
)
from wattcast.lab.campaigns.kernel_plan_draws import (
    draw_kernel_plan,
    read_convolutions,
    read_transformers,
)
from wattcast.lab.campaigns.measuring_agreement import choose_known_loads
from wattcast.lab.campaigns.nsight_counters import choose_counted_specs
from wattcast.workload.operator_base import load_functions
from wattcast.workload.readers.from_json import parse_workload

FAMILIES = {
    "linear",
    "bmm",
    "conv2d",
    "softmax",
    "layernorm",
    "rmsnorm",
    "elementwise",
    "attention",
}


def test_the_plan_is_the_same_every_time() -> None:
    assert list(read_kernel_plan()) == draw_kernel_plan()
    assert (
        read_kernel_plan()[0].id == "12855c7cd8328e85"
    )  # rows on file carry these ids: a changed plan must be a new plan


def test_rounds_of_the_plan_share_no_operator() -> None:
    first, second, third = ({spec.id for spec in read_kernel_plan(number)} for number in (1, 2, 3))
    assert not first & second
    assert not third & (first | second)
    assert min(len(second), len(third)) > 3400
    assert {spec.family for spec in read_kernel_plan(2)[:60]} == FAMILIES


def test_no_operator_stands_twice_and_none_is_too_long() -> None:
    specs = read_kernel_plan()
    assert len({spec.id for spec in specs}) == len(specs) >= 3500
    assert max(spec.guessed_s for spec in specs) <= LONGEST_S
    assert max(spec.byte for spec in specs) <= LARGEST_BYTE


def test_a_campaign_cut_short_has_every_family() -> None:
    assert {spec.family for spec in read_kernel_plan()[:60]} == FAMILIES


def test_what_the_campaign_must_cover_is_in_it() -> None:
    """Formats, layouts and forms of docs/method/measuring.md and the plan's own promise."""
    specs = read_kernel_plan()
    linear = {(s.operator["dtype"], s.operator["bias"]) for s in specs if s.family == "linear"}
    assert {
        (d, b) for d in ("bf16", "fp16", "fp32", "tf32", "fp8") for b in (True, False)
    } <= linear
    conv = [s.operator for s in specs if s.family == "conv2d"]
    assert {1, 3, 7} <= {o["r"] for o in conv}
    assert any(o["groups"] == o["c"] > 1 for o in conv)
    assert any(o["stride"] == 2 for o in conv)
    assert {o["channels_last"] for o in conv} == {True, False}
    assert any(s.operator["dim"] > 1024 for s in specs if s.family == "softmax")
    attention = [s.operator for s in specs if s.family == "attention"]
    assert {64, 96, 128} <= {o["head_dim"] for o in attention}
    assert any(o["q_len"] == 1 for o in attention)
    assert any(o["heads"] > o["kv_heads"] for o in attention)
    assert {o["causal"] for o in attention} == {True, False}
    elementwise = {s.operator["function"] for s in specs if s.family == "elementwise"}
    wanted = {
        "add",
        "mul",
        "scale",
        "gelu",
        "silu",
        "relu",
        "tanh",
        "exp",
        "cast",
        "copy",
        "cat",
        "gather",
        "sum",
    }
    assert wanted <= elementwise
    layouts = {s.layout for s in specs if s.family == "elementwise"}
    assert layouts == {"contiguous", "strided", "broadcast", "transposed"}
    assert any(s.operator["m"] % 8 for s in specs if s.family == "linear")


def test_every_operator_of_the_plan_is_one_of_ours() -> None:
    operators = [make_workload_form(spec.operator) for spec in read_kernel_plan()]
    graph = parse_workload(json.dumps({"name": "plan", "ops": operators}).encode(), "plan")
    assert len(list(graph.calls())) == len(operators)
    assert {o["op"] for o in operators} & set(load_functions())


def test_planning_estimates_follow_the_operators() -> None:
    """The plan's own flop count, kept apart from the workload's, must be the same arithmetic."""
    for spec in read_kernel_plan()[:400]:
        (op,) = [
            o
            for o, _ in parse_workload(
                json.dumps({"name": "x", "ops": [make_workload_form(spec.operator)]}).encode(), "x"
            ).calls()
        ]
        if spec.family in ("linear", "bmm"):
            assert spec.flop == op.flop
        if spec.family == "attention":
            assert spec.flop == pytest.approx(op.flop_dense)


def test_subsets_serve_all_families_in_proportion() -> None:
    chosen_specs = take_subset(read_kernel_plan(), SUSTAINED, choose_sustained)
    assert Counter(s.family for s in chosen_specs) == SUSTAINED
    assert {s.family for s in chosen_specs[:40]} == FAMILIES
    assert sum(PATTERNS.values()) >= 30
    assert len([s for s in read_kernel_plan() if is_likely_capped(s)]) >= 60


def test_counted_operators_are_of_every_family_and_small_enough_to_replay() -> None:
    specs = choose_counted_specs()
    assert len(specs) >= 60
    assert {s.family for s in specs} == FAMILIES
    assert max(s.byte for s in specs) < 4e8


def test_a_list_may_say_what_is_counted(tmp_path: Path) -> None:
    wanted = [read_kernel_plan()[3], read_kernel_plan()[9]]
    write_listed(tmp_path / "list.jsonl", [(spec, {}) for spec in wanted])
    assert [s.id for s in choose_counted_specs(listed=str(tmp_path / "list.jsonl"))] == [
        s.id for s in wanted
    ]
    with pytest.raises(BadInput, match="no file"):
        choose_counted_specs(listed=str(tmp_path / "other.jsonl"))


def test_repeats_are_spread_over_the_run() -> None:
    specs = read_kernel_plan()[:100]
    again = spread_evenly(specs, 5)
    assert [specs.index(s) for s in again] == [0, 25, 50, 74, 99]
    assert spread_evenly(specs[:3], 5) == specs[:3]


def test_loads_for_checking_are_three_far_apart() -> None:
    assert [s.family for s in choose_known_loads()] == ["linear", "attention", "elementwise"]


def test_model_dimensions_name_their_source() -> None:
    assert all(row["source"] for row in [*read_transformers(), *read_convolutions()])
    assert all(int(row["heads"]) % int(row["kv_heads"]) == 0 for row in read_transformers())
