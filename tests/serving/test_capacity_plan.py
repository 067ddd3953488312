"""Plans: no option of their own is better, bounds hold when simulated, and the command answers."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_up_costs import make_costs
from rich.console import Console

import wattcast
from wattcast.core.errors import BadInput, ExitCode, WattcastError
from wattcast.hardware import Gpu
from wattcast.options.serving_options import parse_pools
from wattcast.options.setting_options import MachineOptions
from wattcast.predictor.prices import parse_prices
from wattcast.serving import (
    capacity_plan,
    option_bounds,
    option_runs,
    plan_options,
    plan_search,
)
from wattcast.serving.capacity_plan import PlanResult, plan
from wattcast.serving.latency_bounds import LatencyBound, parse_latency_bounds
from wattcast.serving.least_costs import LoneRequest, TokenCost
from wattcast.serving.plan_options import SearchRange
from wattcast.serving.plan_report import print_plan
from wattcast.serving.plan_search import size_option
from wattcast.serving.service_demand import PERCENTILE, PlanAim, ServiceDemand
from wattcast.serving.simulate_serving import find_language_model, serve_trace
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

# the l40s has no links but PCIe, so that pipelines are tried
GPUS = ("h100-sxm", "h200", "l40s", "b200", "mi300x")
USUAL = MachineOptions()  # no host and no card is told


def make_up_costs(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator) -> None:
    """Put tables in place of predictions, whose GPUs differ in speed, power and memory."""
    by_gpu = {name: random.uniform(0.5, 2.0, 4) for name in GPUS}
    experts, fewest = random.uniform(0.7, 1.3), int(random.choice([1, 1, 1, 4, 16]))

    def tabulate(
        model: object, gpu: Gpu, options: ModelOptions, *_: object, machine: MachineOptions = USUAL
    ) -> StepCosts:
        assert machine == USUAL
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

    def predict_lone(
        model: object, gpu: Gpu, options: ModelOptions, prompt: int, context: int
    ) -> LoneRequest:
        costs = tabulate(model, gpu, options)
        rows = costs.tokens[prompt], costs.decode_cost(1, 1, float(context))
        seconds = [row[: costs.clocks] for row in rows]
        return LoneRequest(costs.clock_hz, *seconds)

    def predict_largest(
        model: object, gpu: Gpu, options: ModelOptions, power_factor: float
    ) -> TokenCost:
        assert power_factor == 1.0, "no card was remembered, and none is told"
        costs = tabulate(model, gpu, options)
        return TokenCost(costs.clock_hz, costs.tokens[-1] / (len(costs.tokens) - 1))

    for module in (plan_options, option_bounds):
        monkeypatch.setattr(module, "MOST_SEQUENCES", (16, 8))  # fewer requests fill a step
    monkeypatch.setattr(plan_options, "LIMIT_SHARES", (1.0, 0.7))
    monkeypatch.setattr(plan_options, "CLOCK_SHARES", (0.8, 0.6))
    monkeypatch.setattr(option_bounds, "tabulate_step_costs", tabulate)
    monkeypatch.setattr(plan_options, "predict_token_cost", predict_largest)
    monkeypatch.setattr(plan_options, "predict_lone_request", predict_lone)


def check_random_jobs(monkeypatch: pytest.MonkeyPatch, seeds: range, step: int = 1) -> int:
    """Compare the plan of each job with every ``step``-th option; returns how many could be served."""
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
            "force": True,  # gpt2 was made for 1,024 tokens
            "requests": 40,
            "electricity": "0.1USD/kWh",
            "carbon": "400g/kWh",
            "price": "h100-sxm=2USD,h200=3USD,l40s=1USD,b200=4USD,mi300x=2.5USD",
        }
        count = int(random.integers(2, len(GPUS) + 1))
        chips = random.choice(GPUS, size=count, replace=False).tolist()
        try:
            found = plan(str(random.choice(["gpt2", "mixtral-8x7b"])), chips, **asked)
        except WattcastError:
            continue
        served += 1
        pools = parse_pools(asked["pools"], "pools")
        tried = SearchRange(tp=asked["tp"], pools=pools, most_tokens=asked["max_batched_tokens"])
        check_plan(found, chips, tried, f"{seed}: {asked}", step)
    return served


def check_plan(
    found: PlanResult, chips: list[str], tried: SearchRange, job: str, step: int
) -> None:
    """Size every ``step``-th option as if there were no other; none beats the best of its kind, nor
    that the best of all.

    A replica taken away from the best breaks a bound.
    """
    demand = found.demand
    best_of_all = found.best
    assert [kind.gpu for kind in found.kinds] == chips
    for kind in found.kinds:
        best = kind.best
        tables = plan_options.StepTables()
        options = plan_options.list_options(demand, wattcast.load_gpu(kind.gpu), tried)[0]
        for option in options[::step]:
            try:
                full = option_bounds.tabulate_option(demand, option, tables)
                other = size_option(demand, full, (math.inf, math.inf))
            except BadInput:
                continue
            assert other is not None
            assert best is not None, (job, kind.reason, other.make_row())
            assert best.rank <= other.rank, (job, best.make_row(), other.make_row())
        assert best is None or best_of_all.rank <= best.rank
        assert best is not None or kind.reason
    needed = best_of_all.replicas - demand.spare_replicas
    for fewer in range(max(needed - 3, 1), needed):
        failed = option_runs.serve_rate(demand, best_of_all.option, demand.peak_per_s / fewer)[1]
        assert failed, (job, fewer, best_of_all.make_row())


def test_no_option_of_its_own_beats_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan by day against each third option, 300 by night against all."""
    assert check_random_jobs(monkeypatch, range(1, 2), step=3) >= 1


@pytest.mark.slow
def test_an_option_is_not_left_out_for_arrivals_of_a_shorter_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of 40 requests was made longer, and then idled less a request than its bound allowed."""
    assert check_random_jobs(monkeypatch, range(1105, 1106)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 30))
def test_no_option_of_its_own_beats_300_plans(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Thirty plans take about a minute and a half of processor time; ``-n 2`` runs two such parts
    at a time.
    """
    assert check_random_jobs(monkeypatch, range(first, first + 30)) >= 20


JOB: dict[str, Any] = {
    "rate": 30.0,
    "prompt": 700,
    "output": 120,
    "ttft": "p99:1.5s",
    "tpot": "p90:60ms",
    "minimise": "cost",
    "tp": (1, 2),
    "requests": 60,
}


def test_the_best_of_a_kind_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five kinds the H100's best was 32 GPUs, and 30 when it was asked beside the H200 alone: kinds were
    searched together, and one that could not win was left where it was.
    """
    make_up_costs(monkeypatch, np.random.default_rng(7))
    price = "h100-sxm=2,h200=3,l40s=1,b200=4,mi300x=2.5"
    together = plan("gpt2", GPUS, price=price, **JOB)
    assert [kind.gpu for kind in together.kinds] == list(GPUS)
    for kind in together.kinds:
        alone = plan("gpt2", kind.gpu, price=price, **JOB)
        assert [made.make_row() for made in alone.plans] == [made.make_row() for made in kind.plans]
    ranked = [kind.best.rank for kind in together.ranked_kinds if kind.best is not None]
    assert ranked == sorted(ranked)
    assert together.best.rank == ranked[0]


def test_every_kind_has_a_plan_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_costs(monkeypatch, np.random.default_rng(7))
    job = JOB | {"power_limits": ("600W",), "price": "h100-sxm=2,b200=4,l40s=1"}
    found = plan("gpt2", ("h100-sxm", "b200", "l40s", "h200"), **job)
    kinds = {kind["gpu"]: kind for kind in found.to_dict()["kinds"]}
    assert kinds["h100-sxm"]["best"]["gpu"] == "h100-sxm"
    assert kinds["h100-sxm"]["reason"] is None
    assert kinds["l40s"]["best"] is None
    assert "350 W" in kinds["l40s"]["reason"]  # its highest power limit
    assert "no price of the h200" in kinds["h200"]["reason"]
    console = Console(width=200, file=io.StringIO())
    print_plan(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in kinds)


def test_an_interrupted_plan_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_costs(monkeypatch, np.random.default_rng(7))

    def interrupt(line: str) -> None:
        if "b200" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(plan_search, "PROGRESS_S", 0.0)
    lines: list[str] = []
    with pytest.raises(capacity_plan.PlanInterrupted) as caught:
        plan("gpt2", ("h200", "b200"), price="2/h", progress=interrupt, **JOB)
    result = caught.value.result
    assert result.best.option.gpu.name == "h200"
    assert [kind.is_complete for kind in result.kinds] == [True, False]
    assert plan("gpt2", "h200", price="2/h", progress=lines.append, **JOB).is_complete
    assert lines
    assert all(line.startswith("h200: ") for line in lines)


def test_processes_find_what_one_process_finds() -> None:
    job: dict[str, Any] = {"rate": "20/s", "tpot": "p90:30ms", "tp": "1", "requests": 20}
    alone = plan("gpt2", "h200,h100-sxm", **job).to_dict()
    assert plan("gpt2", "h200,h100-sxm", workers=2, **job).to_dict() == alone
    with pytest.raises(BadInput, match="workers: expected one or more"):
        plan("gpt2", "h200", workers=0, **job)


@pytest.mark.slow
def test_an_interrupt_ends_the_processes_and_keeps_what_they_have() -> None:
    """The first line that tells of a plan is answered by an interrupt, as Ctrl-C is."""

    def interrupt(line: str) -> None:
        if "best so far" in line:
            raise KeyboardInterrupt

    job: dict[str, Any] = {"rate": "50/s", "prompt": 2000, "output": 500, "tpot": "p99:40ms"}
    with pytest.raises(capacity_plan.PlanInterrupted) as caught:
        plan("qwen3-32b", "h100-sxm,h200,l40s", workers=2, progress=interrupt, **job)
    result = caught.value.result
    assert result.plans
    assert not result.is_complete
    assert [kind.gpu for kind in result.kinds] == ["h100-sxm", "h200", "l40s"]


def test_a_kind_that_cannot_serve_is_refused_without_a_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An L40S that could not meet the limits took 133 s of simulations before it was refused."""

    def serve(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be simulated")

    monkeypatch.setattr(option_runs, "serve_trace", serve)
    monkeypatch.setattr(option_bounds, "tabulate_step_costs", serve)
    job: dict[str, Any] = {"rate": "50/s", "prompt": 2000, "output": 500, "tpot": "p99:4ms"}
    with pytest.raises(BadInput, match="a further token takes at least"):
        plan("qwen3-32b", "l40s", **job)


def test_a_brief_run_has_the_verdict_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_costs(monkeypatch, np.random.default_rng(3))
    found = plan("gpt2", "h200", price="2/h", **JOB)
    verdicts = []
    for made in found.plans:
        for share in np.linspace(0.5, 4.0, 11):
            rate = share * made.capacity_per_s
            option = replace(made.option, most_per_s=math.inf)
            whole = option_runs.serve_rate(found.demand, option, rate)[1]
            brief = option_runs.run_at_rate(found.demand, option, rate, is_brief=True)
            assert bool(whole) == bool(brief.broken), (str(option), rate)
            verdicts.append(bool(whole))
    assert 0 < sum(verdicts) < len(verdicts)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_limit_that_is_never_reached_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A run is taken for smaller batch limits that it never reached, and is the same under them."""
    make_up_costs(monkeypatch, np.random.default_rng(seed))
    found = plan("gpt2", "h200", price="2/h", **JOB)
    demand = found.demand
    best = replace(found.plans[0].option, most_per_s=math.inf)
    rate = 0.2 * found.plans[0].capacity_per_s
    for is_brief in (False, True):
        run = option_runs.run_at_rate(demand, best, rate, is_brief=is_brief)
        least = run.most_running
        assert 1 < least < best.max_seqs
        assert run.holds_for_limit(least, demand)
        assert not run.holds_for_limit(least - 1, demand)
        limited = [
            option_runs.run_at_rate(demand, replace(best, max_seqs=seqs), rate, is_brief=is_brief)
            for seqs in (least, least - 1)
        ]
        assert run.broken == limited[0].broken
        assert run.result is not None
        same, other = (one.result for one in limited)
        assert same is not None
        assert same.last_token_s.tolist() == run.result.last_token_s.tolist()
        if other is not None:
            assert other.last_token_s.tolist() != run.result.last_token_s.tolist()


ALL_OPTIONS = [pytest.param(seed, 1, marks=pytest.mark.slow) for seed in range(4)]


@pytest.mark.parametrize(("seed", "step"), [(0, 4), *ALL_OPTIONS])
def test_no_long_run_serves_more_than_arithmetic_allows(
    monkeypatch: pytest.MonkeyPatch, seed: int, step: int
) -> None:
    """Beyond the bound of its steps a replica breaks a latency, or its queue grows without end."""
    random = np.random.default_rng(seed)
    make_up_costs(monkeypatch, random)
    job = JOB | {"ttft": None, "tpot": f"p90:{random.uniform(0.02, 0.08):.3f}s"}
    found = plan("gpt2", "h200", price="2/h", **job)
    demand = found.demand
    tables = plan_options.StepTables()
    tried = SearchRange(tp=(1, 2), most_tokens=(8192, 512))
    options, _ = plan_options.list_options(demand, wattcast.load_gpu("h200"), tried)
    for option in options[::step]:
        full = option_bounds.tabulate_option(demand, option, tables)
        assert full.costs is not None
        rate_per_s = 1.05 * full.most_per_s
        unit = demand.draw_requests(1000)
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        run = serve_trace(trace, full.costs, full.settings)
        is_late = any(bound.measure(run) > bound.seconds for bound in demand.bounds)
        grows = run.length_s > 1.02 * float(trace.arrival_s[-1])
        assert is_late or grows, (str(full), full.max_seqs, full.max_tokens, full.most_per_s)


@pytest.mark.parametrize("draw", range(8))
def test_no_crowd_is_served_faster_than_the_power_limit_allows(draw: int) -> None:
    """Every option was thought as fast under a low power limit as under none, so a plan simulated
    the lowest limits first.
    """
    random = np.random.default_rng(draw)
    demand = ServiceDemand(
        find_language_model("gpt2"),
        rate_per_s=1.0,
        prompt=int(random.integers(200, 900)),
        output=int(random.integers(20, 200)),
    )
    costs = make_costs(power_w=float(random.uniform(450.0, 650.0)), limit_w=700.0)
    option = plan_options.PlanOption(
        wattcast.load_gpu("h200"),
        ModelOptions(),
        math.inf,
        2e9,
        16,
        8192,
        plan_options.ONE_POOL,
    )
    bounds, served = [], []
    for limit_w in (math.inf, 700.0, 500.0, 350.0):
        tables = plan_options.StepTables()
        limited = replace(option, power_limit_w=limit_w)
        key = (limited.gpu.name, limited.shared, limited.clock_hz, limit_w)
        tables.set_to[key] = costs.limit_power(limit_w)
        full = option_bounds.tabulate_option(demand, limited, tables)
        bounds.append(full.most_per_s)
        crowd = replace(demand.draw_requests(200), arrival_s=np.zeros(200))
        run = serve_trace(crowd, costs.limit_power(limit_w), full.settings)
        served.append(200 / run.length_s)
    assert all(bound >= rate for bound, rate in zip(bounds, served, strict=True))
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.9 * bounds[0]


@pytest.mark.parametrize(
    ("price", "rents"),
    [
        ("2.5/h", {"": 2.5}),
        ("2.5", {"": 2.5}),
        ("h100-sxm=2.5,b200=4", {"h100-sxm": 2.5, "b200": 4.0}),
        ("h100-sxm=2.5USD/h, b200=4 USD", {"h100-sxm": 2.5, "b200": 4.0}),
        (["h100=2.5/h", "b200=4"], {"h100-sxm": 2.5, "b200": 4.0}),
        ("h200=0.06/min,3", {"h200": 3.6, "": 3.0}),
    ],
)
def test_prices_as_people_write_them(price: str | list[str], rents: dict[str, float]) -> None:
    hourly = {name: 3600.0 * each for name, each in parse_prices(price).rent_per_s.items()}
    assert hourly == pytest.approx(rents)


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
        1.25 * row["energy_j_per_request"] * 1e-7 + row["gpus"] / 20 * 1e-3
    )  # hosts take a quarter of the GPUs' energy besides
    assert row["carbon_g_per_request"] == pytest.approx(1.25 * row["energy_j_per_request"] * 1e-4)
    assert row["meter_power_w"] == pytest.approx(1.25 * row["power_w"])
    assert json.loads(json.dumps(found.to_dict()))["best"]["gpus"] == row["gpus"]


def test_a_hall_is_filled_at_its_meter(found: PlanResult) -> None:
    """Replicas by their mean power with hosts and PUE, and by the limit of all their cards."""
    prices = replace(found.demand.prices, pue=1.2)
    demand = replace(found.demand, power_budget_w=1e6, host_share=0.3, prices=prices)
    best = replace(found.best, demand=demand)
    row = best.make_row()
    hall = row["hall"]
    each_w = row["power_w"] / row["replicas"] * 1.3 * 1.2
    assert hall["replicas"] == math.floor(1e6 / each_w)
    assert hall["power_w"] <= 1e6 < hall["power_w"] + each_w
    assert hall["gpus"] == hall["replicas"] * best.option.gpus
    assert hall["safe_gpus"] == math.floor(1e6 / (700.0 * 1.3 * 1.2))
    assert hall["safe_gpus"] < hall["gpus"]
    tokens_per_s = found.best.output_tokens_per_s / found.best.replicas
    assert hall["output_tokens_per_s"] == pytest.approx(hall["replicas"] * tokens_per_s)
    assert found.best.make_row()["hall"] is None


def test_the_command_fills_a_hall(call: Any) -> None:
    words = "plan gpt2 --gpu h200 --rate 2/s --prompt 16 --output 4 --tp 1 --requests 20"
    done = call(*words.split(), "--power-budget", "10MW", "--electricity", "0.1/kWh")
    assert done.code == 0, done.err
    assert "A hall of 10 MW at its meter holds" in done.out
    assert "hosts, network and fans take 25%" in done.out


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
    steps = StepRange(max_tokens=512, max_seqs=32, longest_context=512)
    table = tabulate_step_costs(spec, chip, ModelOptions.from_names(stack="engine"), steps)
    told = tabulate_step_costs(
        spec, chip, ModelOptions.from_names(stack="engine"), steps, clock_hz=1.3e9
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


def test_prompts_of_their_own_engines_keep_a_time_per_token_that_mixed_steps_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 6000 tokens holds decodes back for longer than 100 ms; engines that only decode
    do not meet it.
    """
    for module in (plan_options, option_bounds):
        monkeypatch.setattr(module, "MOST_SEQUENCES", (32,))  # fewer requests fill a step
    asked: dict[str, Any] = {
        "rate": "4/s",
        "prompt": 6000,
        "output": 60,
        "tp": (1,),
        "requests": 60,
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
        (("--tp", "one"), "whole number"),
        (("--tp", "5"), "h200, tp 5: gpt2: tp: expected a divisor of heads=12"),
        (("--pp", "0"), "whole number"),
        (("--ep", "2"), "1 for a model without experts"),
        (("--minimise", "cost"), "price"),
        (("--minimise", "carbon"), "--carbon"),
        (("--minimise", "noise"), "gpus, energy, cost, carbon"),
        (("--ttft", "p99:1us"), "even for a single request"),
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
