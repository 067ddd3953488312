"""Fleets: the program against every assignment there is, and what binds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import ExitCode, WattcastError
from wattcast.explore import fleet as fleets
from wattcast.predictor.bundle import bundle_for

pytest.importorskip("scipy")

SITE = """
power: {power}
gpus: {{h200: 2, l4: 2}}
workloads:
  - {{name: chat, workload: gpt2, rate: {chat}, options: {{batch: 8, seq: 256}}}}
  - {{name: search, workload: bert-large, rate: {search}, options: {{batch: 16, seq: 128}}}}
"""


@pytest.fixture(autouse=True, scope="module")
def columns_once() -> Iterator[None]:
    """List what the GPUs do with the workloads once: budgets, prices and aims do not change it."""
    list_columns, kept = fleets._list_columns, {}

    def list_once(fleet: fleets.Fleet) -> object:
        asked = repr(
            ([(gpu.name, count) for gpu, count in fleet.gpus], fleet.demands, fleets.SERVED_CLOCKS)
        )
        if asked not in kept:
            kept[asked] = list_columns(fleet)
        columns, notes = kept[asked]
        return list(columns), notes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleets, "_list_columns", list_once)
        yield


def site(tmp_path: Path, power: str = "3 kW", chat: str = "200/s", search: str = "300/s") -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE.format(power=power, chat=chat, search=search))
    return path


def idle_of(fleet: fleets.Fleet) -> np.ndarray:
    return np.array(
        [
            float(bundle_for(g).power.idle_power_w(fleets.list_settable_clocks(g)[0]))
            for g, _ in fleet.gpus
        ]
    )


def least_power(chosen, demand: int, rate_per_s: float) -> float | None:
    """Extra watts to serve one rate with these GPUs, cheapest work first; None where they cannot."""
    extra, left = 0.0, rate_per_s
    mine = [c for c in chosen if c is not None and c.demand == demand]
    for c in sorted(mine, key=lambda c: (c.power_w - c.idle_w) / c.per_s):
        busy = min(1.0, left / c.per_s)
        extra, left = extra + busy * (c.power_w - c.idle_w), left - busy * c.per_s
    return extra if left <= 1e-9 * rate_per_s else None


def every_assignment(fleet: fleets.Fleet, columns, power_w: float):
    """Factor, and least mean power where every rate is met, of every way to give four GPUs away."""
    base = idle_of(fleet)
    kinds = [kind for kind, (_, n) in enumerate(fleet.gpus) for _ in range(n)]
    for chosen in itertools.product(
        *([None, *(c for c in columns if c.kind == kind)] for kind in kinds)
    ):
        each = list(zip(chosen, kinds, strict=True))
        if sum(base[k] if c is None else c.power_w for c, k in each) > power_w:
            continue
        served = [
            sum(c.per_s for c in chosen if c is not None and c.demand == i)
            for i in range(len(fleet.demands))
        ]
        extra = [least_power(chosen, i, d.rate_per_s) for i, d in enumerate(fleet.demands)]
        rest = sum(base[k] if c is None else c.idle_w for c, k in each)
        mean_w = None if None in extra else rest + sum(extra)
        yield min(s / d.rate_per_s for s, d in zip(served, fleet.demands, strict=True)), mean_w


def test_the_best_is_the_best_of_all_assignments(tmp_path: Path) -> None:
    fleet = replace(fleets.read_fleet(site(tmp_path)), power_w=700.0)
    columns, _ = fleets._list_columns(fleet)
    few = [
        c
        for kind in (0, 1)
        for i in (0, 1)
        for c in [c for c in columns if c.kind == kind and c.demand == i][::6]
    ]
    everything = list(every_assignment(fleet, few, 700.0))
    program = fleets._Program(fleet, few, idle_of(fleet))
    solution = program.solve(fleets.FleetAim.THROUGHPUT, 700.0)
    assert solution is not None
    most = fleets._make_assignment(program, fleets.FleetAim.THROUGHPUT, solution, ())
    assert most.factor == pytest.approx(max(factor for factor, _ in everything), rel=1e-6)
    assert (solution.busy <= solution.replicas + 1e-9).all()
    least = program.solve(fleets.FleetAim.ENERGY, 700.0)
    assert least is not None
    found = fleets._make_assignment(program, fleets.FleetAim.ENERGY, least, ())
    assert found.power_w == pytest.approx(
        min(w for _, w in everything if w is not None), rel=1e-3
    )  # HiGHS' gap is 1e-4


def test_every_rate_is_met_within_the_budget_at_least_energy(tmp_path: Path) -> None:
    fleet = fleets.read_fleet(site(tmp_path))
    found = fleets.assign_fleet(fleet, "energy")
    for row in found.served:
        assert row["served_per_s"] >= row["asked_per_s"] * (1 - 1e-6)
    assert found.peak_w <= 3000.0
    assert found.power_w <= found.peak_w + 1e-6
    for (gpu, count), left in zip(fleet.gpus, found.idle_gpus.values(), strict=True):
        assert sum(row["gpus"] for row in found.rows if row["gpu"] == gpu.name) + left == count
    fast = fleets.assign_fleet(fleet, "throughput")
    assert fast.factor >= 1.0
    assert fast.power_w >= found.power_w


def test_a_smaller_budget_serves_less_and_binds(tmp_path: Path) -> None:
    found = [
        fleets.assign_fleet(fleets.read_fleet(site(tmp_path, power)), "throughput")
        for power in ("3 kW", "800 W", "400 W")
    ]
    factors = [one.factor for one in found]
    assert factors == pytest.approx(
        sorted(factors, reverse=True), rel=1e-9
    )  # a solver's last digit aside
    assert factors[2] < factors[0]
    assert "power" in found[2].binds


def test_pue_counts_against_the_budget(tmp_path: Path) -> None:
    fleet = fleets.read_fleet(site(tmp_path, "600 W"))
    assert (
        fleets.assign_fleet(replace(fleet, pue=1.4), "throughput").factor
        < fleets.assign_fleet(fleet, "throughput").factor
    )


@pytest.mark.parametrize(
    ("power", "chat", "says"),
    [
        ("50 W", "1/s", "idle, more than the budget"),
        ("300 W", "1000/s", "power: 300 W is too little"),
        ("3 MW", "9000000/s", "GPUs: there are too few"),
    ],
)
def test_what_cannot_be_says_what_binds(tmp_path: Path, power: str, chat: str, says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        fleets.assign_fleet(fleets.read_fleet(site(tmp_path, power, chat)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus: {}\nworkloads: []", "at least one GPU"),
        ("gpus: {h201: 1}\nworkloads: [{workload: gpt2, rate: 1/s}]", "Closest: h20"),
        ("gpus: {h200: 0}\nworkloads: [{workload: gpt2, rate: 1/s}]", "gpus.h200"),
        ("gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: '1'}]", "rate"),
        ("gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 0/s}]", "above zero"),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, options: {bach: 4}}]",
            "Closest: batch",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, options: {tp: 2}}]",
            "2 GPUs a replica, of which",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, prompt: 9}]",
            "prompt and output",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, latency: 1us}]",
            "more than 1 us",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: bert-large, rate: 1/s, prompt: 9, output: 9}]",
            "a language model",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, prompt: 9, output: 9, ttft: 1us}]",
            "TTFT p90",
        ),
        (
            "gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s, prompt: 9, output: 9, latency: 1s}]",
            "no batch",
        ),
        ("gpus: {h200: 1}\nworkloads: [{workload: gtp2, rate: 1/s}]", "Closest: gpt2"),
        ("gpus: {l4: 1}\nworkloads: [{workload: llama3-70b, rate: 1/s}]", "does not fit"),
        ("gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s}]\npue: 0.2", "pue"),
        ("gpus: {h200: 1}\nworkloads: [{workload: gpt2, rate: 1/s}]\npowr: 3 kW", "Closest: power"),
        ("gpus: {h200: 1}\nworkloads:\n" + 2 * "- {name: a, workload: gpt2, rate: 1/s}\n", "alike"),
    ],
)
def test_a_bad_fleet_is_explained(call, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    done = call("explore", "fleet", str(path))
    assert done.code == ExitCode.BAD_INPUT, done.err
    assert says in done.err
    assert done.out == ""


MIX = """
gpus: {h200: 4}
workloads:
  - {name: chat, workload: gpt2, rate: 90/s, prompt: 300, output: 40, ttft: "p99:200ms", tpot: "p90:20ms", tp: [2]}
  - {name: search, workload: bert-large, rate: 300/s, latency: 40ms, options: {batch: 16, seq: 128, tp: 2}}
"""


def test_engines_and_batches_share_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of several GPUs count as such, latencies are kept when simulated, a clock that is
    far says so.
    """
    monkeypatch.setattr(fleets, "SERVED_CLOCKS", (1.0, 0.6))
    path = tmp_path / "mix.yaml"
    path.write_text(MIX)
    fleet = fleets.read_fleet(path)
    found = {aim: fleets.assign_fleet(fleet, aim) for aim in ("energy", "gpus")}
    for one in found.values():
        used = sum(row["gpus"] for row in one.rows)
        assert used + one.idle_gpus["h200"] == 4
        for row in one.rows:
            assert row["gpus"] % (2 if row["replica"] in ("tp 2", "2 GPUs") else 1) == 0
            assert row["clock_hz"] == 1980e6 or row["risk"] or row["clock_hz"] > 1.7e9
        chat = [row for row in one.rows if row["workload"] == "chat"]
        assert all(row["ttft_p99_s"] <= 0.2 and row["tpot_p50_s"] <= 0.02 for row in chat)
    assert found["energy"].factor == pytest.approx(1.0, rel=1e-6)
    count = {aim: sum(row["gpus"] for row in one.rows) for aim, one in found.items()}
    assert count["gpus"] <= count["energy"]


def test_the_command(call, tmp_path: Path) -> None:
    path = str(site(tmp_path))
    done = call("explore", "fleet", path, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert {row["workload"] for row in told["assignment"]} == {"chat", "search"}
    done = call("explore", "fleet", path, "--aim", "throughput", "--site-power", "600W")
    assert done.code == 0, done.err
    assert "Assignment for throughput" in done.out
    assert (
        call("explore", "fleet", path, "--aim", "cost").code == ExitCode.BAD_INPUT
    )  # no price is known
    done = call(
        "explore",
        "fleet",
        path,
        "--aim",
        "cost",
        "--price",
        "h200=3USD/h",
        "--price",
        "l4=20USD/h",
        "--json",
    )
    dear = json.loads(done.out)
    assert {row["gpu"] for row in dear["assignment"]} == {"h200"}
    assert dear["cost_per_h"] == pytest.approx(3.0 * sum(row["gpus"] for row in dear["assignment"]))
    assert call("explore", "fleet", path, "--aim", "speed").code == ExitCode.BAD_INPUT
    assert call("explore", "fleet", str(tmp_path / "none.yaml")).code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(("share", "limit"), [(0.96, "neither"), (0.99, "power")])
def test_power_is_the_limit_where_a_fiftieth_of_it_is_left(
    tmp_path: Path, share: float, limit: str
) -> None:
    fleet = fleets.read_fleet(site(tmp_path))
    peak_w = share * fleet.power_w
    assert fleets._name_limits(fleet, peak_w, {"h200": 1, "l4": 0}).startswith(limit)
