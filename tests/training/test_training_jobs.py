"""Training jobs: work of a micro-batch, memory by hand, schedules, the search, and what a user
sees.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wattcast
from wattcast.core import Dtype
from wattcast.core.errors import BadInput
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.options.training_options import (
    ExpertKernels,
    Fp8Scales,
    Optimizer,
    Recompute,
    Sharding,
    TrainingRecipe,
    parse_count,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.training import step_time
from wattcast.training.microbatch import list_matrices, measure_memory, trace_microbatch
from wattcast.training.optimiser_work import optimiser_graph
from wattcast.training.section_costs import cost_microbatches
from wattcast.training.step_time import ClusterLinks, cost_stages, overlapped_s
from wattcast.training.train_job import TrainingResult, train
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_report import power_over_step, recommend_limit, summarise_training
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.symbolic_tensor import Tape

MODEL = load_model("qwen3-0.6b")


@pytest.fixture(scope="module")
def job() -> TrainingResult:
    return wattcast.train("llama3-8b", "h100-sxm", gpus=8, tokens="1B")


def test_flop_of_a_token_is_six_times_the_weights_and_attention() -> None:
    model = load_model("llama3-8b")
    work = trace_microbatch(model, TrainingRecipe(), 1, 4096)
    dims = model.dims
    products = (
        work.trained - dims.vocab * dims.hidden - (2 * dims.layers + 1) * dims.hidden
    )  # no lookup, no norms
    attention = (
        7 * 2 * dims.layers * dims.hidden * 4096 / 2
    )  # two products forward, five backward, half masked
    assert work.flop_per_token == pytest.approx(6 * products + attention, rel=1e-3)


def test_lora_trains_adapters_alone_and_needs_no_weight_gradients() -> None:
    whole, adapters = (
        trace_microbatch(MODEL, TrainingRecipe(lora_rank=rank), 1, 1024) for rank in (0, 16)
    )
    dims = MODEL.dims
    widths = [dims.heads * dims.dim, dims.kv_heads * dims.dim, dims.kv_heads * dims.dim]
    ranked = sum(16 * (dims.hidden + width) for width in widths) + 16 * (
        dims.heads * dims.dim + dims.hidden
    )
    ranked += 3 * 16 * (dims.hidden + dims.intermediate)
    assert adapters.trained == dims.layers * ranked
    assert adapters.flop_per_token < 0.78 * whole.flop_per_token


def test_qlora_reads_four_bits_for_every_frozen_weight() -> None:
    work = trace_microbatch(MODEL, TrainingRecipe(lora_rank=8, base_bits=4), 1, 512)
    (layers,) = work.layers
    widen = layers.forward[0]
    assert widen.label == "dequantize"
    assert widen.read_byte == pytest.approx(
        widen.write_byte / 4, rel=1e-6
    )  # half a byte in, two bytes out


def test_fp8_training_multiplies_linear_layers_in_fp8() -> None:
    narrow = trace_microbatch(MODEL, TrainingRecipe(precision="fp8"), 1, 512)
    products = [
        op for op in (*narrow.layers[0].forward, *narrow.layers[0].backward) if op.kind == "linear"
    ]
    assert {str(op.dtype) for op in products} == {"fp8"}
    assert (
        len(products) == 3 * 7
    )  # q, k, v, out, gate, up, down: forward, input and weight gradients


def test_tensor_parallel_gpus_share_tokens_outside_products() -> None:
    """Norms ran on every token on each GPU, and 405B models on eight-way nodes came out half as
    fast as published.
    """
    one, two = (
        trace_microbatch(MODEL, TrainingRecipe(), 2, 1024, tp=tp).layers[0] for tp in (1, 2)
    )
    byte = [sum(op.read_byte + op.write_byte for op in layer.selective) for layer in (one, two)]
    assert byte[1] == pytest.approx(byte[0] / 2, rel=0.05)
    assert two.saved_byte == pytest.approx(one.saved_byte / 2, rel=0.05)


def test_memory_of_adamw_with_masters_is_eighteen_bytes_a_weight() -> None:
    recipe = TrainingRecipe()
    work = trace_microbatch(MODEL, recipe, 1, 512)
    found = measure_memory(work, recipe, TrainingStrategy())
    assert found.weight_byte + found.gradient_byte + found.optimiser_byte == pytest.approx(
        18 * work.trained
    )
    spread = {
        zero: measure_memory(work, recipe, TrainingStrategy(dp=8, sharding=zero))
        for zero in Sharding
    }
    assert spread[Sharding.ZERO1].optimiser_byte == pytest.approx(12 * work.trained / 8)
    assert spread[Sharding.ZERO2].gradient_byte == pytest.approx(4 * work.trained / 8)
    assert spread[Sharding.ZERO3].weight_byte == pytest.approx(2 * work.trained / 8)
    totals = [
        spread[zero].total_byte
        for zero in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    ]
    assert totals == sorted(totals, reverse=True)


def test_recomputation_keeps_less() -> None:
    recipe = TrainingRecipe()
    work = trace_microbatch(MODEL, recipe, 4, 2048)
    kept = [
        measure_memory(work, recipe, TrainingStrategy(recompute=again)).activation_byte
        for again in list(Recompute)[:-1]
    ]
    assert kept == sorted(kept, reverse=True)


def test_activations_are_near_the_published_equation() -> None:
    """34·s·b·h bytes a layer with GELU, without scores [Korthikanti2022, eq. 2]; 2·s·b·h of it are
    dropout masks.
    """
    gpt = load_model("gpt2-xl")
    (layer,) = trace_microbatch(gpt, TrainingRecipe(), 1, 1024).layers
    assert layer.saved_byte == pytest.approx(32 * 1024 * gpt.dims.hidden, rel=0.15)


def test_bubble_follows_the_pipeline_equation() -> None:
    gpu = load_gpu("h100-sxm")
    bundle, at, recipe = bundle_for(gpu), OperatingPoint(), TrainingRecipe()
    links = ClusterLinks(gpu)
    cost = cost_microbatches(
        [trace_microbatch(load_model("llama3-8b"), recipe, 1, 2048)], recipe, gpu, at, bundle
    )[0]
    start = TrainingStrategy(pp=4, accumulation=16)
    stage = cost_stages(cost, recipe, start, links)
    expected = stage.total_s.sum(axis=0) - stage.total_s.max(axis=0)  # at every clock
    shared: dict[str, Any] = {
        "gpus": 4,
        "seq": 2048,
        "global_batch": 16,
        "micro_batch": 1,
        "tp": 1,
        "pp": 4,
        "force": True,
    }
    found = train("llama3-8b", "h100-sxm", sharding="none", recompute="none", **shared)
    assert found.candidates[0].swept is not None
    assert found.candidates[0].swept.bubble_s == pytest.approx(expected, rel=1e-6)
    halved = train(
        "llama3-8b", "h100-sxm", sharding="none", recompute="none", interleave=2, **shared
    )
    assert float(halved.step.bubble_s) == pytest.approx(float(found.step.bubble_s) / 2, rel=0.05)


def test_an_exchange_hides_behind_compute_until_it_is_longer() -> None:
    compute = np.asarray(1.0)
    assert float(overlapped_s(compute, 0.0)) == 1.0
    assert 1.0 < float(overlapped_s(compute, 0.5)) < 1.1
    assert float(overlapped_s(compute, 3.0)) == pytest.approx(1.15 + 3.0 - TRAINING.overlap * 1.15)


def test_job_adds_up(job: TrainingResult) -> None:
    found = summarise_training(job)
    assert found["tokens_per_s"] * found["hours"] * 3600 == pytest.approx(1e9)
    assert found["energy_kwh"] == pytest.approx(found["power_w"] * found["hours"] / 1000)
    assert sum(found["step_parts_s"].values()) == pytest.approx(found["step_s"])
    assert found["interval"]["hours"][0] < found["hours"] < found["interval"]["hours"][1]
    assert found["memory_byte"]["total"] <= found["memory_byte"]["usable"]
    spent = sum(float(part["length_s"]) * float(part["power_w"]) for part in power_over_step(job))
    assert spent == pytest.approx(found["power_w"] * found["step_s"], rel=0.03)
    assert json.loads(json.dumps(found)) == found


def test_nothing_that_was_timed_is_faster(job: TrainingResult) -> None:
    steps = [float(c.step.latency_s) for c in job.candidates if c.step is not None]
    assert job.step_s == min(steps)


def test_lower_limits_take_longer_and_one_is_recommended(job: TrainingResult) -> None:
    limits, clocks, hours, _ = np.array(job.curve).T
    assert (np.diff([limits, clocks]) < 0).all()
    assert (np.diff(hours) > 0).all()
    assert recommend_limit(job) in limits


@pytest.mark.parametrize("counts", [(1, 8), pytest.param((1, 8, 64), marks=pytest.mark.slow)])
def test_more_gpus_never_take_longer(counts: tuple[int, ...]) -> None:
    hours = [
        train("qwen3-0.6b", "h100-sxm", gpus=n, tokens="1B", global_batch=256).hours for n in counts
    ]
    assert hours == sorted(hours, reverse=True)


def test_pipeline_slack_saves_energy_only_where_stages_wait() -> None:
    assert train("qwen3-0.6b", "h100-sxm", gpus=2, tp=1, pp=1).slack_kwh == 0.0
    assert train("llama3-8b", "h100-sxm", gpus=16, tp=1, pp=4, seq=2048).slack_kwh > 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "llama3-70b", "gpus": 1}, "llama3-70b on 1 x"),
        ({"tokens": "many"}, "1B, 300M"),
        ({"sharding": "zero4"}, "zero3"),
        ({"optimizer": "adam"}, "adamw"),
        ({"base_bits": 4}, "--lora 16"),
        ({"tp": 3}, "heads"),
        ({"global_batch": 3, "tp": 1}, "share evenly"),
        ({"stack": "engine"}, "only serves"),
        ({"model": "resnet50"}, "predict --phase train"),
        ({"cp": 3}, "divisor of seq"),
        ({"ep": 2}, "experts"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100-sxm", "gpus": 8, **options}
    if options.get("cp"):
        given["gpus"] = 6
    with pytest.raises(BadInput, match=words):
        train(**given)


@pytest.mark.parametrize(
    ("text", "number"), [("1B", 1e9), ("300M", 3e8), ("1.5t", 1.5e12), ("1e9", 1e9), (7, 7.0)]
)
def test_counts_as_people_write_them(text: str | float, number: float) -> None:
    assert parse_count(text, "tokens") == number


def test_a_strategy_says_what_it_is() -> None:
    shown = str(
        replace(
            TrainingStrategy(dp=4, tp=2, recompute=Recompute.FULL), micro_batch=2, accumulation=8
        )
    )
    assert shown == "dp4 tp2 zero1 recompute full micro-batch 2 x 8"


def test_one_step_on_one_gpu_is_what_predict_says() -> None:
    """Sections were once governed each by itself, so that steps under the power cap came out up to
    17 % too slow.
    """
    options: dict[str, Any] = {
        "master_weights": False,
        "gradient_byte": 2,
        "stack": "eager",
        "force": True,
    }
    found = train(
        "llama3-8b",
        "h200",
        gpus=1,
        seq=1024,
        global_batch=2,
        micro_batch=2,
        recompute="none",
        **options,
    )
    alone = wattcast.predict("llama3-8b", "h200", phase="train", batch=2, seq=1024)
    assert found.step_s == pytest.approx(alone.latency_s, rel=0.005)
    assert float(found.step.power_w) == pytest.approx(alone.power_w, rel=0.005)


def test_a_step_holds_the_power_limit_on_the_mean() -> None:
    """Waiting leaves power to compute, so a lower limit never makes a step faster nor draws more
    than it allows.
    """
    swept = train("llama3-8b", "h100-sxm", gpus=8, force=True).candidates[0].swept
    assert swept is not None
    held = swept.hold_power(np.array([700.0, 500.0, 400.0]))
    assert (np.diff(held.latency_s) > 0.0).all()
    assert held.power_w == pytest.approx([700.0, 500.0, 400.0], rel=0.005)


def test_the_end_of_a_step_that_outlasts_the_window_is_held_by_itself() -> None:
    """An optimiser that takes longer than the governor's window leaves no power to the passes
    before it.

    A step of SmolLM3-3B with Adafactor drew 630 W on an H200; its prediction was the mean of both
    parts at the limit, 692 W, since the optimiser of 92 ms was taken to lend its watts to the
    passes."""
    shared: dict[str, Any] = {"gpus": 1, "force": True, "network": "10GB/s"}
    swept = (
        train("llama3-8b", "h200", seq=4096, global_batch=4, micro_batch=4, **shared)
        .candidates[0]
        .swept
    )
    assert swept is not None
    slow_end = replace(swept, end_s=swept.end_s + 1.0, exchange_s=swept.exchange_s + 1.0)
    slow_end = replace(slow_end, end_j=swept.end_j + 100.0, energy_j=swept.energy_j + 100.0)
    limit_w = 692.0
    held = slow_end.hold_power(limit_w)
    start_w = (held.energy_j - held.end_j) / (held.latency_s - held.end_s)
    assert float(start_w) == pytest.approx(limit_w, rel=0.005)
    assert float(held.power_w) < 0.9 * limit_w
    short_end = swept.hold_power(limit_w)
    assert float(swept.end_s[-1]) < 0.09
    assert float(short_end.power_w) == pytest.approx(limit_w, rel=0.005)


def test_experts_of_a_rack_travel_less_than_copies_of_tokens() -> None:
    """A token goes to a node once, however many of its experts are there."""
    shared: dict[str, Any] = {
        "gpus": 64,
        "seq": 4096,
        "global_batch": 64,
        "micro_batch": 1,
        "tp": 1,
        "pp": 1,
        "recompute": "selective",
        "force": True,
    }
    near = train("qwen3-30b-a3b", "h100-sxm", ep=8, graphs=True, **shared)
    far = train("qwen3-30b-a3b", "h100-sxm", ep=64, graphs=True, **shared)
    assert float(far.step.exchange_s) > float(near.step.exchange_s)
    launched = train("qwen3-30b-a3b", "h100-sxm", ep=8, **shared)
    assert near.step_s < launched.step_s


def test_older_attention_and_losses_slow_a_job() -> None:
    base = train(
        "llama3-8b", "h100-sxm", gpus=8, tp=1, micro_batch=1, sharding="zero3", recompute="none"
    )
    options: dict[str, Any] = {
        "gpus": 8,
        "tp": 1,
        "micro_batch": 1,
        "sharding": "zero3",
        "recompute": "none",
    }
    assert train("llama3-8b", "h100-sxm", attention_slowdown=2.0, **options).step_s > base.step_s
    assert train("llama3-8b", "h100-sxm", loss_share=0.0, **options).step_s < base.step_s


def test_experts_have_fewer_copies_than_other_weights() -> None:
    """With ep 8 of 64 GPUs, eight hold the same experts: state is shared by eight, and so is the
    exchange.
    """
    strategy = TrainingStrategy(dp=64, ep=8)
    assert (
        strategy.expert_dp,
        TrainingStrategy(dp=8, tp=2, ep=16).expert_dp,
        TrainingStrategy(dp=8).expert_dp,
    ) == (
        8,
        1,
        8,
    )
    model, recipe = load_model("qwen3-30b-a3b"), TrainingRecipe()
    work = trace_microbatch(model, recipe, 1, 1024, ep=8)
    experts = sum(section.expert_trained * section.repeat for section in work.sections)
    held = (work.trained - experts) / 64 + experts / 8
    memory = measure_memory(work, recipe, strategy)
    assert memory.optimiser_byte == pytest.approx(12 * held, rel=1e-6)
    halves = trace_microbatch(
        model, recipe, 1, 1024, tp=2, ep=8
    )  # tensor-parallel GPUs hold whole experts
    assert sum(s.expert_trained * s.repeat for s in halves.sections) == pytest.approx(
        experts, rel=1e-3
    )


def test_frameworks_pass_over_rows_of_experts() -> None:
    """Biases and clamps of gpt-oss are kernels of their own unless experts are fused; copies of
    tokens are sorted.
    """
    model = load_model("gpt-oss-20b")
    plain = trace_microbatch(model, TrainingRecipe(), 1, 1024).layers[0]
    fused = trace_microbatch(
        model, TrainingRecipe(expert_kernels=ExpertKernels.FUSED), 1, 1024
    ).layers[0]
    copied = trace_microbatch(model, TrainingRecipe(expert_copies=True), 1, 1024, ep=8).layers[0]
    names = [op.name for op in plain.forward if op.label == "experts"]
    assert names == ["scale", "cat", "mul", "add", "cat", "cast"]
    assert not [
        op
        for op in (*fused.forward, *fused.backward)
        if op.label == "experts" or op.name.startswith("silu")
    ]
    assert [op.count for op in copied.forward if op.label == "experts" and op.name == "copy"] == [2]
    rows = {op.m for op in plain.forward if op.kind == "bmm"}
    assert all(m % 32 == 0 for m in rows), rows

    # a graph of the whole step does not know rows of experts on the host: products add biases
    replayed = trace_microbatch(model, TrainingRecipe(graphs=True), 1, 1024).layers[0]
    assert [op.name for op in replayed.forward if op.label == "experts"] == ["scale", "cat"]
    assert "sum" in [op.name for op in replayed.backward if op.label == "experts"]


def test_gradients_of_clamps_compare_and_pick() -> None:
    """PyTorch compares with each limit and picks by the results: six kernels, where two were
    counted, and gpt-oss in bf16 came out 17 to 38 % too fast.
    """
    layer = trace_microbatch(load_model("gpt-oss-20b"), TrainingRecipe(), 1, 1024).layers[0]
    counts = {
        op.name: op.count
        for op in layer.backward
        if op.label == "experts" and op.name in ("compare", "where", "relu_grad")
    }
    assert counts == {"compare": 3, "where": 2}


def test_a_rotary_embedding_with_a_factor_runs_step_by_step() -> None:
    """Transformer Engine's kernel takes no factor of YaRN."""
    scaled, plain = (
        trace_microbatch(load_model(name), TrainingRecipe(), 1, 1024).layers[0]
        for name in ("gpt-oss-20b", "llama3-8b")
    )
    assert not [op for op in scaled.forward if op.name == "rotary"]
    assert len([op for op in scaled.forward if op.label == "rotary"]) == 8  # queries and keys
    assert [op for op in scaled.backward if op.label == "rotary"]
    assert [op for op in plain.forward if op.name == "rotary"]


def test_layers_that_stages_cannot_share_evenly_are_balanced() -> None:
    gpu, model = load_gpu("h100-sxm"), load_model("qwen3-0.6b")
    odd = replace(model, dims=replace(model.dims, layers=27))
    links, recipe, strategy = ClusterLinks(gpu), TrainingRecipe(), TrainingStrategy(pp=2)
    for spec, even in ((model, False), (odd, True)):
        work = trace_microbatch(spec, recipe, 1, 1024)
        (cost,) = cost_microbatches([work], recipe, gpu, OperatingPoint(), bundle_for(gpu))
        first, last = cost_stages(cost, recipe, strategy, links).total_s[:, -1]
        assert (abs(last / first - 1.0) < 0.01) == even


def test_separate_experts_are_one_product_each() -> None:
    """On Blackwell fp8 products are the engines', which kernel tables have; grouped experts stay
    one kernel.
    """
    model, gpu = load_model("qwen3-30b-a3b"), load_gpu("b200")
    found = []
    for kernels in (ExpertKernels.SEPARATE, ExpertKernels.GROUPED):
        recipe = TrainingRecipe(precision="fp8", expert_kernels=kernels)
        work = trace_microbatch(model, recipe, 1, 512, ep=8)
        (cost,) = cost_microbatches([work], recipe, gpu, OperatingPoint(), bundle_for(gpu))
        layer = cost.predictions[2]
        found.append(
            {
                op.op.kind: op.op.count
                for op in layer.ops
                if "experts" in op.op.label and op.op.is_product
            }
        )
    assert found[0] == {"engine_scaled_mm": 16}
    assert found[1] == {"bmm": 1}


def test_muon_multiplies_by_newton_and_schulz() -> None:
    """Five iterations of 4m²n + 2m³ operations for every matrix of the layers."""
    work = trace_microbatch(MODEL, TrainingRecipe(), 1, 512)
    muon, adamw = (TrainingRecipe(optimizer=Optimizer(name)) for name in ("muon", "adamw"))
    graph = optimiser_graph(work, muon, TrainingStrategy(sharding=Sharding.NONE))
    dims = MODEL.dims
    sides = [(dims.hidden, dims.heads * dims.dim)] * 2 + [
        (dims.hidden, dims.kv_heads * dims.dim)
    ] * 2
    sides += [(dims.hidden, dims.intermediate)] * 3
    wanted = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in sides) * dims.layers
    products = [op for block in graph.blocks for op in block.ops if op.is_product]
    assert sum(op.flop * op.count for op in products) == pytest.approx(wanted, rel=1e-6)
    assert len(optimiser_graph(work, adamw, TrainingStrategy()).blocks) == 1
    shared: dict[str, Any] = {"gpus": 1, "micro_batch": 1, "global_batch": 1, "seq": 512}
    slow, fast = (train(MODEL, "h100-sxm", optimizer=name, **shared) for name in ("muon", "adamw"))
    assert float(slow.step.optimiser_s) > float(fast.step.optimiser_s)


def test_filters_of_a_convolution_are_rows_of_one_matrix() -> None:
    """Whisper's filters over three frames were taken for experts, and a filter of pictures would
    have lost a dimension: both have more than two.
    """
    model = load_model("whisper-small")
    work = trace_microbatch(model, TrainingRecipe(optimizer=Optimizer.MUON), 1, 448)
    assert sum(section.expert_trained for section in work.sections) == 0

    stacks = [stack for section in work.sections for stack in section.matrices]
    hidden = model.dims.hidden
    assert (1, hidden, 3 * model.dims.mel_bins, False) in stacks
    assert (1, hidden, 3 * hidden, False) in stacks


def test_matrices_of_filters_keep_every_weight() -> None:
    """A filter of pictures has four dimensions, of which the first was dropped."""
    tape = Tape(training=True)
    weight = tape.parameter(64, 3, 7, 7, dtype=Dtype.BF16)
    filters = {id(weight.storage)}
    (stack,) = list_matrices([weight], filters)
    assert stack == (1, 64, 3 * 7 * 7, False)


def test_adafactor_passes_over_every_matrix_in_fp32() -> None:
    """transformers.Adafactor moves 102 bytes for each bf16 weight, and twelve vectors as long as
    the longer side.
    """
    recipe = TrainingRecipe(optimizer=Optimizer.ADAFACTOR, master_weights=False, gradient_byte=2)
    work = trace_microbatch(MODEL, recipe, 1, 512)
    graph = optimiser_graph(work, recipe, TrainingStrategy(sharding=Sharding.NONE))
    sides = [(a, b, n * s.repeat) for s in work.sections for n, a, b, _ in s.matrices]
    moved = sum((102 * a * b + 12 * 8 * max(a, b) + 4 * b) * times for a, b, times in sides)
    ops = [op for block in graph.blocks[1:] for op in block.ops]
    assert sum((op.read_byte + op.write_byte) * op.count for op in ops) == pytest.approx(
        moved, rel=1e-6
    )
    assert sum(a * b * times for a, b, times in sides) == pytest.approx(work.trained, rel=1e-3)


def test_a_single_expert_of_a_gpu_is_not_shared_like_the_other_weights() -> None:
    """Eight GPUs that hold one expert each share all weights but their expert.

    Its matrices were taken out of the shared weights, because there was only one of each size, and
    AdamW's pass kept seven eighths of them.
    """
    recipe = TrainingRecipe(optimizer=Optimizer.ADAFACTOR)
    work = trace_microbatch(load_model("mixtral-8x7b"), recipe, 1, 512, ep=8)
    strategy = TrainingStrategy(dp=8, ep=8, sharding=Sharding.ZERO1)
    fused_pass, updates = optimiser_graph(work, recipe, strategy).blocks
    vectors = work.trained - sum(
        stack.number * stack.rows * stack.columns * section.repeat
        for section in work.sections
        for stack in section.matrices
    )
    passed = sum(op.n * op.count for op in fused_pass.ops if isinstance(op, Elementwise))
    assert passed == pytest.approx(vectors / 8, rel=0.01)
    # No other GPU updates the expert of a layer: its matrix down is one of this size
    dims = load_model("mixtral-8x7b").dims
    sums = [
        op
        for op in updates.ops
        if isinstance(op, Elementwise)
        and op.name == "mul"
        and op.n == dims.hidden * dims.intermediate
    ]
    assert sum(op.count for op in sums) == dims.layers


@pytest.mark.parametrize(("gradient_byte", "cast_byte"), [(4, 0), (2, 2 + 4)])
def test_adafactor_casts_no_weights_that_are_fp32(gradient_byte: int, cast_byte: float) -> None:
    """``transformers.Adafactor`` casts a gradient and a weight of 16 bits and no others.

    Training in fp32 was counted with a copy of each weight before its update, and another after it.
    """
    recipe = TrainingRecipe(
        precision="fp32", optimizer=Optimizer.ADAFACTOR, gradient_byte=gradient_byte
    )
    work = trace_microbatch(MODEL, recipe, 1, 512)
    graph = optimiser_graph(work, recipe, TrainingStrategy(sharding=Sharding.NONE))
    casts = [op for block in graph.blocks[1:] for op in block.ops if op.name == "cast"]
    moved_byte = sum((op.read_byte + op.write_byte) * op.count for op in casts)
    assert moved_byte == pytest.approx(cast_byte * work.trained, rel=1e-3)


@pytest.mark.parametrize(("scales", "cast_byte"), [("delayed", 2 + 2), ("row", 0)])
def test_weights_without_masters_are_cast_from_their_own_format(
    scales: str, cast_byte: float
) -> None:
    """An update in fp8 without masters reads its bf16 weights and writes two fp8 copies.

    It was counted as if it read fp32 masters and wrote the weight too, and even with scales that
    need no copies.
    """
    recipe = TrainingRecipe(
        precision="fp8",
        fp8_scales=Fp8Scales(scales),
        optimizer=Optimizer.MUON,
        master_weights=False,
        gradient_byte=2,
    )
    work = trace_microbatch(MODEL, recipe, 1, 512)
    graph = optimiser_graph(work, recipe, TrainingStrategy(sharding=Sharding.NONE))
    casts = [op for block in graph.blocks[1:] for op in block.ops if op.name == "cast"]
    moved_byte = sum((op.read_byte + op.write_byte) * op.count for op in casts)
    weights = sum(
        number * rows * columns * section.repeat
        for section in work.layers
        for number, rows, columns, _ in section.matrices
    )
    assert moved_byte == pytest.approx(cast_byte * weights)


def test_restarts_lose_a_share_of_all_time_and_cost_decides_by_price() -> None:
    shared: dict[str, Any] = {
        "gpus": 8,
        "tp": 1,
        "seq": 512,
        "price": "2USD/h",
        "electricity": "0.3USD/kWh",
    }
    plain, failing = (
        train(MODEL, "h100-sxm", failures_per_gpu_day=rate, **shared) for rate in (0.0, 0.6)
    )
    assert failing.hours == pytest.approx(plain.hours / (1.0 - 8 * 0.6 * 30 / 1440))
    assert failing.curve[0][2:] == pytest.approx((failing.hours, failing.energy_kwh))
    cheapest = train(MODEL, "h100-sxm", minimise="cost", **shared)
    assert cheapest.cost <= plain.cost
    assert cheapest.reason.startswith("least cost of")


def test_nvfp4_runs_where_tensor_cores_have_it() -> None:
    shared: dict[str, Any] = {
        "gpus": 8,
        "tp": 1,
        "pp": 1,
        "micro_batch": 1,
        "global_batch": 8,
        "recompute": "none",
    }
    half, quarter = (train("llama3-8b", "b200", dtype=name, **shared) for name in ("fp8", "nvfp4"))
    assert quarter.step_s < half.step_s
    assert quarter.memory.weight_byte < half.memory.weight_byte
    with pytest.raises(BadInput, match="fp4"):
        train("llama3-8b", "h100-sxm", dtype="nvfp4", **shared)


def test_activations_wait_in_the_hosts_memory() -> None:
    """They take PCIe's time beside the layers, leave room on the GPU, and are searched where that
    is asked for.
    """
    shared: dict[str, Any] = {
        "gpus": 1,
        "tp": 1,
        "pp": 1,
        "micro_batch": 2,
        "global_batch": 2,
        "force": True,
    }
    kept, away, again = (
        train("llama3-8b", "h100-sxm", recompute=name, **shared)
        for name in ("none", "offload", "full")
    )
    assert away.memory.activation_byte < 0.25 * kept.memory.activation_byte
    assert away.step.compute_s < again.step.compute_s  # nothing runs a second time
    assert away.step_s > kept.step_s
    assert again.memory.activation_byte < away.memory.activation_byte
    usual = {c.strategy.recompute for c in train(MODEL, "h100-sxm", gpus=8).candidates}
    asked = {
        c.strategy.recompute for c in train(MODEL, "h100-sxm", gpus=8, offload=True).candidates
    }
    assert asked - usual == {Recompute.OFFLOAD}


def test_frameworks_of_before_2022_reduce_gradients_after_the_last_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron began to reduce gradients beside the backward pass in 2023: BigScience waited for
    exchanges that were taken to hide behind a second of it.
    """
    monkeypatch.setattr(step_time, "_replica_exchange_s", lambda *_: 0.4)
    stage: Any = SimpleNamespace(backward_s=np.array([1.0]))
    work: Any = SimpleNamespace(sections=())
    links = ClusterLinks(load_gpu("a100-sxm-80gb"))
    newer = TrainingStrategy(dp=8, tp=8)
    older = replace(newer, sequence_parallel=False)
    alone = replace(older, tp=1)  # nothing tells a framework's time without tensor parallelism
    waits_s = [
        float(step_time._exposed_sync_s(stage, work, TrainingRecipe(), strategy, links))
        for strategy in (newer, older, alone)
    ]
    assert waits_s[1] == pytest.approx(0.8)
    assert waits_s[0] < 0.2
    assert waits_s[2] == waits_s[0]


def test_keys_are_exchanged_again_where_the_forward_pass_is_computed_again() -> None:
    options: dict[str, Any] = {
        "gpus": 8,
        "tp": 1,
        "cp": 8,
        "micro_batch": 1,
        "global_batch": 1,
        "seq": 65536,
        "loss_share": 0.0,
        "force": True,
        "sharding": "zero1",
    }
    links = step_time.ClusterLinks(load_gpu("a100-sxm-80gb"))
    found = wattcast.train("llama3-8b", "a100-sxm-80gb", recompute="full", **options)
    work = found.candidates[0].cost.work
    layer = work.layers[0]
    once = step_time._inner_exchange_s(layer, found.recipe, found.strategy, links, False)
    again = step_time._inner_exchange_s(layer, found.recipe, found.strategy, links, True)
    assert once[0] > 0.0
    assert again[1] - once[1] == pytest.approx(once[0])
