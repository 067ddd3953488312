"""The engine campaign without a GPU: a stand-in engine with known step times gives rows with those
times.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import LAUNCH_S, REST_S, SCHEDULE_S, FakeEngine, FakeSampler

from wattcast.core.errors import BadInput, CannotWrite, UnknownName, WattcastError
from wattcast.core.row_journals import Journal, read_lines
from wattcast.lab.__main__ import main
from wattcast.lab.campaigns import engine_campaign
from wattcast.lab.campaigns.engine_campaign import (
    MAX_BATCHED_TOKENS,
    STEP_POINTS,
    EngineCampaignOptions,
    EngineModel,
    EngineRequest,
    StepPoint,
    TrafficPoint,
    choose_models,
    ready_path,
    run_engine_campaign,
)
from wattcast.lab.campaigns.engine_load import (
    LoadPoint,
    ServedRequest,
    WaitingUsers,
    draw_swinging_arrivals,
    make_source,
)
from wattcast.lab.campaigns.engine_session import (
    EngineSession,
    ServedRun,
    compute_percentiles,
    draw_arrivals,
    estimate_capacity,
    measure_source,
    measure_traffic,
    summarise_requests,
)
from wattcast.lab.campaigns.engine_steps import (
    EngineBench,
    StepRecorder,
    measure_idle_engine,
    measure_point,
    warm_engine,
)
from wattcast.lab.campaigns.engine_weights import (
    WeightReport,
    fill_weights,
    find_zero_weights,
    has_finite_outputs,
    has_narrow_weights,
)
from wattcast.lab.campaigns.length_distribution import LengthDistribution
from wattcast.lab.fit.engine_records import pack_engine_folders

MODEL = EngineModel(
    "made-up", {"vocab_size": 1000, "max_position_embeddings": 4096}, held_out=True, start_s=1.0
)


@pytest.fixture(autouse=True)
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are collected before every row, which takes most of the time of a stand-in's."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def bench_of(engine: FakeEngine, **sampler: Any) -> EngineBench:
    recorder = StepRecorder(engine, engine.model_executor.mark, engine.clock)
    return EngineBench(
        recorder,
        FakeSampler(engine.clock, **sampler),
        lambda max_tokens, **_: SimpleNamespace(max_tokens=max_tokens),
        vocab_size=1000,
        max_model_len=4096,
        synchronize=lambda: None,
        sleep=engine.clock.sleep,
    )


def session_of(request: EngineRequest, engine: FakeEngine, seconds: float = 600.0) -> EngineSession:
    bench = bench_of(engine)
    deadline_s = engine.clock() + seconds
    return EngineSession(request, MODEL, bench, deadline_s, "run-1", 10**6, 64, clock=engine.clock)


def test_at_least_half_of_the_models_are_held_out_and_every_class_is_among_them() -> None:
    models = choose_models()
    held = [model for model in models if model.held_out]
    assert len(models) >= 8
    assert len(held) * 2 >= len(models)
    assert any(model.quantization == "fp8" for model in held)
    assert any(model.kv_dtype == "fp8" for model in held)
    assert any("kv_lora_rank" in model.config for model in held)
    assert any(model.config.get("sliding_window") for model in held)
    assert any("num_experts_per_tok" in model.config for model in held)
    assert all(model.source.startswith("https://") for model in models)
    assert choose_models(("smoke",))[0].name == "smoke"
    assert "smoke" not in {model.name for model in models}


def test_planned_points_have_ids_of_their_own_and_fit_a_step() -> None:
    assert len({point.id for point in STEP_POINTS}) == len(STEP_POINTS)
    for point in STEP_POINTS:
        assert (
            point.kind != "mixed"
            or point.batch + point.prompts * point.prompt_tokens <= MAX_BATCHED_TOKENS
        )
    with pytest.raises(WattcastError):
        StepPoint(batch=4)
    assert not StepPoint(64, 1024).fits(cache_tokens=64 * 1024, max_seqs=256, max_model_len=4096)
    assert StepPoint(64, 1024).fits(cache_tokens=2 * 64 * 1024, max_seqs=256, max_model_len=4096)
    assert not StepPoint(8, 4096).fits(cache_tokens=10**7, max_seqs=256, max_model_len=4096)


def test_a_decode_row_says_the_engines_own_times() -> None:
    """Host work is hidden behind the GPU, so a step takes the device's time; the host's share is
    said beside it.
    """
    engine = FakeEngine(token_s=1e-5, step_s=8e-3)
    row = measure_point(bench_of(engine), StepPoint(16, 512))
    device_s = 8e-3 + 16e-5
    assert row["latency_s"] == pytest.approx(device_s, rel=0.02)
    assert row["device_s"] == pytest.approx(device_s, rel=0.02)
    assert row["host_s"] == pytest.approx(SCHEDULE_S + LAUNCH_S + REST_S, rel=0.02)
    assert row["wait_s"] == pytest.approx(device_s - row["host_s"], rel=0.05)
    assert row["power_w"] == pytest.approx(300.0, rel=0.01)
    assert row["energy_j"] == pytest.approx(300.0 * row["latency_s"], rel=0.01)
    assert row["ticks"] >= 5
    assert row["tokens"] == 16
    assert 512 < row["context_mean"] < 512 + 1.5 / device_s
    assert row["flags"] == []
    assert not engine.has_unfinished_requests()


def test_sequences_that_yield_the_same_token_are_told() -> None:
    """A step of a mixture was measured at two thirds of its time: alike tokens visit few experts."""
    engine = FakeEngine()
    engine.tokens_alike = True
    row = measure_point(bench_of(engine), StepPoint(16, 512))
    assert row["distinct_tokens"] == 1
    assert "tokens_alike" in row["flags"]
    assert measure_point(bench_of(FakeEngine()), StepPoint(16, 512))["distinct_tokens"] == 16


def test_a_host_bound_step_takes_the_hosts_time() -> None:
    row = measure_point(bench_of(FakeEngine(token_s=0.0, step_s=1e-4)), StepPoint(4, 128))
    assert row["latency_s"] == pytest.approx(SCHEDULE_S + LAUNCH_S + REST_S, rel=0.02)
    assert row["device_gap_s"] > 0.0


def test_prompts_of_decoding_requests_are_not_computed() -> None:
    engine = FakeEngine(budget=1024)
    measure_point(bench_of(engine), StepPoint(16, 3000))
    assert max(engine.model_executor.launched) == 16
    assert engine.scheduler.connector is None


def test_prefill_steps_hold_one_prompt_each() -> None:
    row = measure_point(
        bench_of(FakeEngine(token_s=2e-5, step_s=1e-3, budget=1024)), StepPoint(0, 0, 1, 500)
    )
    assert row["prompt_tokens_per_step"] == pytest.approx(500)
    assert row["latency_s"] == pytest.approx(1e-3 + 500 * 2e-5, rel=0.02)
    assert row["flags"] == []


def test_chunks_of_a_long_prompt_are_told_apart() -> None:
    row = measure_point(
        bench_of(FakeEngine(token_s=2e-5, step_s=1e-3, budget=1024)), StepPoint(0, 0, 1, 1500)
    )
    found = {(group["prompt_tokens"], group["prompt_context"]): group for group in row["groups"]}
    assert set(found) == {(1024.0, 0.0), (476.0, 1024.0)}
    assert found[1024.0, 0.0]["device_median_s"] == pytest.approx(1e-3 + 1024 * 2e-5, rel=0.01)


def test_mixed_steps_hold_decodes_and_a_prompt() -> None:
    row = measure_point(bench_of(FakeEngine(budget=1024)), StepPoint(8, 256, 1, 200))
    assert row["tokens"] == pytest.approx(208)
    assert row["prompt_tokens_per_step"] == pytest.approx(200)
    assert row["flags"] == []


def test_a_batch_that_does_not_fit_is_refused_with_the_reason() -> None:
    bench = bench_of(FakeEngine(max_seqs=4))
    with pytest.raises(WattcastError, match="4 of 8 requests"):
        measure_point(bench, StepPoint(8, 256))
    assert not bench.recorder.engine.has_unfinished_requests()


def test_a_capped_load_runs_longer() -> None:
    row = measure_point(bench_of(FakeEngine(), throttle=0x4), StepPoint(4, 128))
    assert row["run_s"] == pytest.approx(2.8, abs=0.05)
    assert row["throttle"] == ["sw_power_cap"]


def test_idle_power_and_warming() -> None:
    bench = bench_of(FakeEngine(), power_w=120.0)
    warm_engine(bench, (64, 900))
    assert not bench.recorder.engine.has_unfinished_requests()
    assert measure_idle_engine(bench)["power_w"] == pytest.approx(120.0, rel=0.01)


def test_arrivals_follow_the_seed() -> None:
    point = TrafficPoint(0.5, duration_s=100.0, seed=3)
    first, other = draw_arrivals(point, 20.0), draw_arrivals(replace(point, seed=4), 20)
    assert list(map(str, first)) == list(
        map(str, draw_arrivals(point, 20.0))
    )  # as words: a NaN never equals itself
    assert [request.arrival_s for request in first[:50]] != [
        request.arrival_s for request in other[:50]
    ]
    assert len(first) == pytest.approx(2000, rel=0.08)
    pauses_s = np.diff([request.arrival_s for request in first])
    assert pauses_s.std() == pytest.approx(pauses_s.mean(), rel=0.1)  # exponential
    prompts = [request.prompt_tokens for request in first]
    assert np.median(prompts) == pytest.approx(512, rel=0.1)
    assert min(prompts) >= 16
    assert max(prompts) <= 4096
    short = draw_arrivals(point, 20.0, max_model_len=1000)
    assert max(request.prompt_tokens + request.output_tokens for request in short) < 1000


def test_percentiles_of_a_known_trace() -> None:
    served = []
    for number in range(
        1, 101
    ):  # request n waits n ms for its first token and then 10 ms for each of four more
        first_s = 1.0 + 0.001 * number
        tokens_s = [first_s + 0.010 * place for place in range(5)]
        served.append(ServedRequest(1.0, 10, 5, added_s=1.0, token_s=tokens_s, finished=True))
    served.append(
        ServedRequest(1.0, 10, 5, added_s=1.0, token_s=[9.0])
    )  # given up: in no percentile
    row = summarise_requests(served, length_s=10.0)
    assert row["ttft_s"]["p50"] == pytest.approx(0.0505)
    assert row["ttft_s"]["p99"] == pytest.approx(0.09901)
    assert row["tpot_s"]["p50"] == pytest.approx(0.010)
    assert row["e2e_s"]["mean"] == pytest.approx(0.0505 + 0.04)
    assert row["finished"] == 100
    assert row["output_tokens_per_s"] == pytest.approx(50.1)
    assert compute_percentiles([]) == {}


def test_capacity_comes_from_the_engines_own_steps() -> None:
    point = TrafficPoint(
        1.0,
        prompt=LengthDistribution(100, 0.0, 1, 1000),
        output=LengthDistribution(50, 0.0, 1, 1000),
    )
    prefill = {"kind": "prefill", "latency_s": 0.02, "prompt_tokens_per_step": 2000.0}
    decode = {"kind": "decode", "latency_s": 0.01, "batch": 100, "context": 1024}
    small = {"kind": "decode", "latency_s": 0.005, "batch": 1, "context": 1024}
    assert estimate_capacity([prefill, decode, small], point) == pytest.approx(1 / (0.001 + 0.005))
    assert estimate_capacity([decode], point) is None


@pytest.mark.parametrize("rate_per_s", [2.0, 40.0])
def test_serving_records_every_request_and_step(rate_per_s: float) -> None:
    engine = FakeEngine(token_s=1e-5, step_s=5e-3)
    bench = bench_of(engine, power_w=400.0)
    point = TrafficPoint(
        0.5,
        6.0,
        prompt=LengthDistribution(200, 0.5, 16, 900),
        output=LengthDistribution(20, 0.5, 2, 60),
    )
    row, requests, steps, power = measure_traffic(bench, point, rate_per_s, "made-up/run")
    arrivals = draw_arrivals(point, rate_per_s)
    prompts, outputs = zip(
        *((one.prompt_tokens, one.output_tokens) for one in arrivals), strict=True
    )
    assert row["requests"] == row["finished"] == len(requests) == len(arrivals)
    assert [request["made_tokens"] for request in requests] == list(outputs)
    assert all(request["first_token_s"] > request["arrival_s"] for request in requests)
    assert min(request["added_s"] - request["arrival_s"] for request in requests) >= 0.0
    assert sum(steps["prompt_tokens"]) == sum(prompts)
    assert sum(steps["decodes"]) == sum(outputs) - len(arrivals)
    assert row["tpot_s"]["p50"] > 5e-3
    assert row["power_w"] == pytest.approx(400.0, rel=0.01)
    assert row["energy_j_per_token"] == pytest.approx(row["energy_j"] / sum(outputs))
    assert len(power["tick_s"]) == len(power["tick_w"]) > 50
    json.dumps([row, requests, steps, power], allow_nan=False)


def test_overload_gives_requests_up_after_the_drain() -> None:
    engine = FakeEngine(token_s=1e-5, step_s=50e-3, max_seqs=2)
    point = TrafficPoint(
        1.1,
        3.0,
        prompt=LengthDistribution(200, 0.5, 16, 900),
        output=LengthDistribution(40, 0.5, 2, 60),
    )
    row, requests, _, _ = measure_traffic(bench_of(engine), point, 20.0, "made-up/run")
    assert 0 < row["finished"] < row["requests"] == len(requests)
    assert row["length_s"] == pytest.approx(9.0, abs=0.2)
    assert not engine.has_unfinished_requests()


def test_rows_are_saved_and_a_second_call_skips_them(tmp_path: Path) -> None:
    request = EngineRequest(tmp_path, 600.0, (MODEL,), smoke=True)
    counts = session_of(request, FakeEngine(step_s=2e-3)).measure_all()
    assert counts == {"measured": 3, "served": 1}
    rows = list(read_lines(tmp_path / "rows.jsonl"))
    assert [row["kind"] for row in rows] == ["decode", "prefill", "mixed", "traffic"]
    assert all(row["held_out"] for row in rows)
    assert rows[3]["held_out_load"]
    assert len(list(read_lines(tmp_path / "requests.jsonl"))) == rows[3]["requests"]
    assert not request.missing_ids(MODEL)
    again = session_of(request, FakeEngine(step_s=2e-3)).measure_all()
    assert again == {"on file": 4}
    assert len(list(read_lines(tmp_path / "rows.jsonl"))) == 4
    elsewhere = EngineRequest(tmp_path / "other", 600.0, (MODEL,), done=tmp_path, smoke=True)
    assert not elsewhere.missing_ids(MODEL)


def test_a_disk_that_fails_at_any_write_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    """Requests and steps without their row made ``lab pack-engine`` end in an internal error."""
    fsync, calls, fails_at = os.fsync, [0], [0]

    def count_or_fail(fd: int) -> None:
        calls[0] += 1
        if calls[0] == fails_at[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", count_or_fail)
    monkeypatch.setattr(
        "wattcast.lab.fit.engine_records.COMPILING_S", 0.0
    )  # every run looks up its row

    def measure(out: Path) -> None:
        calls[0] = 0
        session_of(
            EngineRequest(out, 600.0, (MODEL,), smoke=True), FakeEngine(step_s=2e-3)
        ).measure_all()

    def pack(out: Path) -> tuple[list[str], int, int]:
        Journal(out / "runs.jsonl", key="run").append({"run": "run-1", "card_uuid": "GPU-1"})
        found = pack_engine_folders([out], out / "packed")
        return [row["id"] for row in found.rows], len(found.requests), len(found.serving_steps)

    measure(tmp_path / "whole")
    writes, whole = calls[0], pack(tmp_path / "whole")
    assert writes >= 7
    for failing in range(1, writes + 1):
        out, fails_at[0] = tmp_path / f"fails-{failing}", failing
        with pytest.raises(CannotWrite, match="No space left"):
            measure(out)
        fails_at[0] = 0
        if (out / "rows.jsonl").exists():
            assert len(pack(out)[0]) == min(failing - 1, 3)
        measure(out)  # goes on where it stopped
        assert pack(out) == whole


def test_requests_of_a_run_that_was_measured_again_replace_all_of_it(tmp_path: Path) -> None:
    for name, count in (("first", 5), ("again", 3)):
        folder = tmp_path / name
        Journal(folder / "runs.jsonl", key="run").append({"run": "r", "card_uuid": name})
        Journal(folder / "rows.jsonl").append(
            {"id": "m/traffic", "kind": "traffic", "model": "m", "run": "r"}
        )
        for number in range(count):
            row = {
                "id": str(number),
                "run": "m/traffic",
                "number": number,
                "arrival_s": 0.1 * number,
            }
            Journal(folder / "requests.jsonl").append(row)
    found = pack_engine_folders([tmp_path / "first"], tmp_path / "packed")
    assert len(found.requests) == 5
    found = pack_engine_folders([tmp_path / "again"], tmp_path / "packed")
    assert [row["card_uuid"] for row in found.rows] == ["again"]
    assert len(found.requests) == 3


def test_a_model_that_was_broken_off_is_told_by_the_exit_code(tmp_path: Path, monkeypatch) -> None:
    counts = Counter({"models broken off": 1})
    monkeypatch.setattr(engine_campaign, "run_engine_campaign", lambda _: counts)
    assert main(["engine", "--smoke", "--out", str(tmp_path)]) == 1
    counts.clear()
    assert main(["engine", "--smoke", "--out", str(tmp_path)]) == 0


def test_an_engine_gets_weights_that_tell_tokens_apart(tmp_path: Path) -> None:
    """Dummy weights send all tokens to the same experts, and make tokens of some models alike."""
    for filled in (1, 0):
        out = tmp_path / str(filled)
        session = session_of(
            EngineRequest(out, 600.0, (MODEL,), smoke=True), FakeEngine(step_s=2e-3)
        )
        report = WeightReport(filled, zero=(), is_finite=True)
        session.weights = report
        session.measure_all()
        assert {row["normal_weights"] for row in read_lines(out / "rows.jsonl")} == {bool(filled)}


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (WeightReport(9, ("experts.w13",), True), "weights stayed zero: experts.w13"),
        (WeightReport(9, (), False), "hidden states became NaN"),
        (
            WeightReport(9, (), True, is_narrow=False),
            "the configuration names a quantization, but all weights are 16 bit or wider",
        ),
    ],
)
def test_an_engine_that_computes_nothing_is_refused(
    tmp_path: Path, report: WeightReport, reason: str
) -> None:
    """Rows of gpt-oss were once measured with experts of zeros: 20 to 30 % too little power."""
    request = EngineRequest(tmp_path, 600.0, (MODEL,), smoke=True)
    session = session_of(request, FakeEngine(step_s=2e-3))
    session.weights = report
    assert session.measure_all() == {"models refused": 1}
    (row,) = read_lines(tmp_path / "rows.jsonl")
    assert (row["kind"], row["error"]) == ("refused", reason)


def make_engine_of(model: torch.nn.Module) -> SimpleNamespace:
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))


def test_large_weights_of_zeros_are_found() -> None:
    model = torch.nn.ModuleDict({"kept": torch.nn.Linear(1024, 512, bias=False)})
    model["empty"] = torch.nn.Linear(1024, 512, bias=False)
    model["small"] = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.zeros_(model["empty"].weight)
    torch.nn.init.zeros_(model["small"].weight)
    assert find_zero_weights(make_engine_of(model), torch) == ("empty.weight",)


@pytest.mark.parametrize(
    ("name", "dtype", "is_narrow"),
    [
        ("qweight", torch.int32, True),
        ("weight", torch.float8_e4m3fn, True),
        ("weight", torch.bfloat16, False),
        ("g_idx", torch.int32, False),
    ],
)
def test_narrow_weights_are_told_from_wide_ones(
    name: str, dtype: torch.dtype, is_narrow: bool
) -> None:
    """Rows called GPTQ were once measured in bf16: vLLM had quantized none of its layers."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    weight = torch.zeros(2048, 1024).to(dtype)
    model.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    assert has_narrow_weights(make_engine_of(model)) is is_narrow


@pytest.mark.parametrize(("value", "is_finite"), [(-1.5, True), (float("nan"), False)])
def test_outputs_that_are_no_numbers_are_found(value: float, is_finite: bool) -> None:
    position = {7: SimpleNamespace(logprob=value)}
    output = SimpleNamespace(outputs=[SimpleNamespace(logprobs=[position])])
    left = [[output], []]
    engine = SimpleNamespace(
        add_request=lambda *_: None,
        has_unfinished_requests=lambda: bool(left),
        step=lambda: left.pop(0),
    )
    assert has_finite_outputs(engine, None, [1, 2]) is is_finite


def test_a_point_says_how_its_tokens_are_chosen() -> None:
    greedy = StepPoint(batch=8, context=64)
    drawn = StepPoint(batch=8, context=64, temperature=0.8, top_k=50, top_p=0.9, repetition=1.1)
    assert greedy.sampling == {"temperature": 0.0}
    assert drawn.sampling == {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }
    assert greedy.id == "decode-b8-c64"
    assert drawn.id == "decode-b8-c64-t0.8-k50-n0.9-r1.1"


def test_weights_are_filled_by_what_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64))
    model.norm = model[1]
    narrow = torch.zeros(256, 128).to(torch.float8_e4m3fn).t()
    model.register_parameter("weight", torch.nn.Parameter(narrow, requires_grad=False))
    model.register_parameter(
        "weight_scale", torch.nn.Parameter(torch.ones(()), requires_grad=False)
    )
    model.register_parameter("input_scale", torch.nn.Parameter(torch.ones(()), requires_grad=False))
    codes = torch.zeros(32, 16, dtype=torch.int32)  # Marlin packs eight weights in each
    model.register_parameter("packed_weight", torch.nn.Parameter(codes, requires_grad=False))
    scales = torch.zeros(32, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    model.register_parameter("packed_weight_scale", torch.nn.Parameter(scales, requires_grad=False))
    integers = torch.zeros(64, 128, dtype=torch.int8)
    model.register_parameter("int8_weight", torch.nn.Parameter(integers, requires_grad=False))
    zeros = torch.zeros(32, 2, dtype=torch.int32)
    model.register_parameter("qzeros", torch.nn.Parameter(zeros, requires_grad=False))
    blocks = torch.ones(4, 4).to(torch.float8_e4m3fn)  # nvfp4 has scales in fp8: no exponents
    model.register_parameter("block_weight_scale", torch.nn.Parameter(blocks, requires_grad=False))
    int4 = torch.ones(4, 8)
    model.register_parameter("scales", torch.nn.Parameter(int4, requires_grad=False))
    order = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    model.register_parameter("g_idx", torch.nn.Parameter(order, requires_grad=False))
    kinds = {
        name: type(name, (), {"__module__": "triton_kernels.tensor"})
        for name in ("Tensor", "MXScaleLayout")
    }
    wrapped, their_scales = kinds["Tensor"](), kinds["Tensor"]()
    with torch.inference_mode():  # as an engine holds experts in mxfp4
        wrapped.storage = SimpleNamespace(data=torch.zeros(64, 64, dtype=torch.uint8), layout=None)
        told = SimpleNamespace(
            data=torch.zeros(64, 4, dtype=torch.uint8), layout=kinds["MXScaleLayout"]()
        )
    their_scales.storage = told
    libraries = SimpleNamespace(
        no_grad=torch.no_grad,
        cuda=SimpleNamespace(synchronize=lambda: None),
        inference_mode=torch.inference_mode,
        float8_e4m3fn=torch.float8_e4m3fn,
        float8_e8m0fnu=torch.float8_e8m0fnu,
        int8=torch.int8,
        uint8=torch.uint8,
        randn=torch.randn,
    )
    engine = make_engine_of(model)
    matrices = 64 * 64 + 256 * 128 + 32 * 16 + 32 * 2 + 64 * 128
    assert fill_weights(engine, libraries) == matrices + 64 * 64 + 64 * 4
    assert 35.0 < model.int8_weight.float().std().item() < 45.0
    # Random zeros of AWQ once sent all tokens of a mixture to the same third of its experts.
    assert set(model.qzeros.view(torch.uint8).flatten().tolist()) == {0x88}
    assert model.packed_weight.unique().numel() > 500
    assert set(model.packed_weight_scale.float().flatten().tolist()) == {2.0**-7}
    assert model.block_weight_scale.float().max() < 1.0
    assert wrapped.storage.data.unique().numel() > 200
    assert set(told.data.flatten().tolist()) == {120}  # e8m0 of 2^-7
    assert 0.015 < model[0].weight.detach().std().item() < 0.025
    assert 0.015 < (model.weight.float() * model.weight_scale).std().item() < 0.025
    assert model.input_scale == 1.0
    assert model.scales.unique().tolist() == pytest.approx([0.02 / 4.6])  # of int4 codes
    assert (model.g_idx == torch.arange(64).reshape(8, 8)).all()  # places, not numbers
    assert not model[0].bias.any()
    assert fill_weights(SimpleNamespace(), libraries) == 0


def test_a_session_ends_inside_its_budget(tmp_path: Path) -> None:
    request = EngineRequest(tmp_path, 600.0, (MODEL,))
    engine = FakeEngine(step_s=2e-3, budget=8192, max_seqs=256)
    session = session_of(request, engine, seconds=12.0)
    counts = session.measure_all()
    assert session.left_s >= 0.0
    assert counts["measured"] >= 3
    assert counts["left for another call"] > 5
    assert len(request.missing_ids(MODEL)) == counts["left for another call"]


def test_a_row_that_fails_is_recorded_and_measured_again(tmp_path: Path) -> None:
    request = EngineRequest(tmp_path, 600.0, (MODEL,), parts=("traffic",), smoke=True)
    session = session_of(request, FakeEngine())
    assert session.measure_all() == {"failed": 1}
    (row,) = read_lines(tmp_path / "rows.jsonl")
    assert "step rows" in row["error"]
    assert request.missing_ids(MODEL) == [row["id"]]


def test_a_broken_gpu_ends_the_model(tmp_path: Path) -> None:
    request = EngineRequest(tmp_path, 600.0, (MODEL,), smoke=True)
    engine = FakeEngine()
    engine.fail_after = 30
    with pytest.raises(RuntimeError, match="CUDA"):
        session_of(request, engine).measure_all()


class FakeChild:
    """A process of a model that ends with ``code``, or not at all."""

    def __init__(self, out: Path, name: str, code: int | None) -> None:
        self.out, self.name, self.code, self.pid = out, name, code, 2**22 + 1
        self.told: list[str] = []
        self.stdin = SimpleNamespace(write=self.told.append, flush=lambda: None, close=lambda: None)

    def wait(self, timeout: float) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        if self.code == 0:
            Journal(self.out / "rows.jsonl").append({"id": f"{self.name}/row", "kind": "decode"})
        return self.code

    def poll(self) -> int | None:
        return self.code


def test_a_model_that_fails_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_campaign, "_end_child", lambda child: None)
    models = tuple(replace(MODEL, name=name) for name in ("broken", "hanging", "fine"))
    codes = {"broken": 1, "hanging": None, "fine": 0}
    (tmp_path / "engine.log").write_text("ValueError: no such architecture\n")
    started: list[FakeChild] = []

    def launch(request: EngineRequest, model: EngineModel) -> FakeChild:
        started.append(FakeChild(tmp_path, model.name, codes[model.name]))
        return started[-1]

    counts = run_engine_campaign(EngineRequest(tmp_path, 500.0, models), launch)
    assert [child.name for child in started] == ["broken", "hanging", "fine"]
    assert all(float(child.told[0]) <= 500.0 for child in started)
    assert counts["models"] == counts["rows"] == 1
    assert counts["models broken off"] == 2
    errors = {
        row["model"]: row["error"]
        for row in read_lines(tmp_path / "rows.jsonl")
        if row["kind"] == "failed"
    }
    assert "no such architecture" in errors["broken"]
    assert "did not start" in errors["hanging"]


class WaitingChild(FakeChild):
    """A process of a group: it says that it is ready, and notes whether its turn came alone."""

    def __init__(self, request: EngineRequest, model: EngineModel, code: int | None) -> None:
        super().__init__(request.out, model.name, code)
        self.ready = ready_path(request, model)
        if code == 0:
            self.ready.touch()

    def wait(self, timeout: float) -> int:
        self.ready.unlink()
        return super().wait(timeout)


def test_engines_that_start_together_are_measured_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting four engines at once takes a third of the time; measuring two at once is wrong."""
    ended: list[str] = []
    monkeypatch.setattr(engine_campaign, "_end_child", lambda child: ended.append(child.name))
    models = tuple(replace(MODEL, name=name) for name in ("first", "broken", "third", "next"))
    request = EngineRequest(tmp_path, 500.0, models, together=3)
    children: dict[str, WaitingChild] = {}

    def launch(request: EngineRequest, model: EngineModel) -> WaitingChild:
        code = 1 if model.name == "broken" else 0
        children[model.name] = WaitingChild(request, model, code)
        if model.name == "next":  # of the second group: the first one has ended
            assert {"first", "broken", "third"} <= set(ended)
        return children[model.name]

    counts = run_engine_campaign(request, launch)
    assert counts["models"] == counts["rows"] == 3
    assert counts["models broken off"] == 1
    seconds = {name: [float(line) for line in child.told] for name, child in children.items()}
    assert len(seconds["broken"]) == 1  # it had time to start, and no turn
    start_s, turn_s = seconds["first"]
    assert turn_s == pytest.approx(start_s / 2.0, abs=1.0)  # two are ready
    assert seconds["third"][1] == pytest.approx(start_s, abs=1.0)


def test_an_engine_that_shares_the_card_needs_a_cache(tmp_path: Path) -> None:
    for wrong in ({"together": 0}, {"cache_gib": 0.0}):
        with pytest.raises(BadInput, match="--together"):
            EngineCampaignOptions(tmp_path, **wrong).to_request()


def test_no_model_is_started_without_time_for_rows(tmp_path: Path) -> None:
    models = (replace(MODEL, start_s=100.0), replace(MODEL, name="quick", start_s=1.0))
    started: list[str] = []

    def launch(request: EngineRequest, model: EngineModel) -> FakeChild:
        started.append(model.name)
        return FakeChild(tmp_path, model.name, 0)

    counts = run_engine_campaign(EngineRequest(tmp_path, 60.0, models), launch)
    assert started == ["quick"]
    assert counts["models left for another call"] == 1


def test_wrong_options_are_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownName, match=r"llama-3\.1-8b"):
        EngineCampaignOptions(tmp_path, models="llama-9").to_request()
    with pytest.raises(UnknownName):
        EngineCampaignOptions(tmp_path, parts="stepz").to_request()
    with pytest.raises(BadInput, match="--loads"):
        EngineCampaignOptions(tmp_path, loads="a,b").to_request()
    with pytest.raises(BadInput, match=r"config\.json"):
        EngineCampaignOptions(tmp_path, own=tmp_path).to_request()
    (tmp_path / "config.json").write_text(json.dumps(dict(MODEL.config)))
    own = EngineCampaignOptions(tmp_path, own=tmp_path, quantization="fp8").to_request().models[0]
    assert (own.quantization, own.max_model_len) == ("fp8", 4096)
    assert [
        model.name for model in EngineCampaignOptions(tmp_path, smoke=True).to_request().models
    ] == ["smoke"]
    assert main(["engine", "--out", str(tmp_path), "--list"]) == 0
    assert "held out" in capsys.readouterr().out
    whole = EngineCampaignOptions(tmp_path, loads="0.3", done=tmp_path).to_request()
    child = EngineRequest.from_plain(json.loads(json.dumps(whole.plain(MODEL))))
    assert child.models == (MODEL,)
    assert (child.out, child.done, list(child.loads)) == (tmp_path, tmp_path, [0.3])


def load_point(**changes: Any) -> LoadPoint:
    """A load with short prompts and answers, so that a stand-in run takes a moment."""
    prompt = LengthDistribution(100, 0.5, 16, 400)
    output = LengthDistribution(20, 0.4, 4, 40)
    return LoadPoint("made-up", 6.0, prompt, output, **changes)


def run_load(engine: FakeEngine, point: LoadPoint, capacity_per_s: float = 20.0) -> ServedRun:
    bench = bench_of(engine, power_w=400.0)
    source = make_source(point, capacity_per_s, bench.prompt, bench.max_model_len)
    return measure_source(bench, source, point.duration_s, "made-up/run")


def test_a_closed_loop_never_has_more_requests_under_way_than_users() -> None:
    point = load_point(users=5, ramp_s=0.5, think_s=0.05)
    row, requests, _, _ = run_load(FakeEngine(token_s=1e-5, step_s=5e-3), point)
    events = [(request["added_s"], 1) for request in requests]
    events += [(request["last_token_s"], -1) for request in requests]
    under_way = np.cumsum([change for _, change in sorted(events)])
    assert under_way.max() == 5
    assert row["finished"] == row["requests"] > 50
    for user in range(5):
        own = [request for request in requests if request.get("user", 0) == user]
        pauses_s = [b["arrival_s"] - a["last_token_s"] for a, b in itertools.pairwise(own)]
        assert min(pauses_s) > 0.0
        assert np.mean(pauses_s) == pytest.approx(0.05, rel=0.5)


def test_what_a_user_asks_does_not_depend_on_the_engines_speed() -> None:
    point = load_point(users=3)
    lengths = []
    for step_s in (2e-3, 8e-3):
        _, requests, _, _ = run_load(FakeEngine(token_s=1e-5, step_s=step_s), point)
        own = [request for request in requests if request.get("user", 0) == 1]
        lengths.append([(one["prompt_tokens"], one["output_tokens"]) for one in own])
    shorter = min(map(len, lengths))
    assert shorter > 10
    assert lengths[0][:shorter] == lengths[1][:shorter]


def test_a_turn_of_a_conversation_repeats_what_was_said() -> None:
    point = load_point(users=2, turns=3)
    source = WaitingUsers(point, lambda count: list(range(count)))
    sent = {request.user: request for request in source.take_due(0.0)}
    prompts = [sent[0].ids]
    for number in range(3):
        request = sent[0]
        request.made_ids = [7000 + number] * request.output_tokens
        source.end_request(request, 1.0 + number)
        sent[0] = source.take_due(1.0 + number)[0]
        assert sent[0].user == 0
        prompts.append(sent[0].ids)
    assert sent[0].turn == 0
    for turn in (1, 2):
        before = prompts[turn - 1]
        assert prompts[turn][: len(before)] == before
        assert 7000 + turn - 1 in prompts[turn]
    assert 7000 not in prompts[3]


def test_a_conversation_too_long_for_the_model_begins_anew() -> None:
    point = load_point(users=1, turns=100)
    source = WaitingUsers(point, lambda count: list(range(count)), max_model_len=600)
    turns = []
    for number in range(30):
        (request,) = source.take_due(float(number))
        assert request.prompt_tokens + request.output_tokens < 600
        turns.append(request.turn)
        request.made_ids = [1] * request.output_tokens
        source.end_request(request, float(number))
    assert turns.count(0) > 3
    assert max(turns) > 1


def test_arrivals_swing_around_their_mean() -> None:
    point = replace(load_point(load=0.5, swing=0.8, period_s=20.0), duration_s=2000.0)
    arrivals = draw_swinging_arrivals(point, 20.0)
    phase = np.array([request.arrival_s for request in arrivals]) % 20.0
    assert len(arrivals) == pytest.approx(20_000, rel=0.05)
    busy = np.count_nonzero((phase > 3.0) & (phase < 7.0))
    quiet = np.count_nonzero((phase > 13.0) & (phase < 17.0))
    assert busy / quiet == pytest.approx(1.75 / 0.25, rel=0.15)


def test_loads_are_saved_beside_their_steps(tmp_path: Path) -> None:
    request = EngineRequest(tmp_path, 600.0, (MODEL,), parts=("brief", "talk", "swing"))
    counts = session_of(request, FakeEngine(step_s=3e-2)).measure_all()
    assert counts["failed"] == 0
    assert counts["served"] == 2
    rows = {row["id"]: row for row in read_lines(tmp_path / "rows.jsonl")}
    talk = rows["made-up/load-talk-35s-s13"]
    assert talk["kind"] == "load"
    assert talk["turns"] == 6
    assert talk["power_w"] == pytest.approx(300.0, rel=0.01)
    assert not request.missing_ids(MODEL)
    assert request.caches_prefixes(MODEL)
    assert not replace(request, parts=("steps",)).caches_prefixes(MODEL)


def test_a_load_has_users_or_a_rate() -> None:
    with pytest.raises(BadInput, match="users or a rate"):
        load_point()
    with pytest.raises(BadInput, match="share from 0 to 1"):
        load_point(load=0.5, swing=2.0)
    with pytest.raises(UnknownName, match="chatter"):
        choose_models(("olmo-3-7b:chatter",))
    assert choose_models(("olmo-3-7b:brief+talk",))[0].parts == ("brief", "talk")
