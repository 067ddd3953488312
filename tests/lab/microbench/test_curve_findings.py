"""What curves tell: made-up curves whose truth is known, and flat, noisy or short ones, of which
nothing must be told.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from wattcast.hardware import load_gpu
from wattcast.lab.microbench.curve_findings import (
    Finding,
    LevelEnd,
    find_level_end,
    find_line,
    find_parts,
    find_sets,
    find_slices,
    find_step,
    find_ways,
    fit_graph,
    fit_roofline,
    judge_launch,
    list_findings,
)
from wattcast.lab.microbench.microbench_results import MicroRow, read_shipped_results

STRIDES = np.array([8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0])
NOISE = 0.01  # of every point
SEEDS = range(5)


def noisy(values: np.ndarray, seed: int, noise: float = NOISE) -> np.ndarray:
    return values * (1.0 + noise * np.random.default_rng(seed).standard_normal(len(values)))


def walk_cycles(fetched_byte: float, strides: np.ndarray = STRIDES) -> np.ndarray:
    return 34.0 + 240.0 * np.minimum(strides / fetched_byte, 1.0)


@pytest.mark.parametrize("fetched_byte", [32.0, 64.0, 128.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_tells_what_comes_at_once(fetched_byte: float, seed: int) -> None:
    found = find_step("L1 sector", STRIDES, noisy(walk_cycles(fetched_byte), seed))
    assert found.value == fetched_byte


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("cycles", "why"),
    [
        (np.full(7, 34.0), "flat"),
        (np.array([74.0, 34.0, 200.0, 40.0, 250.0, 100.0, 300.0]), "no step explains"),
        # a hit of sectors and another of lines: two steps
        (walk_cycles(32.0) + 2.0 * (walk_cycles(256.0) - 34.0), "no step explains|about as well"),
        # more bytes than the longest stride: the plateau was not reached
        (walk_cycles(4096.0), "no step|about as well|flat"),
    ],
)
def test_a_walk_without_one_step_tells_nothing(cycles: np.ndarray, why: str, seed: int) -> None:
    found = find_step("L1 sector", STRIDES, noisy(cycles, seed))
    assert found.value is None
    assert any(part in found.reason for part in why.split("|"))
    assert found.describe() == "unknown"


def test_four_strides_are_too_few() -> None:
    assert find_step("L1 sector", STRIDES[:4], walk_cycles(16.0)[:4]).value is None


def ring_cycles(sizes: np.ndarray, capacity: float) -> np.ndarray:
    return np.where(sizes <= capacity, 34.0, 280.0)


def test_a_level_ends_between_two_sizes() -> None:
    sizes = 2.0 ** np.arange(4, 12)
    assert find_level_end(sizes, ring_cycles(sizes, 300.0)) == LevelEnd(256.0, 512.0)
    for seed in SEEDS:
        cycles = noisy(ring_cycles(sizes, 300.0), seed)
        assert find_level_end(sizes, cycles) == LevelEnd(256.0, 512.0)


@pytest.mark.parametrize(
    ("cycles", "why"),
    [
        ([34.0] * 8, "no latency rises"),
        ([34.0, 280.0, *[34.0] * 6], "already differ"),
        ([34.0, 34.0, 34.0, 280.0, 34.0, 280.0, 280.0, 280.0], "come back"),
        ([34.0, 34.0], "three are needed"),
    ],
)
def test_a_level_that_does_not_end_cleanly_tells_nothing(cycles: list[float], why: str) -> None:
    sizes = 2.0 ** np.arange(len(cycles))
    assert why in str(find_level_end(sizes, np.array(cycles)))


DENSE_BYTE = 32.0 * np.array([2048, 3072, 4096, 6144, 8192, 12288, 16384])
RING_LINES = np.array([128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288.0])


@pytest.mark.parametrize("line_byte", [32.0, 64.0, 128.0])
@pytest.mark.parametrize("capacity_byte", [120 << 10, 200 << 10, 256 << 10])
def test_a_line_is_capacity_in_bytes_over_that_in_lines(
    line_byte: float, capacity_byte: int
) -> None:
    dense = find_level_end(DENSE_BYTE, ring_cycles(DENSE_BYTE, capacity_byte))
    lines = find_level_end(RING_LINES, ring_cycles(RING_LINES, capacity_byte / line_byte))
    assert find_line(dense, lines).value == line_byte


def test_a_line_is_unknown_without_both_capacities_or_between_two_sizes() -> None:
    end = LevelEnd(196608.0, 262144.0)
    assert find_line("no latency rises up to 8", end).value is None
    assert "ring" in find_line(end, "noise").reason
    wide = find_line(LevelEnd(65536.0, 262144.0), LevelEnd(1024.0, 2048.0))
    assert wide.value is None
    assert "between 32 and 256 bytes" in wide.reason


NODES = np.array([2.0, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])


def ways_ends(sets: int, ways: int, line_byte: int = 128) -> dict[int, LevelEnd | str]:
    """Levels of a cache whose set is the line's number modulo the sets."""
    ends: dict[int, LevelEnd | str] = {}
    for stride in (16384, 65536, 262144):
        used_sets = max(sets * line_byte // stride, 1)
        ends[stride] = find_level_end(NODES, ring_cycles(NODES, ways * used_sets))
    return ends


@pytest.mark.parametrize(("sets", "ways"), [(512, 4), (64, 16), (256, 8), (128, 64)])
def test_ways_are_the_lines_that_fit_into_one_set(sets: int, ways: int) -> None:
    found = find_ways(ways_ends(sets, ways))
    assert found.value == ways
    capacity = float(sets * ways * 128)
    count = find_sets(LevelEnd(0.75 * capacity, 1.2 * capacity), 128.0, found)
    assert count.value == sets


def test_ways_of_a_hashed_index_are_unknown() -> None:
    hashed = {stride: find_level_end(NODES, np.full(13, 34.0)) for stride in (16384, 65536, 262144)}
    assert "hash" in find_ways(hashed).reason
    assert find_ways(hashed).value is None
    falling = {
        16384: LevelEnd(64.0, 96.0),
        65536: LevelEnd(32.0, 48.0),
        262144: LevelEnd(8.0, 12.0),
    }
    assert find_ways(falling).value is None
    assert find_ways({262144: LevelEnd(4.0, 6.0)}).value is None
    mixed = {65536: "no latency rises up to 128", 262144: LevelEnd(4.0, 6.0)}
    assert find_ways(mixed).value is None
    assert find_sets("noise", 128.0, find_ways(hashed)).value is None


LINES = np.array([1.0, 4, 16, 64, 256, 1024, 4096])


def test_slices_are_the_rate_of_all_over_that_of_one() -> None:
    rates = 0.05 * np.minimum(LINES, 48.0)
    found = find_slices(LINES, rates)
    assert (found.value, found.at_least) == (48.0, False)
    growing = find_slices(LINES, 0.05 * LINES**0.5)
    assert (growing.value, growing.at_least) == (64.0, True)
    assert growing.describe() == "at least 64"


@pytest.mark.parametrize(
    "rates",
    [
        np.full(7, 0.05),
        0.05 * np.array([1.0, 4.0, 2.0, 20.0, 9.0, 40.0, 44.0]),
        np.array([0.05, np.nan, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_flat_noisy_or_missing_rates_tell_no_slices(rates: np.ndarray) -> None:
    assert find_slices(LINES, rates).value is None


def parts(seed: int, near: float, far: float, far_lines: int) -> np.ndarray:
    """Latencies of 32 lines in a near and a far part, whose slices differ by a few cycles."""
    rng = np.random.default_rng(seed)
    cycles = np.where(np.arange(32) < far_lines, far, near) + rng.uniform(-4.0, 4.0, 32)
    return rng.permutation(cycles)


@pytest.mark.parametrize("seed", SEEDS)
def test_single_lines_lie_in_a_near_or_a_far_part(seed: int) -> None:
    near, far = find_parts(parts(seed, 210.0, 400.0, 15))
    assert near.value == pytest.approx(210.0, abs=3.0)
    assert far.value == pytest.approx(400.0, abs=3.0)
    assert (near.reason, far.reason) == ("17 of 32 lines", "15 of 32 lines")


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_of_one_part_are_not_split(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for cycles in (
        parts(seed, 210.0, 210.0, 15),  # one part
        rng.uniform(200.0, 400.0, 32),  # no groups
        parts(seed, 210.0, 400.0, 1),  # a line that was disturbed
        parts(seed, 210.0, 400.0, 15)[:6],
    ):
        assert [found.value for found in find_parts(cycles)] == [None, None]


def test_a_graph_is_a_launch_and_its_nodes() -> None:
    nodes = np.array([1.0, 4, 16, 64, 256, 1024])
    for seed in SEEDS:
        node, launch = fit_graph(nodes, noisy(8e-6 + 1.5e-6 * nodes, seed))
        assert node.value == pytest.approx(1.5e-6, rel=0.03)
        assert launch.value == pytest.approx(8e-6, rel=0.05)


@pytest.mark.parametrize(
    "seconds",
    [
        np.full(6, 9e-6),
        1e-6 * np.array([9.0, 60.0, 12.0, 200.0, 90.0, 900.0]),
        1e-6 * np.array([1.0, 4, 16, 64, 2560, 102400.0]),
    ],
)
def test_flat_or_crooked_graphs_tell_nothing(seconds: np.ndarray) -> None:
    nodes = np.array([1.0, 4, 16, 64, 256, 1024])
    assert [found.value for found in fit_graph(nodes, seconds)] == [None, None]
    assert [found.value for found in fit_graph(nodes[:2], seconds[:2])] == [None, None]


def test_launches_that_scatter_are_unknown() -> None:
    assert judge_launch("launch", 5e-6, 1e-7).value == 5e-6
    assert judge_launch("launch", 5e-6, 3e-6).value is None


BYTE_PER_S, FLOP_PER_S, IDLE_W = 4e12, 6e13, 120.0
BYTE_J, FLOP_J = 70e-12, 4e-12


def sweep(seed: int | None = None, roofs: bool = True, noise: float = 0.005) -> list[MicroRow]:
    """Rows of a sweep whose roofs and joules are known."""
    intensities = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    scatter = np.ones(12) if seed is None else noisy(np.ones(12), seed, noise)
    return [
        sweep_row(intensity, factor, roofs)
        for intensity, factor in zip(intensities, scatter.tolist(), strict=True)
    ]


def sweep_row(intensity: float, factor: float, roofs: bool) -> MicroRow:
    byte = 1e9
    flop = intensity * byte
    seconds = factor * byte / BYTE_PER_S
    if roofs:
        seconds = factor * max(byte / BYTE_PER_S, flop / FLOP_PER_S)
    return MicroRow(
        f"intensity_{intensity}",
        f"intensity_{intensity}",
        "structure",
        "load",
        curve="intensity",
        at=intensity,
        operations=byte / 16.0,
        byte=byte,
        flop=flop,
        launch_s=seconds,
        power_w=IDLE_W + (byte * BYTE_J + flop * FLOP_J) / seconds,
        idle_power_w=IDLE_W,
    )


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {found.name: found for found in findings}


def test_a_sweep_of_flops_a_byte_tells_both_roofs_and_their_joules() -> None:
    for seed in (None, *SEEDS):
        found = by_name(list(fit_roofline(sweep(seed))))
        assert found["DRAM roof"].value == pytest.approx(BYTE_PER_S, rel=0.02)
        assert found["fp32 roof"].value == pytest.approx(FLOP_PER_S, rel=0.02)
        assert found["flops a byte where roofs meet"].value == pytest.approx(15.0, rel=0.03)
        assert found["energy of a byte"].value == pytest.approx(BYTE_J, rel=0.03)
        assert found["energy of a flop"].value == pytest.approx(FLOP_J, rel=0.03)


def test_a_sweep_that_never_leaves_the_memory_has_no_other_roof() -> None:
    found = by_name(list(fit_roofline(sweep(roofs=False))))
    assert found["DRAM roof"].value == pytest.approx(BYTE_PER_S)
    assert found["fp32 roof"].value is None
    assert "not reached" in found["fp32 roof"].reason
    assert found["flops a byte where roofs meet"].value is None


def test_a_noisy_sweep_tells_no_joules_and_too_few_points_nothing() -> None:
    rows = sweep()
    for place, r in enumerate(rows):
        rows[place] = MicroRow(**vars(r) | {"power_w": IDLE_W + (400.0 if place % 2 else 40.0)})
    found = by_name(list(fit_roofline(rows)))
    assert found["energy of a byte"].value is None
    assert found["energy of a flop"].value is None
    assert all(item.value is None for item in fit_roofline(sweep()[:3]))
    capped = [MicroRow(**vars(r) | {"throttle": ("sw_power_cap",)}) for r in sweep()]
    assert all(item.value is None for item in fit_roofline(capped))


def test_results_without_these_curves_have_no_findings() -> None:
    assert list_findings([MicroRow("fp32_fma", "fp32_fma")]) == []


def test_the_measured_h200_has_at_least_47_slices() -> None:
    """The one curve of these that a card has measured; the other kernels have not run."""
    (found,) = list_findings(read_shipped_results(load_gpu("h200")))
    assert (found.name, found.value, found.at_least) == ("L2 slices", 47.0, True)


def test_the_command_prints_what_curves_tell(call, tmp_path: Path) -> None:
    rows = [json.dumps({k: v for k, v in vars(r).items() if v is not None}) for r in sweep()]
    (tmp_path / "microbench.jsonl").write_text("\n".join(rows) + "\n")
    shown = call("lab", "microbench", "--show", str(tmp_path))
    assert "what curves of h200 tell" in shown.out
    assert "fp32 roof" in shown.out
    plain = json.loads(call("lab", "microbench", "--show", str(tmp_path), "--json").out)
    found = {item["name"]: item["value"] for item in plain["findings"]}
    assert found["DRAM roof"] == pytest.approx(BYTE_PER_S)
    listed = call("lab", "microbench", "--list", "--only", "intensity,launch,ways_64k")
    assert listed.out.count("not yet run on a card") == 12 + 8 + 13
    for word in ("intensity", "walk", "ways_16k", "atomic_lines", "launch"):
        assert word in call("lab", "microbench", "--help").out


def test_a_sweep_alone_is_drawn(call, tmp_path: Path) -> None:
    """Figures of rates and energies, for which nothing was measured, ended in an internal error."""
    pytest.importorskip("matplotlib")
    rows = [json.dumps({k: v for k, v in vars(r).items() if v is not None}) for r in sweep()]
    (tmp_path / "microbench.jsonl").write_text("\n".join(rows) + "\n")
    figures = tmp_path / "figures"
    done = call("lab", "microbench", "--show", str(tmp_path), "--figures", str(figures))
    assert done.code == 0, done.err
    names = {path.stem for path in figures.glob("*.png")}
    assert names == {"microbench-intensity", "microbench-devices"}
