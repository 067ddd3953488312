"""Plans: no option of their own is better, bounds hold when simulated, and the command answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_up_costs import make_costs

import wattcast
from wattcast.core.errors import BadInput, ExitCode, WattcastError
from wattcast.hardware import Gpu
from wattcast.serving import capacity_plan, plan_options
from wattcast.serving.capacity_plan import PlanResult, plan
from wattcast.serving.plan_options import PERCENTILE, PlanAim, SearchRange
from wattcast.serving.serving_result import LatencyBound, parse_latency_bounds
from wattcast.serving.step_costs import StepCosts, TokenCost, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

GPUS = ("h100-sxm", "h200", "l40s")  # the last has no links but PCIe, so that pipelines are tried


def make_up_costs(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator) -> None:
    """Put tables in place of predictions, whose GPUs differ in speed, power and memory."""
    by_gpu = {name: random.uniform(0.5, 2.0, 4) for name in GPUS}
    experts, fewest = random.uniform(0.7, 1.3), int(random.choice([1, 1, 1, 4, 16]))

    def tabulate(model: object, gpu: Gpu, options: ModelOptions, **_: object) -> StepCosts:
        if options.gpu_count < fewest:
            raise WattcastError(f"weights of {100 * fewest} GB leave no room.")
        step, token, power, memory = by_gpu[gpu.name]
        share = options.tp**0.8 * (experts if options.ep > 1 else 1.0)
        costs = make_costs(
            step_s=8e-3 * step / share,
            token_s=4e-5 * token / share,
            context_s=1e-8 / share,
            power_w=500.0 * power,
            cache_tokens=int(60_000 * memory * options.tp),
            limit_w=float(np.mean(gpu.power.limit_w)),
        )
        lanes = options.pp * options.dp
        return replace(costs, gpu=gpu.name, gpu_count=options.tp, stages=options.pp, lanes=lanes)

    def predict_largest(model: object, gpu: Gpu, options: ModelOptions) -> TokenCost:
        costs = tabulate(model, gpu, options)
        return TokenCost(costs.clock_hz, costs.tokens[-1] / (len(costs.tokens) - 1))

    monkeypatch.setattr(plan_options, "MOST_SEQUENCES", (16, 8))  # fewer requests fill a step
    monkeypatch.setattr(plan_options, "LIMIT_SHARES", (1.0, 0.7))
    monkeypatch.setattr(plan_options, "CLOCK_SHARES", (0.8, 0.6))
    monkeypatch.setattr(plan_options, "tabulate_step_costs", tabulate)
    monkeypatch.setattr(plan_options, "predict_token_cost", predict_largest)


def check_random_jobs(monkeypatch: pytest.MonkeyPatch, seeds: range) -> int:
    """Compare the plan of each job with every one of its options; returns how many could be served."""
    served = 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        make_up_costs(monkeypatch, random)
        asked: dict[str, Any] = {
            "rate": float(10 ** random.uniform(-1, 2)),
            "prompt": int(random.integers(16, 2000)),
            "output": int(random.integers(2, 300)),
            "ttft": f"p99:{random.uniform(0.2, 3.0):.3f}s" if random.random() < 0.6 else None,
            "tpot": f"p90:{random.uniform(0.01, 0.1):.4f}s" if random.random() < 0.6 else None,
            "minimise": str(random.choice(list(PlanAim))),
            "headroom": float(random.choice([0.0, 0.1, 0.3])),
            "spare_replicas": int(random.choice([0, 0, 1])),
            "tp": tuple(sorted(random.choice([1, 2, 4, 8], size=2, replace=False).tolist())),
            "pools": tuple(
                random.choice(["0:1", "1:1", "1:2", "2:1"], size=2, replace=False).tolist()
            ),
            "max_batched_tokens": (8192, 512) if random.random() < 0.3 else (8192,),
            "site_power": float(10 ** random.uniform(3, 5)) if random.random() < 0.2 else None,
            "requests": 40,
            "electricity": "0.1USD/kWh",
            "carbon": "400g/kWh",
            "price": ["h100-sxm=2USD/h", "h200=3USD/h", "l40s=1USD/h"],
        }
        chips = sorted(random.choice(GPUS, size=2, replace=False).tolist())
        try:
            found = plan(str(random.choice(["gpt2", "mixtral-8x7b"])), chips, **asked)
        except WattcastError:
            continue
        served += 1
        pools = tuple(map(capacity_plan._parse_pools, asked["pools"]))
        tried = SearchRange(tp=asked["tp"], pools=pools, most_tokens=asked["max_batched_tokens"])
        check_plan(found, chips, tried, f"{seed}: {asked}")
    return served


def check_plan(found: PlanResult, chips: list[str], tried: SearchRange, job: str) -> None:
    """Size every option as if there were no other, and take replicas away from the best."""
    demand, best = found.demand, found.best
    tables: dict[Any, Any] = {}
    for name in chips:
        for option in plan_options.list_options(demand, wattcast.load_gpu(name), tried)[0]:
            try:
                full = plan_options.tabulate_option(demand, option, tables)
                other = capacity_plan.size_option(demand, full, (math.inf, math.inf))
            except BadInput:
                continue
            assert other is not None
            assert best.rank <= other.rank, (
                job,
                str(best.option),
                str(other.option),
                other.make_row(),
            )
    for fewer in range(
        max(best.replicas - demand.spare_replicas - 3, 1), best.replicas - demand.spare_replicas
    ):
        peak_per_s = demand.rate_per_s * (1.0 + demand.headroom) / fewer
        assert plan_options.serve_rate(demand, best.option, peak_per_s)[1], (
            job,
            fewer,
            best.make_row(),
        )


def test_no_option_of_its_own_beats_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_random_jobs(monkeypatch, range(4)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 30))
def test_no_option_of_its_own_beats_300_plans(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Thirty plans take about a minute and a half of processor time; ``-n 2`` runs two such parts
    at a time.
    """
    assert check_random_jobs(monkeypatch, range(first, first + 30)) >= 20


@pytest.fixture(scope="module")
def found() -> PlanResult:
    paid: Any = {"electricity": "0.36USD/kWh", "carbon": "360g/kWh", "price": "h200=3.6USD/h"}
    return plan("llama3-8b", "h200", rate="20/s", prompt=1000, output=300, ttft="p99:500ms", tpot="p90:40ms", tp=(1,),
                power_limits=("700W",), **paid)  # fmt: skip


def test_a_plan_adds_up(found: PlanResult) -> None:
    row = found.best.make_row()
    assert row["gpus"] == row["replicas"] * row["tp"]
    assert row["energy_j_per_request"] * 20 == pytest.approx(
        row["power_w"], rel=0.15
    )  # the run ends with a few
    assert row["energy_j_per_token"] * 300 == pytest.approx(row["energy_j_per_request"])
    assert row["cost_per_request"] == pytest.approx(
        row["energy_j_per_request"] * 1e-7 + row["gpus"] / 20 * 1e-3
    )
    assert row["carbon_g_per_request"] == pytest.approx(row["energy_j_per_request"] * 1e-4)
    assert json.loads(json.dumps(found.to_dict()))["best"]["gpus"] == row["gpus"]


def test_bounds_hold_at_the_planned_rate_and_break_at_more_than_capacity(found: PlanResult) -> None:
    best = found.best
    assert all(bound.measure(best.result) <= bound.seconds for bound in found.demand.bounds)
    rate = 1.3 * best.capacity_per_s
    over = wattcast.simulate("llama3-8b", "h200", rate=rate, prompt=1000, output=300, requests=500)
    assert any(bound.measure(over) > bound.seconds for bound in found.demand.bounds)


def test_headroom_and_spares_take_replicas(found: PlanResult) -> None:
    demand, each = found.demand, found.best.capacity_per_s
    assert replace(demand, rate_per_s=3.5 * each, headroom=0.0).count_replicas(each) == 4
    assert replace(demand, rate_per_s=3.5 * each, headroom=0.3).count_replicas(each) == 5
    assert replace(demand, rate_per_s=3.5 * each, spare_replicas=2).count_replicas(each) == 6


def test_limits_and_clocks_are_the_cards_own(found: PlanResult) -> None:
    demand, chip = found.demand, wattcast.load_gpu("h100-sxm")
    assert SearchRange().list_settings(demand, chip) == [
        (700.0, 1980e6)
    ]  # the fewest GPUs run at full speed
    for other in (replace(demand, aim=PlanAim.ENERGY), replace(demand, site_power_w=1e3)):
        limits, clocks = zip(*SearchRange().list_settings(other, chip), strict=True)
        assert (limits[0], clocks[0]) == (700.0, 1980e6)
        assert min(limits) >= 200.0
        assert all((1980e6 - clock) % 15e6 == 0 for clock in clocks)
        assert all(
            limit == 700.0 or clock == 1980e6 for limit, clock in zip(limits, clocks, strict=True)
        )
    both = SearchRange(limits_w=(500.0, 600.0), clocks_hz=(1.2e9, 1.501e9))
    assert both.list_settings(demand, chip) == [
        (w, c) for w in (500.0, 600.0) for c in (1200e6, 1500e6)
    ]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"power_limits": ("385W",)}, "385 W: all was measured under 700 W"),
        ({"clocks": ("900MHz",)}, "clock of 900 MHz"),
        ({"power_limits": ("700W",), "clocks": ("1.98GHz",)}, None),
    ],
)
def test_the_risk_of_a_setting_is_told(setting: dict[str, Any], says: str | None) -> None:
    row = plan(
        "llama3-8b", "h200", rate="9/s", prompt=400, output=20, tp=(1,), requests=80, **setting
    ).best.make_row()
    assert row["risk"] is None if says is None else says in row["risk"]


def test_a_capped_clock_costs_what_a_set_clock_does() -> None:
    """Costs between tabulated clocks are interpolated; predicted at that clock they are nearly the
    same.
    """
    spec, chip = load_workload.find_model("gpt2"), wattcast.load_gpu("h200")
    assert spec is not None
    sizes: Any = {"max_tokens": 512, "max_seqs": 32, "longest_context": 512}
    table = tabulate_step_costs(spec, chip, ModelOptions.from_names(stack="engine"), **sizes)
    told = tabulate_step_costs(
        spec, chip, ModelOptions.from_names(stack="engine"), **sizes, clock_hz=1.3e9
    )
    capped = table.cap_clock(1.3e9, chip)
    assert capped.clock_hz[0] == told.clock_hz[0] == 1.3e9
    assert capped.idle_w == pytest.approx(told.idle_w)
    for tokens in (1, 8, 32):
        both = [
            np.take(costs.decode_cost(tokens, tokens, 200.0), [0, costs.clocks])
            for costs in (capped, told)
        ]
        assert both[0] == pytest.approx(both[1], rel=5e-3)
    assert table.cap_clock(1.98e9, chip) is table


def test_prompts_of_their_own_engines_keep_a_time_per_token_that_mixed_steps_break() -> None:
    """A prompt of 6000 tokens holds decodes back for longer than 100 ms; engines that only decode
    do not meet it.
    """
    asked: dict[str, Any] = {
        "rate": "4/s",
        "prompt": 6000,
        "output": 60,
        "tp": (1,),
        "requests": 100,
    }
    asked["power_limits"] = ("700W",)
    found = plan("llama3-8b", "h200", tpot="p99:12ms", **asked)
    row = found.best.make_row()
    assert (row["prefill_engines"] > 0, row["gpus"]) == (
        True,
        row["replicas"] * sum(found.best.option.pools),
    )
    assert row["tpot_s"]["p99"] <= 0.012
    assert (
        plan("llama3-8b", "h200", tpot="p99:12ms", pools=("0:1",), **asked).best.gpus > row["gpus"]
    )


def test_a_model_that_fits_no_node_is_spread_over_two() -> None:
    """671 GB of fp8 weights: 8 H100 of 80 GB are too few, 16 in two nodes serve."""
    found = plan(
        "deepseek-v3", "h100-sxm", rate="1/s", prompt=500, output=50, tp=(8,), ep=(1,), requests=50
    )
    row = found.best.make_row()
    assert (row["gpus"], row["layout"], row["replicas"]) == (16, "tp 8 x pp 2", 1)


def test_latency_bounds_as_people_write_them() -> None:
    assert parse_latency_bounds("ttft", "p99:500ms, p50:0.1s") == (
        LatencyBound("ttft", 99.0, 0.5),
        LatencyBound("ttft", 50.0, 0.1),
    )
    assert parse_latency_bounds("tpot", "40ms", PERCENTILE) == (LatencyBound("tpot", 90.0, 0.04),)
    assert parse_latency_bounds("tpot", 0.04, PERCENTILE) == (LatencyBound("tpot", 90.0, 0.04),)


COMMAND = (
    "plan",
    "gpt2",
    "--rate",
    "5/s",
    "--prompt",
    "100",
    "--output",
    "20",
    "--gpu",
    "h200",
    "--tp",
    "1",
)


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
        (("--tp", "5"), "h200, tp 5: gpt2: tp: expected a divisor of heads=12"),
        (("--pp", "0"), "whole numbers"),
        (("--ep", "2"), "1 for a model without experts"),
        (("--minimise", "cost"), "price"),
        (("--minimise", "carbon"), "--carbon"),
        (("--minimise", "noise"), "gpus, energy, cost, carbon"),
        (("--ttft", "p99:1us"), "cannot be met even by a single request"),
        (("--site-power", "1W"), "over the site's"),
        (("--clock", "3GHz"), "the h200 takes, from 345 MHz to 1.98 GHz"),
        (("--clock", "fast"), "clock"),
        (("--power-limit", "900W"), "the h200 takes, from 200 W to 700 W"),
        (("--pools", "1x2"), "such as 1:2"),
        (("--pools", "0:2"), "such as 1:2"),
    ],
)
def test_a_mistake_gets_one_paragraph(call: Any, argv: tuple[str, ...], says: str) -> None:
    done = call(*COMMAND, *argv)
    assert done.code == ExitCode.BAD_INPUT
    assert says in done.err
    assert "Traceback" not in done.err
