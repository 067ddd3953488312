"""Advice from profiles whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import synthetic_results

from wattcast.core.errors import BadInput
from wattcast.lab.microbench.microbench_results import keep_first_rounds, read_results
from wattcast.lab.microbench.tuning import tune_export

TIME = "gpu__time_duration.sum"
UNIT = {
    TIME: "nsecond",
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    "lts__t_bytes.sum": "byte",
}
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
EXTRA = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
PIPES = ("fma", "fp64", "alu", "xu", "fp16")
CHIP = 132 * 1.9e9  # cycles of all SMs in a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_results.write(tmp_path_factory.mktemp("results"), repeats=1)


def export(path: Path, *kernels: dict[str, float]) -> Path:
    """An ``ncu --page raw`` table; what a kernel does not name is zero."""
    base = {
        TIME: 1e6,
        "dram__bytes_read.sum": 0.0,
        "dram__bytes_write.sum": 0.0,
        "lts__t_bytes.sum": 0.0,
        PASSES: 0.0,
    }
    base |= {f"sm__inst_executed_pipe_{pipe}.sum": 0.0 for pipe in PIPES}
    names = list(dict.fromkeys([*base, *(name for kernel in kernels for name in kernel)]))
    head = ["ID", "Kernel Name", *names]
    units = ["", "", *(UNIT.get(name, "%" if name == OCCUPANCY else "") for name in names)]
    rows = [
        [str(i), f"kernel{i}", *(str((base | kernel).get(name, 0.0)) for name in names)]
        for i, kernel in enumerate(kernels)
    ]
    path.write_text(
        "\n".join(",".join(f'"{cell}"' for cell in row) for row in (head, units, *rows)) + "\n"
    )
    return path


def advised(path: Path, folder: Path) -> dict[str, object]:
    return {a.bottleneck: a for a in tune_export(path, read_results(folder)).advice}


def test_a_kernel_of_fp64_alone_gains_what_the_two_rates_say(folder: Path, tmp_path: Path) -> None:
    """63.5 against 127 multiply-adds per cycle: half the time, and the power of fp32."""
    count = 1e-3 * 63.5 * CHIP / 32  # warp instructions of a millisecond
    path = export(tmp_path / "p.csv", {"sm__inst_executed_pipe_fp64.sum": count})
    advice = advised(path, folder)["fp64"]
    assert advice.time == pytest.approx(-0.5, abs=1e-6)
    # fp64 drew 520 W, fp32 400 W, both 120 W idle: energy 520 -> 0.5 * 400
    assert advice.energy == pytest.approx(0.5 * 400 / 520 - 1.0, rel=1e-3)
    assert advice.power == pytest.approx(400 / 520 - 1.0, rel=1e-3)


def test_uncoalesced_loads_gain_what_the_curve_says(folder: Path, tmp_path: Path) -> None:
    """32 sectors a request of 4-byte words, each from DRAM: an eighth of the bytes would do."""
    moved = 1e-3 * 1.1 * CHIP * 16
    path = export(
        tmp_path / "p.csv",
        {"dram__bytes_read.sum": moved, SECTORS: moved / 32, REQUESTS: moved / 1024},
    )
    advice = advised(path, folder)["coalescing"]
    assert advice.time == pytest.approx(1.0 / 8.0 - 1.0, rel=1e-2)
    assert advice.time_range[0] <= advice.time <= advice.time_range[1]
    assert "32.0 sectors" in advice.seen


def test_coalesced_loads_and_conflict_free_kernels_get_no_advice(
    folder: Path, tmp_path: Path
) -> None:
    moved = 1e-3 * 1.05 * CHIP * 16
    metrics = {"dram__bytes_read.sum": moved, SECTORS: 4e6, REQUESTS: 1e6, PASSES: 1e6, EXTRA: 0.0}
    assert advised(export(tmp_path / "p.csv", metrics), folder) == {}


def test_conflicts_cost_passes(folder: Path, tmp_path: Path) -> None:
    """Three conflicts an access: four passes, of which one is left."""
    passes = 1e-3 * 31.5 * CHIP / 32
    path = export(tmp_path / "p.csv", {PASSES: passes, EXTRA: 0.75 * passes})
    advice = advised(path, folder)["bank conflicts"]
    assert advice.time == pytest.approx(-0.75, rel=1e-3)
    assert "3.0 conflicts" in advice.seen


def test_what_does_not_limit_the_time_saves_energy_alone(folder: Path, tmp_path: Path) -> None:
    """DRAM sets the time; fp64 work beside it costs joules, not seconds."""
    moved = 1e-3 * 1.05 * CHIP * 16
    metrics = {
        "dram__bytes_read.sum": moved,
        "sm__inst_executed_pipe_fp64.sum": 0.3 * 1e-3 * 63.5 * CHIP / 32,
    }
    advice = advised(export(tmp_path / "p.csv", metrics), folder)["fp64"]
    assert -0.02 < advice.time <= 0.0
    assert -0.2 < advice.energy < -0.05


def test_few_warps_matter_only_where_no_unit_is_busy(folder: Path, tmp_path: Path) -> None:
    quarter = 0.2 * 1e-3 * 127 * CHIP / 32
    path = export(
        tmp_path / "p.csv",
        {"sm__inst_executed_pipe_fma.sum": quarter, OCCUPANCY: 12.5},
        {"sm__inst_executed_pipe_fma.sum": 4.5 * quarter, OCCUPANCY: 12.5},
    )
    advice = tune_export(path, read_results(folder)).advice
    found = {a.kernel: a.time for a in advice if a.bottleneck == "occupancy"}
    assert -0.75 < found["kernel0"] < -0.5  # a fifth of a unit: 8 warps could be 64
    assert "kernel1" not in found


def test_advice_is_ranked_by_joules_and_says_what_it_could_not_judge(
    folder: Path, tmp_path: Path
) -> None:
    count = 1e-3 * 63.5 * CHIP / 32
    few, many = (
        {"sm__inst_executed_pipe_fp64.sum": 0.1 * count, TIME: 1e5},
        {"sm__inst_executed_pipe_fp64.sum": count},
    )
    tuning = tune_export(export(tmp_path / "p.csv", few, many), read_results(folder))
    assert [a.kernel for a in tuning.advice] == ["kernel1", "kernel0"]
    assert tuning.missing["divergence"] == ("smsp__thread_inst_executed_per_inst_executed.ratio",)
    assert "fp64" not in tuning.missing


def test_a_profile_without_time_or_counts_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text('"ID","Kernel Name","sm__cycles_elapsed.max"\n"","","cycle"\n"0","k","5"\n')
    with pytest.raises(BadInput, match=TIME):
        tune_export(path, read_results(folder))
    path.write_text(f'"ID","Kernel Name","{TIME}"\n"","","nsecond"\n"0","k","5"\n')
    with pytest.raises(BadInput, match="no unit's work can be counted"):
        tune_export(path, read_results(folder))


def test_the_command_prints_json_and_refuses_a_device_without_results(
    folder: Path, tmp_path: Path, call
) -> None:
    count = 1e-3 * 63.5 * CHIP / 32
    path = export(tmp_path / "p.csv", {"sm__inst_executed_pipe_fp64.sum": count})
    done = call("lab", "tune", str(path), "--results", str(folder), "--json")
    assert done.code == 0, done.err
    plain = json.loads(done.out)
    assert plain["advice"][0]["bottleneck"] == "fp64"
    assert plain["kernels"][0]["busiest"] == "fp64"
    shown = call("lab", "tune", str(path), "--results", str(folder))
    assert "fp64" in shown.out
    assert "not judged: divergence" in shown.err
    refused = call("lab", "tune", str(path), "--gpu", "l4")
    assert refused.code == 4
    assert "no microbenchmark results of the l4" in refused.err


def test_energies_of_units_are_above_idle(folder: Path, tmp_path: Path) -> None:
    count = 1e-3 * 63.5 * CHIP / 32
    tuning = tune_export(
        export(tmp_path / "p.csv", {"sm__inst_executed_pipe_fp64.sum": count}), read_results(folder)
    )
    (profile,) = tuning.profiles
    assert profile.energy_j == pytest.approx(520.0 * 1e-3, rel=1e-3)
    assert profile.work["fp64"].joules == pytest.approx(400.0 * 1e-3, rel=1e-3)
    assert keep_first_rounds(read_results(folder))["fp64_fma"].power_w == 520.0
