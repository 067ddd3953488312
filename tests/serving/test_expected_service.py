"""What is expected of a service: figures by load, and intervals that hold what was measured."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wattcast.core.errors import WattcastError
from wattcast.serving.capacity_plan import plan
from wattcast.serving.deployment.expected_service import (
    FIGURES,
    ExpectedService,
    expect_service,
    find_level,
    parse_expected,
    widen_figure,
)
from wattcast.serving.deployment.write_deployment import write_expected
from wattcast.serving.serving_intervals import INTERVALS

# simulated over measured, of the held-out traffic runs of the ledger
ERRORS_FILE = Path(__file__).with_name("traffic_errors.csv")
COLUMNS = {
    "ttft": "ttft_p50",
    "ttft_tail": "ttft_p99",
    "tpot": "tpot_p50",
    "tpot_tail": "tpot_p99",
    "throughput": "throughput",
    "power": "power",
    "energy": "energy_per_token",
}


@pytest.fixture(scope="module")
def expected() -> ExpectedService:
    found = plan(
        "llama3-8b", "h200", rate="6/s", prompt=512, output=64, tpot="50ms", tp=(1,), requests=100
    )
    return expect_service(found.best, "llama3-8b")


@pytest.mark.parametrize("name", COLUMNS)
def test_intervals_hold_what_was_measured(name: str) -> None:
    """Nine in ten of 29 runs are 26 of them."""
    with ERRORS_FILE.open(encoding="utf-8") as stream:
        ratios = [float(row[COLUMNS[name]]) for row in csv.DictReader(stream)]
    assert len(ratios) == 29
    half = getattr(INTERVALS, name)
    inside = sum(abs(math.log(ratio)) <= half for ratio in ratios)
    assert inside == 26


def test_levels_rise_with_the_load(expected: ExpectedService) -> None:
    rates = [level.rate_per_s for level in expected.levels]
    assert rates == sorted(rates)
    for name in ("tpot_mean_s", "power_w", "output_tokens_per_s"):
        values = [level.figures[name].value for level in expected.levels]
        assert values[-1] > values[0]
    planned = expected.traffic.rate_per_s / expected.replicas
    assert find_level(expected.levels, planned).rate_per_s == pytest.approx(planned, rel=1e-3)


def test_every_figure_has_an_interval_around_it(expected: ExpectedService) -> None:
    for level in expected.levels:
        assert set(level.figures) == set(FIGURES)
        for figure in level.figures.values():
            assert 0.0 < figure.low < figure.value < figure.high


def test_intervals_add_their_parts_as_squares() -> None:
    draws = np.array([0.9, 1.0, 1.1])
    figure = widen_figure(draws, 0.3, (math.exp(-0.4), math.exp(0.4)))
    seeds = 1.645 * draws.std()
    assert math.log(figure.high) == pytest.approx(math.sqrt(0.25 + seeds**2))
    assert figure.value == pytest.approx(1.0)


def test_the_file_is_read_as_it_was_written(expected: ExpectedService) -> None:
    text = write_expected(expected)
    assert write_expected(parse_expected(text.encode(), "expected.json")) == text


def test_a_damaged_file_names_the_field(expected: ExpectedService) -> None:
    text = write_expected(expected).replace('"replicas": 1', '"replicas": "one"')
    with pytest.raises(WattcastError, match="replicas"):
        parse_expected(text.encode(), "expected.json")


def test_mean_lengths_are_those_of_the_distribution() -> None:
    """Means of the few requests that a plan simulates were up to a tenth off, so that a check found
    longer prompts where there were none, and simulated them."""
    shape = "lognormal:median=800,sigma=0.6,least=16,most=8000"
    words: Any = {"rate": "2/s", "prompt": shape, "output": 8, "tp": (1,), "requests": 50}
    traffic = expect_service(plan("gpt2", "h200", force=True, **words).best, "gpt2").traffic
    assert traffic.mean_prompt_tokens == pytest.approx(800 * math.exp(0.18), rel=0.015)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("replicas",), 0),
        (("levels",), []),
        (("levels", 0, "rate_per_s"), 0.0),
        (("levels", 0, "figures"), {}),
        (("replica", "dp"), 0),
        (("replica", "max_seqs"), -1),
        (("traffic", "mean_prompt_tokens"), 0.0),
        (("capacity_per_replica_per_s",), -3.0),
        (("form",), 2),
    ],
)
def test_impossible_values_are_refused(
    expected: ExpectedService, place: tuple[str | int, ...], value: object
) -> None:
    """A check divides by most of them."""
    plain = json.loads(write_expected(expected))
    part = plain
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(WattcastError, match=r"expected\.json"):
        parse_expected(json.dumps(plain).encode(), "expected.json")
