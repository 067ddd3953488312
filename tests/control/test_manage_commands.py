"""``wattcast manage`` and ``wattcast lab sensitivity`` as a user meets them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wattcast.cli.command_output import Environment
from wattcast.cli.main import build_command
from wattcast.control import hd7970, policy_comparison, sensitivity_model
from wattcast.control.sensitivity_model import load_shipped_model
from wattcast.core.errors import BadInput, ExitCode
from wattcast.lab.paper_figures.hd7970_figures import measure_table_sensitivities

FIELDS = {
    "ed2_gain_over_default",
    "ed2_gain_over_default_with_probing",
    "ed2_over_oracle",
    "ed2_over_oracle_with_probing",
    "slowdown",
    "power_saving",
    "energy_saving",
}


def test_what_predicts_nothing_starts_without_the_predictor() -> None:
    """Every process that held a card imported it, and so did whatever printed JSON."""
    code = (
        "import sys\n"
        "from wattcast.control import card_daemon, daemon_client\n"
        "assert 'numpy' not in sys.modules\n"
        "from wattcast.control import first_run, live_control, serving_control, watch_card\n"
        "from wattcast.core.strict_files import encode_json\n"
        "assert not {'wattcast.predictor.timeline', 'wattcast.kernels'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def table(tmp_path: Path) -> str:
    lines = []
    for name, follows in (("bound", 0.1), ("free", 1.0)):
        lines.append(name)
        for memory in (810, 3505):
            for core in range(600, 1201, 50):
                time_ms = (
                    10 * (1200 / core) ** follows * (1 if follows == 1.0 or memory == 3505 else 4)
                )
                power = 60 + 60 * (core / 1200) ** 2 + memory / 100
                lines.append(f"{memory},{core},{time_ms:.6f},{power:.6f},{time_ms * power:.6f}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_replay_prints_what_it_promises(call: Any, table: str) -> None:
    done = call("manage", "replay", table, "--default", "1200/3505", "--minimise", "ed2", "--json")
    assert done.code == 0, done.err
    out = json.loads(done.out)
    assert [a["name"] for a in out["applications"]] == ["bound", "free"]
    for application in out["applications"]:
        assert set(application["policies"]) >= {
            "default",
            "static_best",
            "harmonia",
            "oracle",
            "coarse_only",
        }
        for policy in application["policies"].values():
            assert set(policy) >= FIELDS
        oracle, mine = (application["policies"][p] for p in ("oracle", "harmonia"))
        assert oracle["ed2_over_oracle"] == 0.0
        assert mine["ed2_over_oracle"] < 0.01
        assert mine["ed2_over_oracle_with_probing"] >= mine["ed2_over_oracle"] - 1e-9
    free = out["applications"][1]["policies"]["harmonia"]
    assert (
        free["settings"]["memory_clock"] == 810e6
    )  # memory does not matter to it, and its power does
    assert set(out["mean"]["harmonia"]) >= FIELDS
    mean = sum(a["policies"]["harmonia"]["ed2_gain_over_default"] for a in out["applications"]) / 2
    assert out["mean"]["harmonia"]["ed2_gain_over_default"] == pytest.approx(mean, abs=1e-8)
    assert out["plants"][0]["iterations"] == 100


def test_replay_is_a_table_for_people(call: Any, table: str) -> None:
    done = call("manage", "replay", table, "--default", "1200/3505")
    assert done.code == 0
    assert "harmonia" in done.out
    assert "oracle" in done.out


def test_the_table_scores_the_objective_that_was_asked_for(call: Any, table: str) -> None:
    """With --minimise energy it showed gains and distances in ED², in which saving energy looked
    like a loss.
    """
    arguments = (
        "manage",
        "replay",
        table,
        "--default",
        "1200/3505",
        "--minimise",
        "energy",
        "--slowdown",
        "50%",
    )
    shown, plain = call(*arguments).out, json.loads(call(*arguments, "--json").out)
    assert "Energy gain" in shown
    assert "ED²" not in shown
    for application in plain["applications"]:
        for policy in application["policies"].values():
            assert policy["objective_gain_over_default"] == policy["energy_saving"]
    mine = plain["applications"][0]["policies"]["harmonia"]
    assert mine["objective_gain_over_default"] > mine["ed2_gain_over_default"]
    assert f"{mine['objective_gain_over_default']:.2%}" in shown


def test_replay_repeats_with_noise_and_counts_who_is_worse_off(call: Any, table: str) -> None:
    done = call("manage", "replay", table, "--noise", "1%", "--repeats", "5", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["noise"]
    assert found["runs"] == 10
    assert found["share_over_1_percent_worse"] == 0.0
    assert 0.0 <= found["share_over_1_percent_worse_with_probing"] <= 1.0
    assert (
        call("manage", "replay", table, "--repeats", "5").code == ExitCode.BAD_INPUT
    )  # without noise all are alike


def test_replay_takes_several_files_and_a_bound(call: Any, table: str, tmp_path: Path) -> None:
    second = tmp_path / "second.csv"
    second.write_text(Path(table).read_text().replace("bound", "bound2").replace("free", "free2"))
    arguments = ("--minimise", "energy", "--slowdown", "10%", "--iterations", "50", "--json")
    done = call("manage", "replay", table, str(second), *arguments)
    assert done.code == 0, done.err
    out = json.loads(done.out)
    assert len(out["applications"]) == 4
    for application in out["applications"]:
        assert application["policies"]["harmonia"]["slowdown"] <= 0.1 + 1e-9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minimise", "ed3"), "objective"),
        (("--slowdown", "10 W"), "slowdown"),
        (("--slowdown", "-5%"), "slowdown"),
        (("--default", "1/2"), "default"),
        (("--cap", "fast"), "cap"),
        (("--noise", "200%"), "noise"),
        (("--gpu", "h1000"), "gpu"),
        (("--leave-out", "nobody"), "leave out"),
    ],
)
def test_mistakes_are_one_paragraph(
    call: Any, table: str, arguments: tuple[str, str], words: str
) -> None:
    done = call("manage", "replay", table, *arguments)
    assert done.code == ExitCode.BAD_INPUT
    assert words in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--perturbed", "-3"),
        ("replay", "table.csv", "--iterations", "0"),
        ("replay", "table.csv", "--repeats", "-1"),
        ("watch", "--count", "-1"),
        ("run", "--bogus", "--", "true"),
    ],
)
def test_numbers_and_options_that_cannot_be_are_named(
    call: Any, arguments: tuple[str, ...]
) -> None:
    done = call("manage", *arguments)
    assert done.code == ExitCode.BAD_INPUT
    assert next(a for a in arguments if a.startswith("--")) in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("watch", "--period", "0s"),
        ("run", "--period", "1us", "--", "true"),
        ("run", "--progress", "/nonexistent/folder/file", "--", "true"),
    ],
)
def test_mistakes_are_told_before_a_card_is_asked(call: Any, arguments: tuple[str, ...]) -> None:
    done = call("manage", *arguments)
    assert done.code == ExitCode.BAD_INPUT
    assert arguments[1] in done.err


def test_simulate_in_json_with_perturbed_plants_and_both_means(call: Any) -> None:
    done = call("manage", "simulate", "--perturbed", "2", "--json")
    assert done.code == 0, done.err
    out = json.loads(done.out)
    assert len(out["applications"]) == 14
    assert out["plants"][0]["settings"] == 448
    assert out["perturbed"]["ed2_over_oracle_with_probing"]["plants"] == 2
    mean = out["mean"]["harmonia"]
    assert {
        "ed2_gain_geometric_mean_with_probing",
        "ed2_gain_geometric_mean_2_with_probing",
    } <= set(mean)


def simulated_a100(call: Any) -> dict[str, Any]:
    arguments = ("--gpu", "a100-pcie-40gb", "--minimise", "energy", "--slowdown", "10%", "--json")
    done = call("manage", "simulate", "llama3-8b", *arguments)
    assert done.code == 0, done.err
    out: dict[str, Any] = json.loads(done.out)
    return out


def test_the_controller_leaves_the_plateau_a_power_cap_makes(call: Any) -> None:
    """Capped at 250 W, all clocks above 1217 MHz are the same state, and the first step below it
    saves nothing yet; the controller settled there, 8.6 % above the oracle's energy. The oracle
    goes on to 1110 MHz."""
    policies = simulated_a100(call)["applications"][0]["policies"]
    assert policies["harmonia"]["objective_over_oracle"] < 0.02


def test_simulate_a_catalogue_gpu_through_our_own_predictor(call: Any) -> None:
    out = simulated_a100(call)
    assert "predicted" in out["plants"][0]["source"]
    policies = out["applications"][0]["policies"]
    assert policies["harmonia"]["slowdown"] <= 0.1 + 1e-9
    assert policies["race_to_idle"]["energy_saving"] < policies["oracle"]["energy_saving"]


def test_simulate_takes_the_options_of_a_workload(call: Any) -> None:
    """A decode step and a large prompt, which the power limit holds, have other best clocks."""
    slowdowns = []
    for options in (("--phase", "decode", "--batch", "1"), ("--batch", "8", "--seq", "1024")):
        done = call(
            "manage",
            "simulate",
            "llama3-8b",
            "--gpu",
            "h200",
            *options,
            "--minimise",
            "energy",
            "--json",
        )
        assert done.code == 0, done.err
        slowdowns.append(json.loads(done.out)["applications"][0]["policies"]["oracle"]["slowdown"])
    assert abs(slowdowns[0] - slowdowns[1]) > 0.01
    assert (
        call("manage", "simulate", "gpt2", "--gpu", "h200", "--phase", "sideways").code
        == ExitCode.BAD_INPUT
    )


@pytest.mark.parametrize("arguments", [("simulate", "llama3-8b"), ("simulate", "--gpu", "h200")])
def test_simulate_says_what_is_missing(call: Any, arguments: tuple[str, ...]) -> None:
    done = call("manage", *arguments)
    assert done.code == ExitCode.BAD_INPUT
    assert "workloads" in done.err


def test_serving_and_a_budget_are_rehearsed_before_a_card_is_touched(call: Any) -> None:
    arguments = ("rehearse", "llama3-8b", "--rate", "20/s", "--seconds", "2min", "--json")
    done = call("manage", *arguments, "--gpus", "2", "--site-power", "700W")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["seconds_over_budget"] == 0
    assert found["most_drawn_w"] <= 700.0 < found["most_wanted_w"]
    assert found["minutes_kept_without_budget"] == 1.0
    assert call("manage", *arguments, "--ttft", "5W").code == ExitCode.BAD_INPUT


def test_requests_of_a_file_are_replayed_beside_an_oracle(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = [f"{0.3 * place},{200 + 7 * place},{20 + place}" for place in range(80)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    arguments = ("manage", "rehearse", "llama3-8b", "--trace", str(path), "--json")
    done = call(*arguments, "--speed", "0.5", "--ttft", "1s")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["requests"] == 80
    assert found["minutes_kept_of_top"] == found["minutes_kept_at_top"] == 1
    assert 0.1 < found["saving"] <= found["oracle_saving"]
    assert call(*arguments, "--gpus", "2").code == ExitCode.BAD_INPUT
    assert call(*arguments, "--off", "60%").code == ExitCode.BAD_INPUT


def test_the_unit_of_the_daemon_is_printed(call: Any) -> None:
    done = call("manage", "daemon", "--unit")
    assert done.code == 0, done.err
    assert "manage daemon --group wattcast" in done.out
    assert "@WATTCAST@" not in done.out
    assert "NoNewPrivileges=yes" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("daemon", "--clocks", "2GHz:1GHz"),
        ("daemon", "--limits", "300W"),
        ("daemon", "--group", "no such"),
    ],
)
def test_mistakes_about_a_scope_are_told(call: Any, arguments: tuple[str, ...]) -> None:
    done = call("manage", *arguments)
    assert done.code == ExitCode.BAD_INPUT
    assert arguments[1] in done.err


def test_figures_are_saved(call: Any, table: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = call("manage", "replay", table, "--figures", str(tmp_path / "figures"))
    assert done.code == 0, done.err
    assert len(list((tmp_path / "figures").glob("*.png"))) >= 5


def fit_command(*arguments: str) -> tuple[str, str]:
    env = Environment(io.StringIO(), io.StringIO(), {})
    build_command("lab sensitivity").main(list(arguments), standalone_mode=False, obj=env)
    return env.stdout.getvalue(), env.stderr.getvalue()


def test_an_exported_table_gives_the_shipped_predictors_back(call: Any, tmp_path: Path) -> None:
    table, model = tmp_path / "table.csv", tmp_path / "model.yaml"
    assert call("manage", "simulate", "--export", str(table), "--json").code == 0
    out, _ = fit_command(str(table), "--out", str(model), "--json")
    result = json.loads(out)
    assert result["kernels"] == 32
    assert result["error"]["compute"] < 0.08
    fitted, shipped = (
        sensitivity_model.read_sensitivity_model(model),
        load_shipped_model("hd7970_simulated"),
    )
    for side, stored in ((fitted.compute, shipped.compute), (fitted.bandwidth, shipped.bandwidth)):
        assert dict(side.coefficients) == pytest.approx(
            dict(stored.coefficients), rel=1e-4, abs=1e-7
        )
    assert call("manage", "simulate", "--sensitivity", str(model), "--json").code == 0
    text, _ = fit_command(str(table))
    assert "compute: error" in text


def test_a_table_reads_back_the_sensitivities_of_the_plant(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    policy_comparison.export_tables(hd7970.load_tables(), path)
    table = sensitivity_model.read_sensitivity_table(path)
    truth = measure_table_sensitivities(hd7970.load_tables())
    for which in ("compute", "bandwidth"):
        assert table.sensitivity[which] == pytest.approx(truth[which], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernel,time_s\na,1\n", "columns"),
        ("kernel,time_s,core_clock,memory_clock\n", "header"),
        ("kernel,time_s,core_clock,memory_clock\na,1,2\n", "cells"),
        ("kernel,time_s,core_clock,memory_clock\na,x,1,1\n", "a number"),
        ("kernel,time_s,core_clock,memory_clock\na,nan,1,1\n", "finite"),
        ("kernel,time_s,core_clock,memory_clock,c\na,1,1,1,1\n", "two or more levels"),
        ("kernel,kernel\na,b\n", "different names"),
    ],
)
def test_broken_tables_to_fit_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        sensitivity_model.read_sensitivity_table(path)
