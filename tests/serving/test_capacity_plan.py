"""Plans: no option of their own is better, bounds hold when simulated, and the command answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_up_costs import make_costs

import wattcast
from wattcast.core.errors import ExitCode, WattcastError
from wattcast.hardware import Gpu
from wattcast.serving import capacity_plan
from wattcast.serving.capacity_plan import PERCENTILE, PlanAim, plan
from wattcast.serving.serving_result import LatencyBound, parse_latency_bounds
from wattcast.workload.model_options import ModelOptions


def made_up_table(random: np.random.Generator) -> Any:
    """Return a stand-in for ``tabulate_step_costs`` whose GPUs differ in speed, power and memory."""
    by_gpu = {name: random.uniform(0.5, 2.0, 4) for name in ("h100-sxm", "h200", "a100-sxm-80gb")}

    def tabulate(model: object, gpu: Gpu, options: ModelOptions, **_: object) -> Any:
        step, token, power, memory = by_gpu[gpu.name]
        share = options.tp**0.8
        costs = make_costs(
            step_s=8e-3 * step / share,
            token_s=4e-5 * token / share,
            context_s=1e-8 / share,
            power_w=500.0 * power,
            cache_tokens=int(60_000 * memory * options.tp),
            limit_w=float(np.mean(gpu.power.limit_w)),
        )
        return replace(costs, gpu=gpu.name, gpu_count=options.tp)

    return tabulate


def check_random_jobs(monkeypatch: pytest.MonkeyPatch, seeds: range) -> int:
    """Compare the plan of each job with every one of its options; returns how many could be served."""
    served = 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        monkeypatch.setattr(capacity_plan, "tabulate_step_costs", made_up_table(random))
        monkeypatch.setattr(capacity_plan, "REQUESTS", 40)
        aim = random.choice(list(PlanAim))
        asked: dict[str, Any] = {
            "rate": float(10 ** random.uniform(-1, 2)),
            "prompt": int(random.integers(16, 2000)),
            "output": int(random.integers(2, 300)),
            "ttft": f"p99:{random.uniform(0.2, 3.0):.3f}s" if random.random() < 0.6 else None,
            "tpot": f"p90:{random.uniform(0.01, 0.1):.4f}s" if random.random() < 0.6 else None,
            "minimise": str(aim),
            "electricity": "0.1USD/kWh",
            "carbon": "400g/kWh",
            "price": ["h100-sxm=2USD/h", "h200=3USD/h", "a100-sxm-80gb=1USD/h"],
        }
        try:
            found = plan("gpt2", "h100-sxm,h200,a100-sxm-80gb", **asked)
        except WattcastError:
            continue
        served += 1
        best = capacity_plan._rank(found.best, found.aim)
        chips = {p.option.gpu.name: p.option.gpu for p in found.plans}
        for name in ("h100-sxm", "h200", "a100-sxm-80gb"):
            chip = chips.get(name) or wattcast.load_gpu(name)
            limits = capacity_plan._default_limits(chip)
            limits = limits[:1] if found.aim is PlanAim.GPUS else limits
            options, _ = capacity_plan._list_options(found.demand, chip, capacity_plan.TENSOR_PARALLEL, limits)
            for option in options:
                other = capacity_plan._size(found.demand, option, found.prices)
                if not isinstance(other, str):
                    assert best <= capacity_plan._rank(other, found.aim), (seed, asked, other.row())
    return served


@pytest.mark.slow
def test_no_option_of_its_own_beats_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_random_jobs(monkeypatch, range(3)) >= 2


@pytest.mark.slow
def test_no_option_of_its_own_beats_300_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_random_jobs(monkeypatch, range(1000, 1300)) >= 200


@pytest.fixture(scope="module")
def found() -> capacity_plan.PlanResult:
    paid: Any = {"electricity": "0.36USD/kWh", "carbon": "360g/kWh", "price": "h200=3.6USD/h"}
    return plan("llama3-8b", "h200", rate="20/s", prompt=1000, output=300, ttft="p99:500ms", tpot="p90:40ms", tp=(1,),
                power_limits=("700W",), **paid)  # fmt: skip


def test_a_plan_adds_up(found: capacity_plan.PlanResult) -> None:
    row = found.best.row()
    assert row["gpus"] == row["replicas"] * row["tp"]
    assert row["energy_j_per_request"] * 20 == pytest.approx(row["power_w"], rel=0.15)  # the run ends with a few
    assert row["energy_j_per_token"] * 300 == pytest.approx(row["energy_j_per_request"])
    assert row["cost_per_request"] == pytest.approx(row["energy_j_per_request"] * 1e-7 + row["gpus"] / 20 * 1e-3)
    assert row["carbon_g_per_request"] == pytest.approx(row["energy_j_per_request"] * 1e-4)
    assert json.loads(json.dumps(found.to_dict()))["best"]["gpus"] == row["gpus"]


def test_bounds_hold_at_the_planned_rate_and_break_at_more_than_capacity(found: capacity_plan.PlanResult) -> None:
    best = found.best
    assert all(bound.measure(best.result) <= bound.seconds for bound in found.demand.bounds)
    rate = 1.3 * best.capacity_per_s
    over = wattcast.simulate("llama3-8b", "h200", rate=rate, prompt=1000, output=300, requests=500)
    assert any(bound.measure(over) > bound.seconds for bound in found.demand.bounds)


def test_headroom_and_spares_take_replicas(found: capacity_plan.PlanResult) -> None:
    demand, each = found.demand, found.best.capacity_per_s
    assert capacity_plan._count_replicas(replace(demand, rate_per_s=3.5 * each, headroom=0.0), each) == 4
    assert capacity_plan._count_replicas(replace(demand, rate_per_s=3.5 * each, headroom=0.3), each) == 5
    assert capacity_plan._count_replicas(replace(demand, rate_per_s=3.5 * each, spare_replicas=2), each) == 6


def test_limits_are_the_cards_own_and_their_risk_is_told() -> None:
    chip = wattcast.load_gpu("h100-sxm")
    limits = capacity_plan._default_limits(chip)
    assert limits[0] == 700.0
    assert min(limits) >= 200.0
    low = plan("gpt2", "h100-sxm", rate="1/s", prompt=100, output=20, tp=(1,), power_limits=(limits[-1],))
    assert "below the default 700 W" in low.best.row()["risk"]
    full = plan("gpt2", "h100-sxm", rate="1/s", prompt=100, output=20, tp=(1,), power_limits=("700W",))
    assert full.best.row()["risk"] is None


def test_latency_bounds_as_people_write_them() -> None:
    assert parse_latency_bounds("ttft", "p99:500ms, p50:0.1s") == (
        LatencyBound("ttft", 99.0, 0.5),
        LatencyBound("ttft", 50.0, 0.1),
    )
    assert parse_latency_bounds("tpot", "40ms", PERCENTILE) == (LatencyBound("tpot", 90.0, 0.04),)
    assert parse_latency_bounds("tpot", 0.04, PERCENTILE) == (LatencyBound("tpot", 90.0, 0.04),)


COMMAND = ("plan", "gpt2", "--rate", "5/s", "--prompt", "100", "--output", "20", "--gpu", "h200", "--tp", "1")


def test_the_command_answers_first(call: Any) -> None:
    done = call(*COMMAND, "--power-limit", "700W")
    assert done.code == 0
    first, second = done.out.splitlines()[:2]
    assert "1 x h200" in first
    assert "J/token" in second
    assert "output tokens/s" in second


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--headroom", "20"), "such as 20%"),
        (("--ttft", "p0:1s"), "percentile"),
        (("--tpot", "fast"), "tpot"),
        (("--tp", "one"), "whole numbers"),
        (("--minimise", "cost"), "price"),
        (("--minimise", "carbon"), "--carbon"),
        (("--minimise", "noise"), "gpus, energy, cost, carbon"),
        (("--ttft", "p99:1us"), "cannot be met even by a single request"),
        (("--site-power", "1W"), "over the site's"),
    ],
)
def test_a_mistake_gets_one_paragraph(call: Any, argv: tuple[str, ...], says: str) -> None:
    done = call(*COMMAND, *argv)
    assert done.code == ExitCode.BAD_INPUT
    assert says in done.err
    assert "Traceback" not in done.err
