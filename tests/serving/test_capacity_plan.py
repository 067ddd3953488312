"""Plans: the equations against a simulation, and what users ask of ``wattcast plan``."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wattcast
from wattcast.core.errors import ExitCode, WattcastError
from wattcast.hardware import load_gpu
from wattcast.predictor import prices as money
from wattcast.predictor.bundle import bundle_for
from wattcast.serving import capacity_plan

ASKED = {"rate": "20/s", "prompt": 1000, "output": 300, "ttft": "500ms", "tpot": "40ms"}


def served(gpus: list[str], prices: money.Prices | None = None, minimise: str = "gpus", tp=(), **changes):
    model = changes.pop("model", "llama3-8b")
    return capacity_plan.plan_serving(
        capacity_plan.describe_service(model, **(ASKED | changes)), gpus, prices or money.Prices(), minimise, tp
    )


@pytest.mark.parametrize(("batch", "output"), [(1, 5), (4, 20), (16, 50), (7, 300)])
def test_rate_and_time_per_token_are_those_of_a_full_replica(batch: int, output: int) -> None:
    """Sequences end one by one; a new prompt is prefilled between two steps whenever a place is free."""
    prefill_s, step_s = 0.03, 0.011
    left = [1 + (output - 1) * k // batch for k in range(batch)]  # spread out, as a steady state is
    clock_s, served_count, gaps = 0.0, 0, []
    for _ in range(40 * output):
        for place in range(batch):
            if left[place] == 0:
                clock_s += prefill_s
                served_count += 1
                left[place] = output - 1
        clock_s += step_s
        gaps.append(clock_s)
        left = [tokens - 1 for tokens in left]
    asked = capacity_plan.describe_service("gpt2", "1/s", 10, output)
    rate = 1.0 / (prefill_s + asked.steps * step_s / batch)
    mean_gap_s = (gaps[-1] - gaps[0]) / (len(gaps) - 1)
    tpot_s = float(capacity_plan.tpot_s(asked, np.array(step_s), np.array(prefill_s), np.array(batch)))
    assert served_count / clock_s == pytest.approx(rate, rel=0.03)  # 40 lives of a sequence: ends count for 1 in 40
    assert mean_gap_s == pytest.approx(tpot_s, rel=0.03)


def test_a_plan_adds_up() -> None:
    prices = money.parse_prices("0.36USD/kWh", "360g/kWh", ["h200=3.6USD/h"])
    (plan,) = served(["h200"], prices)
    row = plan.row
    assert row["prefill_share"] + row["decode_share"] + row["idle_share"] == pytest.approx(1.0)
    assert row["energy_j_per_request"] * 20 == pytest.approx(row["power_w"])
    assert row["energy_j_per_token"] * 300 == pytest.approx(row["energy_j_per_request"])
    assert row["cost_per_request"] == pytest.approx(row["energy_j_per_request"] * 1e-7 + row["gpus"] / 20 * 1e-3)
    assert row["carbon_g_per_request"] == pytest.approx(row["energy_j_per_request"] * 1e-4)
    assert row["ttft_s"] <= 0.5
    assert row["tpot_s"] <= 0.04
    assert row["memory_byte"] <= load_gpu("h200").memory.capacity_byte


def test_times_are_those_of_predictions() -> None:
    (plan,) = served(["h200"])
    row = plan.row
    at = {"clock": row["clock_hz"], "host_launch": "0us", "stack": "engine"}
    prefill = wattcast.predict("llama3-8b", "h200", phase="prefill", seq=1000, **at)
    step = wattcast.predict("llama3-8b", "h200", phase="decode", seq=1149, batch=row["batch"], **at)
    assert row["ttft_s"] == pytest.approx(float(prefill.latency_s + step.latency_s), rel=1e-9)
    assert row["tpot_s"] == pytest.approx(float(step.latency_s + prefill.latency_s * row["batch"] / 299), rel=1e-9)


def test_an_idle_service_costs_idle_power() -> None:
    (plan,) = served(["h200"], rate="1/h", minimise="energy")
    assert plan.row["gpus"] == 1
    assert plan.row["idle_share"] > 0.99
    gpu = load_gpu("h200")
    idle_w = float(capacity_plan.idle_power_w(bundle_for(gpu), np.array([plan.row["clock_hz"]]))[0])
    assert plan.row["energy_j_per_request"] == pytest.approx(3600 * idle_w, rel=0.01)
    assert plan.binds.startswith("nothing")


def test_more_requests_need_more_gpus_and_never_more_energy_each() -> None:
    rows = [served(["h100-sxm"], rate=rate)[0].row for rate in ("5/s", "50/s", "500/s")]
    gpus = [row["gpus"] for row in rows]
    assert gpus == sorted(gpus)
    assert gpus[2] >= 5 * gpus[1] > 5 * gpus[0] / 2
    assert served(["h100-sxm"], rate="50/s", headroom="50%")[0].row["gpus"] > gpus[1]


def test_tighter_limits_bind() -> None:
    loose, tight = served(["h100-sxm"], rate="200/s")[0], served(["h100-sxm"], rate="200/s", tpot="12ms")[0]
    assert tight.row["gpus"] > loose.row["gpus"]
    assert "TPOT" in tight.binds
    assert tight.row["batch"] < loose.row["batch"]


def test_memory_binds_where_the_cache_is_long() -> None:
    (plan,) = served(["h100-sxm"], rate="20/s", prompt=8000, output=1000, ttft="10s", tpot="1s")
    assert "memory" in plan.binds


def test_a_model_too_large_for_one_gpu_is_split() -> None:
    (plan,) = served(["h100-sxm"], model="llama3-70b", rate="2/s", ttft="5s", tpot="100ms")
    assert plan.row["tp"] >= 2
    assert plan.row["gpus"] == plan.row["tp"] * plan.row["replicas"]
    with pytest.raises(WattcastError, match="memory: one sequence needs"):
        served(["h100-sxm"], model="llama3-70b", rate="2/s", tp=(1,))


def test_the_aim_decides() -> None:
    few, lean = served(["h200"], rate="200/s")[0].row, served(["h200"], rate="200/s", minimise="energy")[0].row
    assert few["gpus"] <= lean["gpus"]
    assert lean["energy_j_per_request"] <= few["energy_j_per_request"]
    prices = money.parse_prices(rent=["h200=3USD/h", "l4=100USD/h"])
    assert [p.gpu for p in served(["l4", "h200"], prices, "cost")] == ["h200", "l4"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ttft": "1us"}, "TTFT: at least"),
        ({"tpot": "1us"}, "TPOT: at least"),
        ({"rate": "20"}, "rate"),
        ({"rate": "0/s"}, "above zero"),
        ({"rate": "-3/s"}, "above zero"),
        ({"prompt": 0}, "prompt"),
        ({"output": 0}, "output"),
        ({"ttft": "5W"}, "ttft"),
        ({"headroom": "-5%"}, "zero or more"),
        ({"model": "resnet50"}, "language model"),
        ({"model": "llama9"}, "unknown model"),
        ({"minimise": "carbn"}, "unknown objective"),
        ({"minimise": "cost"}, "--tariff"),
        ({"dtype": "fp61"}, "dtype"),
    ],
)
def test_what_cannot_be_is_explained(changes: dict, says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        served(["h200"], **changes)


def test_one_output_token_is_all_prefill() -> None:
    row = served(["h200"], output=1)[0].row
    assert row["decode_share"] == 0.0
    assert row["tpot_s"] == 0.0


PLAN = (
    "plan",
    "llama3-8b",
    "--rate",
    "20/s",
    "--prompt",
    "1000",
    "--output",
    "300",
    "--ttft",
    "500ms",
    "--tpot",
    "40ms",
)


def test_the_command(call) -> None:
    done = call(*PLAN, "--gpus", "h100-sxm,h200", "--tariff", "0.12USD/kWh", "--carbon", "france", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert {plan["gpu"] for plan in told["plans"]} == {"h100-sxm", "h200"}
    assert told["currency"] == "USD"
    assert any("no queues" in note for note in told["assumptions"])
    done = call(*PLAN, "--gpus", "h200,tegra-k1")
    assert done.code == 0, done.err
    assert "tegra-k1 cannot serve it: " in done.out


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ((*PLAN, "--gpus", "h20"), ExitCode.BAD_INPUT, "Closest: h200"),
        ((*PLAN, "--gpus", "h200", "--tp", "two"), ExitCode.BAD_INPUT, "tp"),
        ((*PLAN, "--gpus", "h200", "--tp", "3"), ExitCode.BAD_INPUT, "tp 3"),
        ((*PLAN, "--gpus", "tegra-k1"), ExitCode.BAD_INPUT, "memory"),
        (PLAN, ExitCode.BAD_INPUT, "--gpus"),
    ],
)
def test_a_mistake_gets_one_paragraph(call, argv: tuple[str, ...], code: ExitCode, says: str) -> None:
    done = call(*argv)
    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
