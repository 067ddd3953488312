"""Experts that tokens of a prompt visit in networks on random weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.lab.fit.random_routing import (
    TOKENS,
    count_visited_experts,
    find_skew,
    load_visited_shares,
)
from wattcast.workload.engine_operators import FusedExperts

BUFFER = 2_000_000


def shrink_olmoe(**sizes: int):
    """Return a small model of many small experts, as OLMoE is."""
    small = {
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 4,
        "experts": 32,
        "experts_chosen": 4,
        "expert_intermediate": 128,
    }
    return replace(load_measured_model("olmoe-1b-7b").dims, **small | sizes)


def test_small_experts_let_tokens_grow_alike_and_a_large_shared_one_keeps_them_apart() -> None:
    """olmoe-1b-7b took less time than reading its experts would, deepseek-v2-lite did not."""
    alone = count_visited_experts(shrink_olmoe(), tokens=64, numbers=BUFFER)
    shared = shrink_olmoe(shared_intermediate=4096)
    beside = count_visited_experts(shared, tokens=64, numbers=BUFFER)
    assert len(alone) == len(beside) == 6
    assert alone[-1] < alone[0] - 0.1
    assert np.mean(beside[3:]) > np.mean(alone[3:]) + 0.1
    assert all(4 / 32 <= share <= 1.0 for share in [*alone, *beside])


def test_layers_without_experts_count_none() -> None:
    first, others = load_measured_model("ernie-4.5-21b-a3b").dims.groups
    dims = replace(shrink_olmoe(layers=3), groups=(first, replace(others, layers=2)))
    assert len(count_visited_experts(dims, 16, numbers=BUFFER)) == 2


@pytest.mark.parametrize("model", sorted(load_visited_shares()))
def test_a_skew_visits_as_many_experts_as_were_counted(model: str) -> None:
    dims = load_measured_model(model).dims
    visited = load_visited_shares()[model]
    experts = FusedExperts(
        TOKENS,
        dims.experts,
        dims.experts_chosen,
        dims.hidden,
        dims.expert_intermediate,
        skew=find_skew(dims, visited),
    )
    assert experts.active / dims.experts == pytest.approx(visited, abs=0.01)
