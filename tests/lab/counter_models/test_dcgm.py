"""Logs of DCGM and GPU metrics of Nsight Systems; the files are made up in the forms that these
tools write.
"""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.busy_share_logs import read_dcgm_table
from wattcast.measure.power_logs import read_power_log

FIELDS = {
    "POWER": "DCGM_FI_DEV_POWER_USAGE",
    "SMCLK": "DCGM_FI_DEV_SM_CLOCK",
    "MMCLK": "DCGM_FI_DEV_MEM_CLOCK",
    "TENSO": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DRAMA": "DCGM_FI_PROF_DRAM_ACTIVE",
}


def made_rounds(count: int = 80) -> list[dict[str, float]]:
    """A card of 100 W, 300 W more for tensor cores at full use and 150 W for memory; loads last ten
    rounds.
    """
    shares = (
        np.random.default_rng(7).uniform(0.0, 1.0, (count // 10, 2)).repeat(10, axis=0).round(3)
    )
    return [
        {
            "POWER": round(100.0 + 300.0 * t + 150.0 * d, 3),
            "SMCLK": 1980,
            "MMCLK": 3201,
            "TENSO": t,
            "DRAMA": d,
        }
        for t, d in shares.tolist()
    ]


def as_dmon(rounds: list[dict[str, float]]) -> str:
    lines = []
    for n, values in enumerate(rounds):
        if n % 20 == 0:  # the heading comes again and again
            lines += ["# Entity  " + "  ".join(FIELDS), "      Id"]
        lines.append("   GPU 0  " + "  ".join(f"{values[name]:g}" for name in FIELDS))
    return "\n".join([*lines, "   GPU 0  N/A  1980  3201  0.1  0.1"]) + "\n"


def as_scrapes(rounds: list[dict[str, float]]) -> str:
    lines = []
    for values in rounds:
        for name, field in FIELDS.items():
            lines += [
                f"# HELP {field} made up",
                f'{field}{{gpu="0",UUID="GPU-0",modelName="made up"}} {values[name]:g}',
            ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", [as_dmon, as_scrapes])
def test_units_cost_what_they_cost(form, tmp_path: Path) -> None:
    path = tmp_path / "dcgm.log"
    path.write_text(form(made_rounds()))
    table = read_dcgm_table(path)
    assert (table.rows, table.benchmarks) == (80, 8)
    assert [p.event for p in table.predictors] == ["tensor_busy_cycle", "dram_busy_cycle"]
    env = Environment(io.StringIO(), io.StringIO())
    argv = [
        "lab",
        "fit",
        "counters",
        str(path),
        "--form",
        "dcgm",
        "--model",
        "rate",
        "--no-advice",
        "--json",
    ]
    assert main(argv, env) == 0
    said = json.loads(env.stdout.getvalue())
    largest = {c["name"]: c["value"] for c in said["coefficients"]}
    assert largest["tensor_busy_cycle"] * 1.98e9 == pytest.approx(300.0, rel=0.02)
    assert largest["dram_busy_cycle"] * 3.201e9 == pytest.approx(150.0, rel=0.02)
    assert said["models"][0]["held_out"]["benchmark"]["mape"] < 1.0
    assert read_power_log(path, 1.0).form == "DCGM"


def test_a_log_without_units_says_what_to_collect(tmp_path: Path) -> None:
    path = tmp_path / "dcgm.log"
    path.write_text("#Entity POWER SMCLK MMCLK\nGPU 0 100 1980 3201\n")
    with pytest.raises(BadInput, match="units such as TENSO"):
        read_dcgm_table(path)
    path.write_text(as_dmon([{**made_rounds(10)[0], "TENSO": 45.0}]))
    with pytest.raises(BadInput, match="Percent instead of shares"):
        read_dcgm_table(path)


METRICS = (
    "GPC Clock Frequency [MHz]",
    "Tensor Active [Throughput %]",
    "DRAM Read Bandwidth [Throughput %]",
    "DRAM Write Bandwidth [Throughput %]",
)


def write_nsys(path: Path, samples: list[tuple[float, ...]], gpus: int = 1) -> Path:
    """A database of ``nsys profile --gpu-metrics-devices``: a sample every millisecond, the clock
    in Hz.
    """
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as base:
        base.execute(
            "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INT, metricId INT, metricName TEXT)"
        )
        base.execute(
            "CREATE TABLE GPU_METRICS (timestamp INT, typeId INT, metricId INT, value INT)"
        )
        for gpu in range(gpus):
            base.executemany(
                "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, ?, ?)",
                [(512 + gpu, n, name) for n, name in enumerate(METRICS)],
            )
            rows = [
                (i * 1_000_000, 512 + gpu, n, v)
                for i, each in enumerate(samples)
                for n, v in enumerate(each)
            ]
            base.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", rows)
        base.commit()
    return path


def test_gpu_metrics_of_nsys_give_watts_over_time(tmp_path: Path) -> None:
    """A model of a DCGM log applies: 100 W, 300 W of tensor cores and 150 W of memory at full use."""
    log, model = tmp_path / "dcgm.log", tmp_path / "model.yaml"
    log.write_text(as_dmon(made_rounds()))
    fit = [
        "lab",
        "fit",
        "counters",
        str(log),
        "--form",
        "dcgm",
        "--model",
        "rate",
        "--no-advice",
        "--out",
        str(model),
    ]
    assert main(fit, Environment(io.StringIO(), io.StringIO())) == 0
    path = write_nsys(
        tmp_path / "run.sqlite", [(1.98e9, 9, 9, 9), (1.98e9, 50, 20, 20), (1.98e9, 0, 0, 0)]
    )

    def estimate(*more: str) -> tuple[int, str, str]:
        env = Environment(io.StringIO(), io.StringIO())
        code = main(
            ["lab", "estimate", str(path), "--model", str(model), "--counters", str(path), *more],
            env,
        )
        return code, env.stdout.getvalue(), env.stderr.getvalue()

    code, out, err = estimate("--memory-clock", "3201MHz", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["clock_hz"] == pytest.approx(1.98e9)
    assert said["traced_s"] == pytest.approx(
        2e-3
    )  # a sample stands for the time since the one before
    assert said["power_w"] == pytest.approx(100.0 + (150.0 + 60.0) / 2.0, rel=0.02)
    picture = tmp_path / "watts.png"
    code, _, err = estimate("--memory-clock", "3201MHz", "--plot", str(picture))
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = estimate()
    assert (code, "--memory-clock" in err) == (2, True)
    write_nsys(path, [(1980.0, 50, 20, 20)] * 2, gpus=2)
    code, _, err = estimate("--memory-clock", "3201MHz")
    assert (code, "GPU metrics of one GPU" in err) == (2, True)
    write_nsys(path, [(1980.0, 50)] * 2)
    code, _, err = estimate("--memory-clock", "3201MHz")
    assert (code, "dram_busy_cycle" in err) == (2, True)
    with closing(sqlite3.connect(path)) as base:
        base.execute("DROP TABLE GPU_METRICS")
    code, _, err = estimate("--memory-clock", "3201MHz")
    assert (code, "--gpu-metrics-devices" in err) == (2, True)
