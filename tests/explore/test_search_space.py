"""The search-space language."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast import hardware
from wattcast.core.errors import WattcastError
from wattcast.explore import search_space

GPU = hardware.load_gpu("h200")


def values(text: str, **more) -> np.ndarray:
    return search_space.parse_space([text], GPU, **more).axes[0].values


def test_ranges_lists_and_units() -> None:
    assert values("clock=600MHz:645MHz:15MHz").tolist() == [600e6, 615e6, 630e6, 645e6]
    assert values("clock=600MHz:1980MHz:15MHz").size == 93
    assert values("l2.capacity=25MB,50MB").tolist() == [25e6, 50e6]
    assert values("memory.bandwidth=2TB/s:8TB/s:250GB/s").size == 25
    assert values("voltage=0.8:1.2:0.1") == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.2])


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("memory.bandwidth", "memory.byte_per_s"),
        ("Memory-Bandwidth", "memory.byte_per_s"),
        ("memory.byte_per_s", "memory.byte_per_s"),
        ("bandwidth", "memory.byte_per_s"),
        ("tdp", "asked_power_limit_w"),
        ("clock", "asked_clock_hz"),
        ("pipes.tensor_per_cycle_sm.bf16", "pipes.tensor_flop_per_cycle.bf16"),
    ],
)
def test_names_of_the_catalogue_and_short_ones(name: str, column: str) -> None:
    assert search_space.find_field(name, GPU).column == column


def test_every_field_of_the_chip_is_one_of_the_gpu() -> None:
    for field in search_space.list_fields(GPU).values():
        if field.kind is search_space.FieldKind.CHIP:
            changed = GPU.with_fields({field.column: [1.0, 2.0]})
            assert np.shape(changed.need(field.column)) == (2, 1)


def test_a_grid_is_every_combination_once_whatever_the_chunks() -> None:
    grid = search_space.parse_space(
        ["sm_count=64,128,132", "clock=600MHz,900MHz", "temperature=30C:50C:10C"], GPU
    )
    whole = grid.points(0, grid.size)
    rows = set(zip(*(column.tolist() for column in whole.values()), strict=True))
    assert len(rows) == grid.size == 18
    assert whole["temperature_c"][:3].tolist() == [30.0, 40.0, 50.0]
    parts = [grid.points(a, min(a + 5, 18)) for a in range(0, 18, 5)]
    for name, column in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), column)


@pytest.mark.parametrize("method", ["random", "sobol"])
@given(cut=st.integers(1, 9_999), seed=st.integers(0, 5))
def test_samples_do_not_depend_on_chunks_and_keep_their_seed(
    method: str, cut: int, seed: int
) -> None:
    if method == "sobol":
        pytest.importorskip("scipy")
    specs = ["clock=600MHz:1980MHz", "sm_count=64:192", "l2.capacity=25MB,50MB"]
    drawn = search_space.parse_space(specs, GPU, f"{method}:10000", seed)
    whole, first, rest = drawn.points(0, 10_000), drawn.points(0, cut), drawn.points(cut, 10_000)
    for name, column in whole.items():
        assert np.array_equal(np.concatenate([first[name], rest[name]]), column)
    assert ((whole["asked_clock_hz"] >= 600e6) & (whole["asked_clock_hz"] <= 1980e6)).all()
    assert (whole["sm_count"] % 1 == 0).all()
    assert set(whole["l2.capacity_byte"]) == {25e6, 50e6}
    other = search_space.parse_space(specs, GPU, f"{method}:10000", seed + 1)
    assert not np.array_equal(other.points(0, 100)["asked_clock_hz"], whole["asked_clock_hz"][:100])


def test_random_values_of_one_axis_have_a_seed() -> None:
    assert (
        values("clock=600MHz:1980MHz:random:5", seed=1).tolist()
        == values("clock=600MHz:1980MHz:random:5", seed=1).tolist()
    )
    assert (
        values("clock=600MHz:1980MHz:random:5", seed=1).tolist()
        != values("clock=600MHz:1980MHz:random:5", seed=2).tolist()
    )
    assert (values("sm_count=64:192:random:5") % 1 == 0).all()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("clok=1GHz:2GHz:15MHz", "Closest: clock"),
        ("memory.bandwith=1TB/s", "Closest: memory.bandwidth"),
        ("batch=1,2,4", "explore sweep"),
        ("clock", "name=values"),
        ("clock=", "name=values"),
        ("clock=1900MHz:600MHz:15MHz", "no values"),
        ("clock=600MHz:1900MHz:0MHz", "step above zero"),
        ("clock=600MHz:1900MHz:-5MHz", "step above zero"),
        ("clock=600:1900:15", "Hz"),
        ("clock=600MHz:9GHz:15MHz", "1.98 GHz"),
        ("clock=1MHz", "345 MHz"),
        ("clock=600MHz:1900MHz", "a step in a grid"),
        ("clock=600MHz,600MHz", "each value once"),
        ("clock=600MHz:1900MHz:15MHz:3", "low:high:step"),
        ("clock=nanMHz", "Hz"),
        ("sm_count=64.5", "whole numbers"),
        ("sm_count=0", "above zero"),
        ("sm_count=-4:4:1", "above zero"),
        ("temperature=-300C", "0 C to 110 C"),
        ("memory.bandwidth=1B/s:8TB/s:1B/s", "10,000,000 values"),
        ("voltage=1V", "pure number"),
    ],
)
def test_a_bad_axis_is_explained(spec: str, says: str) -> None:
    with pytest.raises(WattcastError) as caught:
        search_space.parse_space([spec], GPU)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "sample", "says"),
    [
        ([], None, "at least one field"),
        (["clock=1GHz", "clock=1.2GHz"], None, "clock twice"),
        (["clock=1GHz", "clocks.max=2GHz"], None, "not both"),
        (["power_limit=300W", "tdp=400W"], None, "power_limit twice"),
        (["clock=1GHz"], "sobol", "sobol:4096"),
        (["clock=1GHz"], "sobol:0", "sobol:4096"),
        (["clock=1GHz"], "halton:5", "random:N"),
        (["clock=1GHz"], "sobol:9999999999", "at most"),
    ],
)
def test_a_bad_space_is_explained(specs: list[str], sample: str | None, says: str) -> None:
    with pytest.raises(WattcastError) as caught:
        search_space.parse_space(specs, GPU, sample)
    assert says in str(caught.value)


def test_constraints() -> None:
    axes = ("sm_count", "memory.byte_per_s")
    (one,) = search_space.parse_constraints(["power_w<=400"], GPU, axes)
    assert (one.column, one.bound) == ("power_w", 400.0)
    (two,) = search_space.parse_constraints(["latency < 50ms"], GPU, axes)
    assert (two.column, two.bound) == ("latency_s", pytest.approx(0.05))
    (three,) = search_space.parse_constraints(["bandwidth>=4TB/s"], GPU, axes)
    assert three.holds({"memory.byte_per_s": np.array([3e12, 4e12, 5e12])}).tolist() == [
        False,
        True,
        True,
    ]
    assert str(one) == "power_w<=400 W"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("power_w", "such as power_w<=400"),
        ("powr_w<=400", "Closest: power_w"),
        ("power<=400", "unit"),
        ("power<=400ms", "W"),
        ("clock<=1GHz", "a field that varies"),
        ("power_w<=inf", "W"),
        ("power_w<=1e999W", "W"),
    ],
)
def test_a_bad_constraint_is_explained(text: str, says: str) -> None:
    with pytest.raises(WattcastError) as caught:
        search_space.parse_constraints([text], GPU, ("sm_count",))
    assert says in str(caught.value)
