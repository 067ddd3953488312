"""What operators cost among others: found again where it is known, nothing where it must be, right
on the H200.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu
from wattcast.kernels import lower_graph
from wattcast.lab.fit.database_fit import (
    MeasuredLayers,
    collect_layers,
    fit_cold_cache,
    load_layers,
    predict_held_out_layers_s,
    predict_layers_s,
)
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.cold_cache import ColdCacheDelay, cold_cache_terms
from wattcast.predictor.pipeline import analyse_graph, analyse_graphs
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Linear, Softmax

GPU = load_gpu("h200")


def shipped() -> Bundle:
    found = shipped_bundle("h200")
    assert found is not None
    return found


def layered(*ops: Operator, repeat: int = 8) -> Graph:
    return replace(Graph.from_operators("some", list(ops)), blocks=(Block(ops, repeat, "layer"),))


def met(graph: Graph) -> np.ndarray:
    bundle = shipped()
    return cold_cache_terms(lower_graph(graph, GPU, bundle.reference), bundle.reference.l2_byte)[0]


SMALL, WIDE = Elementwise("add", 4096), Linear(16, 8192, 8192)  # 134 MB of weights


def test_small_operators_between_large_weights_are_met_cold() -> None:
    assert met(layered(SMALL, WIDE, Softmax(16, 4096))).tolist() == [1.0, 0.0, 1.0]


def test_what_fits_the_cache_stays_warm() -> None:
    assert met(layered(SMALL, Linear(16, 512, 512))).tolist() == [0.0, 0.0]
    assert met(layered(SMALL)).tolist() == [0.0]


def test_an_operator_larger_than_the_cache_is_as_cold_in_its_own_bursts() -> None:
    assert met(layered(Elementwise("add", 1 << 26), WIDE)).tolist() == [0.0, 0.0]


def test_a_block_that_runs_once_sees_the_whole_workload_pass() -> None:
    once, often = (
        Block((SMALL,), 1, "head"),
        Block((Linear(16, 2048, 2048),), 32, "layer"),
    )  # 8 MB a layer
    graph = replace(Graph.from_operators("some", [SMALL]), blocks=(often, once))
    assert met(graph).tolist() == [0.0, 1.0]
    assert met(replace(graph, blocks=(often, replace(once, repeat=2)))).tolist() == [0.0, 0.0]


def test_kernels_of_a_workload_take_so_many_seconds_more() -> None:
    law, graph = ColdCacheDelay(5e-7, 1e-13), layered(SMALL, WIDE)
    with_, without = (replace(shipped(), cold=cold) for cold in (law, None))
    for make in (
        lambda b: analyse_graph(graph, GPU, b),
        lambda b: analyse_graphs([graph, graph], GPU, b)[1],
    ):
        later, plain = make(with_), make(without)
        fixed = [phase.seconds for phase in later.phases if phase.cycles is None]
        before = [phase.seconds for phase in plain.phases if phase.cycles is None]
        byte = plain.kernels.work.l2_byte[0]
        np.testing.assert_allclose(
            np.sum(fixed, axis=0) - np.sum(before, axis=0), [5e-7 + 1e-13 * byte, 0.0]
        )


def test_a_law_is_found_again() -> None:
    true, random = ColdCacheDelay(4e-7, 8e-14, 40), np.random.default_rng(0)
    names = tuple(f"stack {'abcd'[i % 4]}-{i} decode 1 1" for i in range(40))
    alone_s, table = random.uniform(1e-5, 1e-3, 40), random.uniform(0.0, 1.0, (40, 2)) * [40.0, 1e8]
    bare = MeasuredLayers(names, alone_s, alone_s, np.full(40, 50.0), table)
    layers = replace(bare, layer_s=predict_layers_s(bare, true))
    assert fit_cold_cache(layers) == true
    np.testing.assert_allclose(predict_held_out_layers_s(layers), layers.layer_s, rtol=1e-9)


def test_layers_that_were_not_measured_whole_are_left_out() -> None:
    with pytest.raises(BadInput, match="--steps stack"):
        collect_layers(
            [{"name": "stack a-1 decode 1 1", "handed_on": True, "latency_s": 1e-4, "alone_s": []}],
            GPU,
        )


def test_a_database_without_layers_has_no_law(tmp_path: Path) -> None:
    assert load_layers(tmp_path, GPU) is None


def test_on_the_h200_the_law_explains_most_of_what_layers_take_more() -> None:
    layers = load_layers("h200", GPU)
    assert layers is not None
    assert len(set(layers.name)) >= 36
    assert shipped().cold == fit_cold_cache(layers)
    without, with_ = (
        np.abs(s / layers.layer_s - 1.0).mean()
        for s in (layers.alone_s, predict_held_out_layers_s(layers))
    )
    assert with_ < 0.5 * without


def test_a_bundle_keeps_its_law_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    bundles.write_bundle(shipped(), tmp_path / "bundle.json")
    assert bundles.read_bundle(tmp_path).cold == shipped().cold
    with pytest.raises(BadInput, match="zero or more"):
        ColdCacheDelay(-1e-7, 0.0)
