"""Calibrating on public kernel tables: what is read, what is held out, and what the forecast keeps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.calibrate.kernel_rows import load_kernel_rows
from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.table_files import find_tables
from wattcast.calibrate.table_fit import (
    SiblingRows,
    TableCalibration,
    calibrate_rows,
    predict_tables_s,
)
from wattcast.calibrate.table_rows import (
    TableRows,
    held_out,
    read_tables,
)
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.row_tables import database_folder
from wattcast.core.units import Dtype
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.predictor.bundle import Bundle, bundle_for, forecast_bundle
from wattcast.predictor.bundle.calibrated import load_bundle, save_bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_operators import SMALL_TILES, FusedExperts
from wattcast.workload.model_options import WorkloadPhase
from wattcast.workload.operator_types import Linear

GPU = load_gpu("l40s")


def write_products(path: Path, slower: float, count: int = 150, **columns: object) -> Path:
    """Write a table of products as a card would time them whose tensor cores take ``slower`` times
    the cycles.
    """
    draw = np.random.default_rng(3)
    sizes = [tuple(int(x) for x in 64 * 2 ** draw.integers(0, 7, 3)) for _ in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"kernel_source": "torch", "gemm_dtype": "bfloat16", "latency": 1.0} | columns
    pl.DataFrame([{"m": m, "n": n, "k": k} | names for m, n, k in dict.fromkeys(sizes)]).write_csv(
        path
    )
    rows = read_tables([path], GPU).rows
    base = forecast_bundle(GPU)
    truth = replace(
        base,
        corrections={
            g: replace(c, compute=c.compute * slower, l2=c.l2 * slower, fixed_s=c.fixed_s * slower)
            for g, c in base.corrections.items()
        },
    )
    seconds = dict(zip(rows.ops, predict_with_bundle(truth, rows, GPU)[:, 0], strict=True))
    timed = [
        {**row, "latency": 1e3 * seconds[Linear(row["m"], row["n"], row["k"], dtype=Dtype.BF16)]}
        for row in pl.read_csv(path).iter_rows(named=True)
    ]
    pl.DataFrame(timed).write_csv(path)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_products(tmp_path_factory.mktemp("tables") / "l40s.vllm-0.24.0.gemm.csv", 1.4)


@pytest.fixture(scope="module")
def calibrated(table: Path) -> TableCalibration:
    return calibrate_rows(read_tables([table], GPU), GPU)


def test_rows_held_out_of_a_database_stay_so_beside_tables(table: Path) -> None:
    """Joined to tables, which name no held-out rows, a database that does could not be read."""
    own = load_kernel_rows("h200/engine")
    assert own.held_out is not None
    both = read_tables([table, database_folder("h200") / "engine"], GPU).rows
    assert both.held_out is not None
    assert both.held_out.sum() == own.held_out.sum()
    assert both.held_out[-len(own) :].tolist() == own.held_out.tolist()
    twice = read_tables([table, table], GPU).rows
    assert twice.held_out is None
    assert len(twice) == 2 * len(read_tables([table], GPU).rows)


def test_a_calibration_learns_what_the_forecast_missed(calibrated: TableCalibration) -> None:
    assert {error.what for error in calibrated.errors} == {"products bf16"}
    before, after = (
        np.average(
            [getattr(e, name) for e in calibrated.errors],
            weights=[e.rows for e in calibrated.errors],
        )
        for name in ("forecast", "calibrated")
    )
    assert before > 7.0
    assert after < 0.5 * before
    assert calibrated.held_out > 15


def test_rows_of_the_same_processor_teach_a_card_what_it_has_few_rows_of(
    table: Path, calibrated: TableCalibration
) -> None:
    """A card with half of the rows comes nearer with those of its sibling.

    Both take longer by a law of the outputs that no correction has.
    """
    rows = read_tables([table], GPU)
    outputs = np.array([op.n for op in rows.rows.ops], dtype=np.float64)
    waves = 1.0 + 0.3 * np.sin(4.0 * np.log2(outputs))
    slowed = {**rows.rows.number, "latency_s": rows.rows.number["latency_s"] * waves}
    rows = replace(rows, rows=replace(rows.rows, number=slowed))
    few = rows.select_rows(np.arange(len(rows.rows)) % 2 == 0)
    sibling = SiblingRows(GPU, rows)
    alone = calibrate_rows(few, GPU).bundle
    taught = calibrate_rows(few, GPU, siblings=[sibling]).bundle
    judged = rows.select_rows(held_out(rows.rows.ops))
    measured = judged.rows.column("latency_s")

    def error(bundle: Bundle) -> float:
        return float(np.abs(predict_tables_s(judged, GPU, bundle) / measured - 1.0).mean())

    assert error(taught) < error(alone)
    assert "the same processor" in taught.provenance.note


def test_what_a_latency_table_cannot_say_stays_forecast(calibrated: TableCalibration) -> None:
    forecast = forecast_bundle(GPU)
    assert calibrated.bundle.status == "calibrated"
    assert calibrated.bundle.power == forecast.power
    assert calibrated.bundle.corrections["softmax"] == forecast.corrections["softmax"]
    assert "energies: carried over, no watts" in calibrated.bundle.provenance.note


def test_a_saved_calibration_is_small_and_predicts_the_same(
    calibrated: TableCalibration, tmp_path: Path
) -> None:
    file = save_bundle(calibrated.bundle, tmp_path)
    assert file.name == "calibration.yaml"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    work = {"name": "x", "ops": [{"op": "linear", "m": 700, "n": 2048, "k": 1024, "dtype": "bf16"}]}
    one, two = (
        wattcast.predict(work, GPU, bundle=b) for b in (calibrated.bundle, load_bundle(tmp_path))
    )
    assert_allclose([one.latency_s, one.power_w], [two.latency_s, two.power_w], rtol=1e-6)


def test_python_takes_rows_or_a_table(table: Path) -> None:
    with pytest.raises(BadInput, match="one of two"):
        wattcast.calibrate(gpu="l40s")
    with pytest.raises(BadInput, match="one of the b200"):
        wattcast.calibrate(gpu="b200", table=table)


def test_a_kind_of_kernel_without_rows_is_left_alone(calibrated: TableCalibration) -> None:
    """Products in fp32 run on other kernels than those of the table, which was bf16 alone."""
    work = {"name": "x", "ops": [{"op": "linear", "m": 700, "n": 2048, "k": 1024, "dtype": "fp32"}]}
    one, two = (
        wattcast.predict(work, GPU, bundle=b) for b in (calibrated.bundle, forecast_bundle(GPU))
    )
    assert_allclose(one.latency_s, two.latency_s, rtol=1e-12)


def test_shapes_are_held_out_whatever_their_format() -> None:
    ops = [Linear(m, 256, 512, dtype=Dtype.BF16) for m in range(1, 400)]
    away = held_out(ops)
    assert 0.15 < away.mean() < 0.25
    assert (away == held_out([replace(op, dtype=Dtype.FP16) for op in ops])).all()


def test_all_formats_routings_and_libraries_of_experts_are_held_out_together() -> None:
    """The same experts balanced and skewed, or in fp8 and int4, once lay on either side of the
    split.
    """
    ops = [FusedExperts(m, 64, 8, 512, 256, routing="balanced") for m in range(1, 200)]
    others = [
        replace(
            op, routing="power", weights="int4", kernel="marlin", dtype=Dtype.BF16, scales="group"
        )
        for op in ops
    ]
    assert 0.1 < held_out(ops).mean() < 0.3
    assert (held_out(ops) == held_out(others)).all()
    spread = [FusedExperts(m, 8, 1, 512, 256, elsewhere=1792) for m in (256, 500)]
    assert len(set(held_out(spread).tolist())) == 1, "tokens of the busiest GPU follow the routing"


def test_experts_of_old_versions_run_small_tiles_unless_tuned(tmp_path: Path) -> None:
    """A table of vLLM 0.14 on an A100: Mixtral's halves have tuned tiles, a quarter of Qwen3's
    experts have none.
    """
    a100, found = load_gpu("a100-sxm"), {}
    plain = {
        "kernel_source": "vllm_fused_moe",
        "moe_dtype": "bfloat16",
        "hidden_size": 4096,
        "latency": 1.0,
    }
    shared = {"num_tokens": 512, "distribution": "balanced", "moe_tp_size": 2}
    mixtral = plain | shared | {"inter_size": 14336, "topk": 2, "num_experts": 8, "moe_ep_size": 1}
    qwen = plain | shared | {"inter_size": 1536, "topk": 8, "num_experts": 128, "moe_ep_size": 4}
    for version in ("0.14.0", "0.24.0"):
        file = tmp_path / f"a100_sxm.vllm-{version}.moe.csv"
        pl.DataFrame([mixtral, qwen]).write_csv(file)
        ops = read_tables([file], a100).rows.ops
        found[version] = {op.experts: op.kernel for op in ops}
        assert {(op.experts, op.gpus, op.all_tokens, op.elsewhere) for op in ops} == {
            *((8, 1, 512, 0), (32, 4, 512, 3072)),
        }
    assert found == {
        "0.14.0": {8: "triton", 32: SMALL_TILES},
        "0.24.0": {8: "triton", 32: "triton"},
    }


def test_the_newest_version_of_an_engine_is_read_from_any_layout(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.24.0"):
        write_products(tmp_path / "l40s" / "gemm" / "vllm" / version / "gemm_perf.csv", 1.0, 20)
    write_products(tmp_path / "l40s.trtllm-1.3.0rc20.gemm.csv", 1.0, 20)
    frame = pl.read_csv(tmp_path / "l40s.trtllm-1.3.0rc20.gemm.csv")
    frame.write_parquet(tmp_path / "a100_sxm.trtllm-1.3.0rc20.gemm.parquet")
    found, notes = find_tables([tmp_path], GPU)
    assert sorted((file.engine, file.version) for file in found) == [
        ("trtllm", "1.3.0rc20"),
        ("vllm", "0.24.0"),
    ]
    assert notes == ["vllm 0.9.0: 0.24.0 is newer; passed over."]
    assert [file.path.suffix for file in find_tables([tmp_path], load_gpu("a100-sxm"))[0]] == [
        ".parquet"
    ]


def test_rows_with_watts_are_predicted_over_the_second_that_they_ran(tmp_path: Path) -> None:
    """They begin at the top clock, without which long products on an H200 seemed 5 % faster than
    predicted.
    """
    gpu, file = load_gpu("h200"), tmp_path / "h200_sxm.vllm-0.22.0.gemm_power.csv"
    plain = {
        "kernel_source": "x",
        "gemm_dtype": "bfloat16",
        "latency": 1.0,
        "power": 690.0,
        "power_limit": 700,
    }
    pl.DataFrame([{"m": m, "n": 8192, "k": 8192} | plain for m in (1, 4096)]).write_csv(file)
    found, bundle = read_tables([file], gpu), bundle_for(gpu)
    settled_s, short_s, second_s = (
        predict_with_bundle(bundle, found.rows, gpu, s)[:, 0] for s in (None, 0.05, 1.0)
    )
    assert_allclose(predict_tables_s(found, gpu, bundle), second_s, rtol=1e-12)
    large = np.array([op.m > 1 for op in found.rows.ops if isinstance(op, Linear)])
    assert_allclose(
        settled_s[~large], short_s[~large], rtol=1e-12
    )  # bound by memory, below the limit
    assert (short_s < second_s)[large].all()
    assert (second_s < 0.99 * settled_s)[large].all()


def test_rows_are_thinned_by_shape_while_they_are_read(table: Path) -> None:
    few = read_tables([table], GPU, most=5).rows
    assert len(few) <= 15
    assert set(few.ops) <= set(read_tables([table], GPU).rows.ops)


def test_formats_nobody_can_say_are_named(tmp_path: Path) -> None:
    path = write_products(tmp_path / "l40s.vllm-0.24.0.gemm.csv", 1.0, 20)
    rows = pl.read_csv(path)
    pl.concat([rows, rows.with_columns(gemm_dtype=pl.lit("fp3"))]).write_csv(path)
    assert read_tables([path], GPU).notes == (
        f"{path.name}: {len(rows)} rows passed over: format fp3.",
    )


def test_wrong_tables_are_refused_with_what_was_wanted(table: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="one of the a100-sxm-80gb"):
        read_tables([table], load_gpu("a100-sxm"))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no kernel table of the l40s"):
        read_tables([tmp_path], GPU)
    with pytest.raises(BadInput, match="an existing file"):
        read_tables([tmp_path / "none"], GPU)
    few = write_products(tmp_path / "l40s.vllm-0.24.0.gemm.csv", 1.0, 20)
    with pytest.raises(BadInput, match="at least 40"):
        calibrate_rows(read_tables([few], GPU), GPU)


@pytest.mark.parametrize(
    ("card", "sustained"),
    [
        ("GPU-c82ff0d4-6a3f-eec8-e78a-04e128d8fcc9", 31),
        ("GPU-2b391191-a413-c02d-87b5-e0613e6f11a8", 16),
    ],
)
def test_kernels_with_watts_alone_move_energies_to_the_card_that_ran_them(
    card: str, sustained: int
) -> None:
    """Cards differ: memory of these draws less than the mean card's. The steps are of models that
    no fit saw.

    Of the second card's kernels all but two run at the power limit, where only the clock tells what
    they draw."""
    gpu, kernels = load_gpu("h200"), load_kernel_rows("h200")
    own = np.array(kernels.uuid) == card
    rows = kernels.select_rows(own & kernels.is_kind("sustained"))
    assert len(rows) == sustained
    none = ((),) * len(rows)
    found = calibrate_rows(TableRows(rows, none, ("",) * len(rows), ()), gpu)
    decode = load_engine_records("h200").select_kind("decode")
    steps = [row for row in decode if row["card_uuid"] == card and row["held_out"]]
    graphs = []
    for row in steps:
        options = replace(
            read_engine_options(row), batch=row["batch"], seq=round(row["context_mean"])
        )
        graphs.append(
            build_graph(
                load_measured_model(row["model"]), replace(options, phase=WorkloadPhase.DECODE)
            )
        )
    measured_w = np.array([row["power_w"] for row in steps])
    before, after = (
        np.array([predict_graph(graph, gpu, OperatingPoint(), one).power_w for graph in graphs])
        / measured_w
        - 1.0
        for one in (bundle_for(gpu), found.bundle)
    )
    assert len(steps) >= 9
    assert abs(after).mean() < 0.7 * abs(before).mean()
    assert "times: as before" in found.bundle.assumptions[0]
    assert (
        found.bundle.status == "measured"
    )  # the GPU still is: only the card's own level has moved
    assert "forecast" not in found.bundle.assumptions[0]


def test_the_command_calibrates_checks_and_refuses(call, table: Path, tmp_path: Path) -> None:
    done = call(
        "calibrate", "--gpu", "l40s", "--table", str(table), "--out", str(tmp_path), "--json"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["held_out"] > 15
    assert (tmp_path / "calibration.yaml").exists()
    checked = call("calibrate", "--gpu", "l40s", "--table", str(table), "--check")
    assert checked.code == 0, checked.err
    assert "products bf16" in checked.out
    assert "one of two" in call("calibrate", "--gpu", "l40s").err


def test_a_run_keeps_fewer_cycles_than_a_burst_before_hopper() -> None:
    forecast = forecast_bundle(GPU)
    assert forecast.for_bursts().clock_law is None
    hopper = forecast_bundle(load_gpu("h100-sxm"))
    assert hopper.for_bursts() is hopper


def test_an_sm_that_waits_for_memory_draws_less() -> None:
    """A GDDR card streamed at 300 W by the rule and at 206 W in truth: its SMs wait most of the
    time.
    """
    work = {"name": "x", "ops": [{"op": "add", "n": 1 << 28, "dtype": "bf16"}]}
    forecast = forecast_bundle(load_gpu("a40"))
    low, high = (
        float(wattcast.predict(work, "a40", bundle=replace(forecast, waiting_sm=share)).power_w)
        for share in (forecast.waiting_sm, 1.0)
    )
    assert high - low > 0.5 * (high - 206.0)


def test_a_compressed_table_reads_as_the_plain_one(table: Path, tmp_path: Path) -> None:
    packed = tmp_path / f"{table.name}.gz"
    packed.write_bytes(gzip.compress(table.read_bytes()))
    plain, unpacked = (read_tables([path], GPU) for path in (table, packed))
    assert unpacked.rows.ops == plain.rows.ops
    assert unpacked.engine == plain.engine
    assert_allclose(unpacked.rows.column("latency_s"), plain.rows.column("latency_s"))


def test_tables_of_one_engine_are_chosen_by_its_name(table: Path, tmp_path: Path) -> None:
    for engine in ("vllm", "trtllm"):
        (tmp_path / f"l40s.{engine}-0.24.0.gemm.csv").write_bytes(table.read_bytes())
    found, _ = find_tables([tmp_path], GPU, "trtllm")
    assert [file.engine for file in found] == ["trtllm"]
    assert not found[0].half_only
    with pytest.raises(WattcastError, match="engine 'tgi'"):
        find_tables([tmp_path], GPU, "tgi")
    with pytest.raises(BadInput, match="no kernel table of the l40s by sglang"):
        read_tables([tmp_path], GPU, engine="sglang")


def test_the_name_of_a_system_may_say_more_than_the_card(table: Path, tmp_path: Path) -> None:
    named = tmp_path / "rtx_pro_6000_server.vllm-0.24.0.gemm.csv"
    named.write_bytes(table.read_bytes())
    found, _ = find_tables([tmp_path], load_gpu("rtx-pro-6000"))
    assert [file.system for file in found] == ["rtx_pro_6000_server"]
