"""Runs that a host holds up, of public sets and of engines, asked of ``predict``."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf

import numpy as np
import pytest

import wattcast
from wattcast.core.strict_files import reference_folder
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.lab.fit.engine_host_times import LARGEST_GRAPH, learn_host_factor
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.fit.random_routing import find_skew, load_visited_shares
from wattcast.lab.validate.engine_commands import make_engine_rows
from wattcast.lab.validate.public_checks.coverage_checks import ModelSet, load_model_sets
from wattcast.lab.validate.public_checks.learn_distances import (
    ask_host_factor,
    learn_host,
    load_named_runs,
    widen_to_hosts,
)
from wattcast.lab.validate.typed_commands import JudgedRow, judge_rows
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.support_widening import learned_distances
from wattcast.predictor.timeline import compute_latency_s

REFERENCE = reference_folder(os.environ)
needs_reference = pytest.mark.skipif(REFERENCE is None, reason="no reference data")
FACTORS = np.geomspace(0.3, 3.0, 80)


# Of the 434 runs those that a host holds up take at most 33 ms.
HELD_UP_S = 0.04


@pytest.fixture(
    scope="module", params=[HELD_UP_S, pytest.param(np.inf, marks=pytest.mark.slow)], ids=str
)
def named_runs(request: pytest.FixtureRequest) -> tuple[ModelSet, ...]:
    assert REFERENCE is not None
    return load_named_runs(REFERENCE, request.param)


def select_held_up(some: ModelSet) -> list[int]:
    """Select the runs that would be a tenth faster with half the host's time."""
    places = []
    for place, p in enumerate(some.predictions):
        line, kernel_s = p.basis.timeline, p.basis.detail.kernel_s
        if compute_latency_s(line.scale_host(0.5), kernel_s) < 0.9 * p.latency_s:
            places.append(place)
    return places


@needs_reference
def test_intervals_hold_hosts_that_nobody_told(named_runs: tuple[ModelSet, ...]) -> None:
    """An assumed host of 16.8 us an operator left 71 % of an A100's runs inside; hosts of cards
    before Ada are slower.
    """
    inside: dict[str, list[bool]] = {"latency": [], "power": []}
    for some in named_runs:
        for place in select_held_up(some):
            interval = some.predictions[place].interval
            ends = {"latency": interval.latency_s, "power": interval.power_w}
            for quantity, (low, high) in ends.items():
                inside[quantity].append(low <= some.measured[quantity][place] <= high)
    assert len(inside["latency"]) >= 60
    for quantity, which in inside.items():
        assert 0.82 <= round(float(np.mean(which)), 2) <= 0.97, quantity


@needs_reference
def test_a_host_that_is_told_meets_its_other_models(named_runs: tuple[ModelSet, ...]) -> None:
    """The cost of an operator is learned from the other models that ran on the same host. They were
    12.1 % off: a layer cost too little beside its operators, and OPT's as much as GPT-2's. One run in
    four is slower than the others of its model by a quarter.
    """
    errors: list[float] = []
    for some in named_runs:
        places = select_held_up(some)
        measured_s = some.measured["latency"][places]
        models = np.array([some.predictions[place].name.split()[0] for place in places])
        table_s = np.array([_list_latencies(some, place) for place in places])
        for model in dict.fromkeys(models.tolist()):
            own = models == model
            off = np.abs(np.log(table_s[~own] / measured_s[~own, np.newaxis])).mean(axis=0)
            errors += np.abs(table_s[own, off.argmin()] / measured_s[own] - 1.0).tolist()
    assert 100.0 * np.mean(errors) < 12.0


def _list_latencies(some: ModelSet, place: int) -> list[float]:
    """List the latency of a run for each of ``FACTORS`` on the host's time."""
    basis = some.predictions[place].basis
    kernel_s = basis.detail.kernel_s
    return [float(compute_latency_s(basis.timeline.scale_host(f), kernel_s)) for f in FACTORS]


@needs_reference
def test_shipped_spreads_of_hosts_are_the_learned_ones(named_runs: tuple[ModelSet, ...]) -> None:
    _, launched = load_model_sets("h200")
    own = learn_host([*named_runs, launched])
    hosts = widen_to_hosts(own, "h200")
    shipped = learned_distances()
    assert own.rows == shipped.own_host.rows
    for learned, kept in ((own, shipped.own_host), (hosts, shipped.host)):
        assert round(abs(kept.low - learned.low), 2) <= 0.02
        assert round(abs(kept.high - learned.high), 2) <= 0.02


def test_a_row_that_no_host_bounds_asks_for_none() -> None:
    p = wattcast.predict("llama3-8b", "h200", stack="eager", batch=8, seq=2048)
    assert ask_host_factor(p, p.latency_s) is None


def _list_prefills() -> list[JudgedRow]:
    """List held-out steps with prompts, each asked of its card's board where that was read."""
    records = load_engine_records("h200")
    labels = {True: "held out"}
    rows = {row.name: row for row in make_engine_rows(records, "h200", labels)}
    for board in list_boards("h200"):
        rows |= {row.name: row for row in make_engine_rows(records, "h200", labels, board)}
    return [row for row in rows.values() if "prefill" in row.where]


def test_prompts_of_engines_through_predict() -> None:
    """Held-out models: 6 % in time and 3 % in power. Mixtures, whose hosts differ by a third from
    process to process and whose random weights choose few experts, are 11 % off in time.
    """
    off, mixed = _judge_prefills(_list_prefills())
    assert off["latency"].mean() < 6.0
    assert off["power"].mean() < 3.0
    assert off["latency"][mixed].mean() < 11.5
    if off["latency"][mixed].mean() > 10.0:
        pytest.xfail("the goal of mixtures is 10 %: hosts differ, and so does routing (see below)")


@pytest.mark.parametrize(
    ("longest", "count"),
    [pytest.param(LARGEST_GRAPH, 9, id="in-graphs"), pytest.param(inf, 40, id="at-every-length")],
)
def test_prompts_whose_routing_is_told(longest: float, count: int) -> None:
    """Tokens of a prompt visit few experts on random weights, in some models: 256 tokens of
    qwen1.5-moe-a2.7b came out 30 and 49 % slow. Steps in graphs take as long as reading the visited
    experts does, which a simulation of the weights counts and ``--skew`` tells; a user has one
    ``--skew`` of a model for prompts of all lengths.
    """
    shares = load_visited_shares()
    told = []
    for row in _list_prefills():
        options = dict(row.command.options)
        model = row.name.rpartition(": ")[2].partition("/")[0]
        if model in shares and options["batch"] * options["seq"] <= longest:
            options["skew"] = round(find_skew(load_measured_model(model).dims, shares[model]), 4)
        told.append(replace(row, command=replace(row.command, options=options)))
    assert sum("skew" in row.command.options for row in told) == count
    off, mixed = _judge_prefills(told)
    assert off["latency"].mean() < 6.0
    assert off["power"].mean() < 3.0
    assert off["latency"][mixed].mean() < 10.0


@pytest.mark.slow
def test_prompts_of_engines_whose_host_is_told() -> None:
    """``--host-launch`` tells the host of an engine too. Learned from the other models that ran on
    the same host, it brings mixtures within 10 %.
    """
    records = load_engine_records("h200")
    measured = {row["id"]: row for row in records.rows}
    usual_s = float(np.mean(bundle_for(wattcast.load_gpu("h200")).launch.host_s_per_operator))
    told = []
    for row in _list_prefills():
        run = measured[row.name.rpartition(": ")[2]]
        factor = learn_host_factor(records, run["card_uuid"], run["model"])
        options = dict(row.command.options)
        if factor is not None:
            options["host_launch"] = f"{1e6 * factor * usual_s:.3f} us"
        told.append(replace(row, command=replace(row.command, options=options)))
    assert sum("host_launch" in row.command.options for row in told) == 137
    off, mixed = _judge_prefills(told)
    assert off["latency"].mean() < 6.0
    assert off["power"].mean() < 3.0
    assert off["latency"][mixed].mean() < 10.0


def _judge_prefills(rows: list[JudgedRow]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return how far each row is off in percent, by quantity, and which are mixtures."""
    predicted = judge_rows(rows)
    assert len(rows) == 143
    off = {
        quantity: np.array(
            [
                100.0 * abs(one[quantity] / row.measured[quantity] - 1.0)
                for row, one in zip(rows, predicted, strict=True)
            ]
        )
        for quantity in ("latency", "power")
    }
    models = [row.name.rpartition(": ")[2].partition("/")[0] for row in rows]
    mixed = np.array([bool(getattr(load_measured_model(m).dims, "experts", 0)) for m in models])
    return off, mixed
