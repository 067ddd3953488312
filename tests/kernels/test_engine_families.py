"""Kernels of an inference engine: what they read and compute, and how formats and routing change
it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import wattcast
from wattcast.calibrate.row_prediction import predict_bursts_s
from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import build_kernels, reference_chip
from wattcast.kernels.families.engine.fused_experts import choose_expert_tile
from wattcast.kernels.kernel_table import USUAL_CONDITION, KernelWork
from wattcast.kernels.machete_kernels import MACHETE, machete_energy, shares_steps
from wattcast.predictor.bundle import bundle_for, forecast_bundle, shipped_bundle
from wattcast.workload.build_model import build_graph, compute_footprint
from wattcast.workload.engine_operators import (
    EXPERT_LIBRARIES,
    SMALL_TILES,
    BlockProduct,
    FusedExperts,
    LatentAttention,
    PagedAttention,
    ScaledProduct,
    WeightOnlyProduct,
)
from wattcast.workload.engine_row_operators import (
    AlignTokens,
    CompiledRows,
    EngineRmsNorm,
    Quantize,
    Sampling,
)
from wattcast.workload.model_options import RECIPES, ModelOptions
from wattcast.workload.operator_base import Operator, registered_operators
from wattcast.workload.readers import from_json


def lower(*ops: Operator) -> KernelWork:
    gpu = load_gpu("h200")
    return build_kernels(ops, (USUAL_CONDITION,) * len(ops), gpu, reference_chip(gpu), ()).work


def test_paged_attention_counts_what_masks_and_windows_keep() -> None:
    whole = PagedAttention(8, 2, 128, ((3, 100, 300),))
    assert whole.scores == 3 * sum(range(201, 301))
    windowed = PagedAttention(8, 2, 128, ((3, 100, 300),), window=250)
    assert windowed.scores == 3 * sum(min(keys, 250) for keys in range(201, 301))
    assert PagedAttention(8, 2, 128, ((1, 1, 300),), window=64).scores == 64
    assert PagedAttention(8, 2, 128, ((1, 50, 50),), window=20).scores == sum(
        min(i, 20) for i in range(1, 51)
    )


def test_an_fp8_cache_halves_the_bytes_and_multiplies_in_fp8() -> None:
    wide = PagedAttention(32, 8, 128, ((64, 1, 4096),))
    narrow = PagedAttention(32, 8, 128, ((64, 1, 4096),), Dtype.FP8)
    assert narrow.cache_byte == wide.cache_byte / 2
    assert (wide.math_dtype, narrow.math_dtype) == (Dtype.BF16, Dtype.FP8)


def test_padded_rows_of_decode_count_as_arithmetic() -> None:
    """A tile of 64 rows works on four query heads: the other sixty rows draw power too."""
    op = PagedAttention(32, 8, 128, ((64, 1, 4096),), splits=32)
    work = lower(op)
    assert float(work.padded_flop[0]) == pytest.approx(op.flop * (64 / 4 - 1), rel=0.01)


def test_long_sequences_are_split_over_the_chip_and_many_are_not() -> None:
    one, many = (
        2 ** lower(PagedAttention(32, 8, 128, groups, splits=32)).features["log_cut"][0]
        for groups in (((1, 1, 8192),), ((256, 1, 1024),))
    )
    assert (one, many) == (13, 1), (
        "64 blocks of 128 keys by 8 heads: 5 a part, 1.1 times an even share of 132 SMs"
    )


def test_a_prompt_walks_over_the_blocks_that_its_tiles_see() -> None:
    """512 tokens by 8 key heads: 16 tiles of 32 tokens see 1 to 4 blocks, 40 in all; the longest
    ones go first.
    """
    work = lower(PagedAttention(32, 8, 128, ((1, 512, 512),), splits=32))
    features = work.features
    assert (2 ** features["log_cut"][0], 2 ** features["log_units"][0]) == (1, 128)
    assert 2 ** features["log_busiest"][0] == 4, "128 tiles run on 132 SMs at once"
    assert features["fill"][0] == pytest.approx(320 / (132 * 4))


def test_without_a_limit_the_longest_sequence_decides_how_often_it_is_cut() -> None:
    """Two tokens of 4 key heads are 4 tiles; 27 parts of each fill 82 % of 132 SMs, within 85 % of
    the best.
    """
    long, filled = (
        2 ** lower(PagedAttention(8, 4, 128, groups)).features["log_cut"][0]
        for groups in (((1, 2, 16384),), ((1, 8192, 8192),))
    )
    assert filled == 1
    assert 20 < long <= 33


def lower_forecast(gpu: str, *ops: Operator) -> KernelWork:
    chip = load_gpu(gpu)
    return build_kernels(
        ops, (USUAL_CONDITION,) * len(ops), chip, forecast_bundle(chip).reference, ()
    ).work


def test_a_window_keeps_heads_apart_before_hopper() -> None:
    """FlashAttention 2 packs heads that share keys without a window alone: an L40S took 16 times
    its forecast.
    """
    sizes = (32, 4, 128, ((256, 1, 64),))
    plain, windowed = PagedAttention(*sizes), PagedAttention(*sizes, window=128)
    units = 2 ** lower_forecast("l40s", plain, windowed).features["log_units"]
    assert units.tolist() == pytest.approx([256 * 4, 256 * 32])
    narrow = (
        2 ** lower_forecast("l40s", replace(windowed, kv_dtype=Dtype.FP8)).features["log_units"]
    )
    assert narrow.tolist() == pytest.approx([256 * 4])  # FlashInfer packs them
    hopper = 2 ** lower_forecast("h100-sxm", windowed).features["log_units"]
    assert hopper.tolist() == pytest.approx([256 * 4])


def test_sequences_of_one_token_are_cut_as_each_chip_cuts_them() -> None:
    shared, own = (
        PagedAttention(32, 8, 128, ((1, 1, 65536),)),
        PagedAttention(8, 8, 128, ((1, 1, 65536),)),
    )
    assert 2 ** lower_forecast("b200", shared, own).features["log_cut"] == pytest.approx(
        [148 // 8] * 2
    )
    cut, whole = 2 ** lower_forecast("l40s", shared, own).features["log_cut"]
    assert whole == pytest.approx(1.0)  # FlashAttention 2 cuts where it packs
    assert 2 * 142 * 0.85 <= 8 * cut <= 2 * 142


def test_flash_attention_2_counts_the_tiles_of_the_whole_batch() -> None:
    """8 key heads of 4 sequences are 32 tiles for 216 places of an A100: 6 parts of 16 blocks fill
    89 % of them.
    """
    few, many = (
        PagedAttention(32, 8, 128, ((4, 1, 2048),)),
        PagedAttention(32, 8, 128, ((64, 1, 2048),)),
    )
    work = lower_forecast("a100-sxm-80gb", few, many)
    assert 2 ** work.features["log_cut"] == pytest.approx([6.0, 1.0])
    assert work.launches.tolist() == [4.0, 3.0], (
        "a kernel, two copies of packed heads, and the sum of parts"
    )
    assert work.slots.tolist() == [2.0, 2.0], (
        "tiles of 80 KiB, two of which fit 163 KiB of shared memory"
    )
    assert lower_forecast("l40s", few).slots.tolist() == [1.0]
    one = lower_forecast("a100-sxm-80gb", PagedAttention(32, 8, 128, ((1, 1, 129),)))
    assert one.l2_byte[0] < 2 * 2 * 8 * 130 * 128 * 2, "keys behind the last one are not loaded"


def test_graphics_chips_of_blackwell_decode_with_flash_attention_2() -> None:
    """They have no tensor memory, so that TensorRT-LLM's kernels do not run on them. One tile walks
    over all keys of a head that shares them with no other, and multiplies 64 rows for one query.
    """
    alone = PagedAttention(1, 1, 256, ((1, 1, 32768),))
    work = lower_forecast("rtx-pro-6000", alone)
    assert work.units.tolist() == [1.0]
    assert work.features["pad_m"].tolist() == [1 / 64]
    gpu = load_gpu("rtx-pro-6000")
    product_s = 4 * 64 * 32768 * 256 / float(1024 * gpu.clocks.max_hz)
    bundle = forecast_bundle(gpu)
    kernels = build_kernels((alone,), (USUAL_CONDITION,), gpu, bundle.reference, ())
    assert predict_bursts_s(kernels, gpu, bundle)[0] > product_s
    assert lower_forecast("b200", alone).units[0] > 1.0


def test_blackwell_decodes_with_tiles_of_few_rows() -> None:
    """TensorRT-LLM's kernels take 8 rows for up to 8 heads that share keys, which FlashAttention 3
    pads to 64.
    """
    op, wide = (
        PagedAttention(32, 8, 128, ((64, 1, 4096),)),
        PagedAttention(64, 4, 128, ((64, 1, 4096),)),
    )
    blackwell, hopper = lower_forecast("b200", op, wide), lower_forecast("h100-sxm", op)
    assert blackwell.features["pad_m"].tolist() == [0.5, 1.0]
    assert hopper.features["pad_m"].tolist() == [4 / 64]
    odd = replace(op, head_dim=192, kv_dtype=Dtype.FP8)
    assert lower_forecast("b200", odd).kernel_family == (
        "attention.engine.paged.decode.fp8.triton",
    )


def test_latent_attention_reads_its_cache_once() -> None:
    op = LatentAttention(8, 128, 1, 4096)
    assert op.cache_byte == 8 * 4096 * 576 * 2
    assert float(lower(op).dram_read_byte[0]) == op.read_byte


@pytest.mark.parametrize("routing", ["even", "skewed", "same"])
@pytest.mark.parametrize("tokens", [4, 64, 2000])
def test_expected_experts_and_blocks_are_those_of_drawn_routings(routing: str, tokens: int) -> None:
    op = FusedExperts(tokens, 64, 6, 2048, 1408, routing=routing)
    rng = np.random.default_rng(0)
    active, blocks = [], []
    block, _ = choose_expert_tile(op)
    for _ in range(60):
        score = rng.gumbel(size=(tokens, 64)) - (
            np.log(1.0 + rng.permutation(64)) if routing == "skewed" else 0.0
        )
        chosen = np.argsort(-score, axis=1)[:, :6]
        if routing == "same":
            chosen = np.tile(np.arange(6), (tokens, 1))
        count = np.bincount(chosen.ravel(), minlength=64)
        active.append((count > 0).sum())
        blocks.append(np.ceil(count / block).sum())
    assert op.active == pytest.approx(np.mean(active), rel=0.03)
    assert op.count_blocks(block) == pytest.approx(np.mean(blocks), rel=0.06)


def test_skew_sends_tokens_to_fewer_experts() -> None:
    even, skewed, same = (
        FusedExperts(16, 64, 6, 2048, 1408, skew=skew).active for skew in (0.0, 0.5, 1.0)
    )
    assert even > skewed > same == 6


def test_balanced_routing_gives_every_expert_as_many_tokens() -> None:
    """Drawn at random, 64 picks meet 40 of 64 experts; public tables that balance them time all 64."""
    op = FusedExperts(8, 64, 8, 2048, 1408, routing="balanced")
    assert (
        op.active,
        op.count_blocks(16),
        FusedExperts(100, 64, 8, 64, 64, routing="balanced").count_blocks(8),
    ) == (*(64.0, 64.0, 128.0),)
    assert 30.0 < FusedExperts(8, 64, 8, 2048, 1408, routing="power").active < 40.0


def test_visits_to_experts_elsewhere_pass_through_vllms_own_kernels_only() -> None:
    byte = [
        float(
            lower(FusedExperts(64, 2, 1, 2048, 1408, kernel=kernel, elsewhere=4032)).between_byte[0]
        )
        for kernel in ("triton", "marlin", "trtllm")
    ]
    assert byte[0] > byte[1] > 10.0 * byte[2]


def test_tiles_of_experts_are_chosen_by_the_tokens_of_all_gpus() -> None:
    """A GPU with two of 128 experts gets 16 of 1024 tokens: its kernels have the tiles of 1024, and
    Marlin's too.
    """
    alone = FusedExperts(16, 2, 1, 2048, 1408)
    shared = replace(alone, elsewhere=8176, all_tokens=1024, gpus=64)
    assert [choose_expert_tile(op) for op in (alone, shared)] == [(16, 64.0), (128, 128.0)]
    assert [choose_expert_tile(op, "marlin")[0] for op in (alone, shared)] == [16, 64]


def test_older_versions_of_vllm_have_small_tiles() -> None:
    """On an A100, 160 tokens took 1.4 times as long as 128 with 128 experts: there the tile changed
    (vLLM 0.14).
    """
    ops = [
        FusedExperts(tokens, 128, 8, 4096, 1536, kernel=SMALL_TILES) for tokens in (128, 160, 4096)
    ]
    assert [choose_expert_tile(op, op.kernel) for op in ops] == [(16, 32.0), (64, 64.0), (64, 64.0)]
    large = lower(ops[-1], replace(ops[-1], kernel="triton")).l2_byte
    assert large[0] == pytest.approx(2.0 * large[1], rel=0.1), (
        "tiles half as high and wide load twice as much"
    )


def test_tiles_of_zeros_take_their_time() -> None:
    """Padded blocks of tokens of other GPUs' experts run as well, and return after they stored
    zeros.
    """
    shared = FusedExperts(128, 2, 1, 2048, 1408, elsewhere=8064, all_tokens=1024, gpus=64)
    work = lower(shared, replace(shared, gpus=1), replace(shared, kernel="trtllm"))
    assert work.steps[0] > 2.0 * work.steps[1] == 2.0 * work.steps[2]


def test_tensor_cores_of_blackwell_apply_scales_of_fp4_blocks_themselves() -> None:
    """Products in nvfp4 once took the steps of Hopper's fp8 blocks, of which each promotes its
    sums.
    """
    gpu = load_gpu("b200")
    op = BlockProduct(4096, 4096, 4096, kernel="cutlass", bit=4.5, dtype=Dtype.FP4)
    work = build_kernels((op,), (USUAL_CONDITION,), gpu, reference_chip(gpu), ()).work
    assert (list(work.kernel_family), float(work.units[0])) == (["gemm.engine.block.fp4"], 32 * 16)


def test_kernels_of_tensorrt_llm_gate_in_the_first_product() -> None:
    """Its results pass once, half as wide, and fp8 needs no kernels that look for the largest value
    of a tensor.
    """
    half = FusedExperts(512, 64, 8, 2048, 1408)
    fp8 = replace(half, dtype=Dtype.FP8, weights="fp8", scales="tensor")
    ops = (half, fp8, replace(fp8, scales="block"))
    own, fused = lower(*ops), lower(*(replace(op, kernel="trtllm") for op in ops))
    assert (fused.between_byte < own.between_byte).all()
    assert fused.between_byte[0] == 512 * 8 * (4 * 2048 + 4 * 1408)
    assert (own.launches.tolist(), fused.launches.tolist()) == ([6, 12, 8], [6, 7, 8])


def test_an_sm_runs_marlin_no_faster_on_a_larger_chip() -> None:
    """On public tables an SM of a B200 gets through as many flops and weights a cycle as one of an
    H200.
    """
    few, many = (
        FusedExperts(m, 64, 8, 4096, 1536, "int4", "group", kernel="marlin") for m in (8, 8192)
    )

    def cycles(gpu: str, op: FusedExperts) -> float:
        chip = load_gpu(gpu)
        kernels = build_kernels((op,), (USUAL_CONDITION,), chip, reference_chip(chip), ())
        return float(kernels.work.unit_flop[0] / np.asarray(kernels.pipe_per_cycle).ravel()[0])

    assert [cycles("b200", op) for op in (few, many)] == pytest.approx(
        [cycles("h200", op) for op in (few, many)]
    )
    assert cycles("h200", few) == pytest.approx(few.expert_byte / 56 / 14.0), (
        "56 tiles share an expert"
    )
    assert cycles("l40s", many) / cycles("h200", many) == pytest.approx(1300.0 / 1024.0), (
        "slower tensor cores"
    )


def test_experts_run_on_the_library_that_vllm_takes_on_the_chip() -> None:
    def library(gpu: str, weights: str) -> set[str]:
        chip, op = load_gpu(gpu), FusedExperts(64, 8, 2, 2048, 1408, weights=weights, kernel="")
        found = build_kernels(
            (op,), (USUAL_CONDITION,), chip, bundle_for(chip).reference, ()
        ).work.features
        return {name for name in EXPERT_LIBRARIES if found[name][0]}

    chips = (("h200", "bf16"), ("h200", "fp4"), ("l40s", "fp4"), ("b200", "int4"), ("b200", "bf16"))
    assert [library(*of) for of in chips] == [set(), {"oai"}, {"marlin"}, {"marlin"}, {"trtllm"}]


@pytest.mark.parametrize(
    ("tokens", "measured_s"),
    [(1, 54e-6), (16, 172e-6), (64, 183e-6), (256, 328e-6), (2048, 937e-6)],
)
def test_experts_of_gpt_oss_take_as_long_as_in_an_engine(tokens: int, measured_s: float) -> None:
    """Kernels of a layer of gpt-oss-20b in vLLM 0.25.1 on an H200, summed up; nothing was fitted to
    them.

    As tensor work over bytes alone, a token would take 30 us and 64 tokens 130.
    """
    layer = {"tokens": tokens, "experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880}
    op = {"op": "engine_experts", "weights": "fp4", "scales": "mx", "kernel": "", **layer}
    found = wattcast.predict(
        {"name": "layer", "ops": [op]}, "h200", host_launch=0.0, clock="1.98GHz"
    )
    assert found.latency_s == pytest.approx(measured_s, rel=0.22)


def test_tiles_of_packed_experts_follow_the_mean_tokens_of_an_expert() -> None:
    experts = FusedExperts(64, 32, 4, 2880, 2880, weights="fp4", scales="mx")
    more = [replace(experts, tokens=tokens) for tokens in (1, 64, 256, 320, 4096)]
    assert [choose_expert_tile(op, "oai") for op in more] == [
        (16, 256.0),
        (16, 256.0),
        (32, 256.0),
        (64, 256.0),
        (128, 256.0),
    ]
    shared = replace(experts, tokens=12, experts=1, top_k=1, elsewhere=1524, gpus=128)
    assert choose_expert_tile(shared, "oai") == (128, 256.0), "tokens of other GPUs count"


def test_experts_know_for_which_shapes_vllm_has_tuned_tiles() -> None:
    """Mixtral's have tables in bf16 and fp8, its halves none for blocks of scales;
    DeepSeek-V2-Lite's have none.
    """
    mixtral, half, lite = (FusedExperts(64, 8, 2, 4096, inner) for inner in (14336, 7168, 1408))
    ops = (mixtral, replace(mixtral, dtype=Dtype.FP8, weights="fp8", scales="tensor"), half)
    ops += (
        replace(half, dtype=Dtype.FP8, weights="fp8", scales="block"),
        replace(lite, experts=64),
    )
    assert lower(*ops).features["tuned"].tolist() == [1, 1, 1, 0, 0]


def test_narrow_weights_count_their_scales() -> None:
    product = WeightOnlyProduct(1, 4096, 4096, "int4", 128, True)
    assert product.weight_byte == 4096 * 4096 * RECIPES["awq"].bit / 8
    assert (
        WeightOnlyProduct(1, 256, 256, "fp4", 32).weight_byte
        == 256 * 256 * RECIPES["mxfp4"].bit / 8
    )


def test_a_block_of_machete_takes_eight_steps_and_marlin_several_kernels() -> None:
    """Grids and names on an H200: 512 x 512 ran without the memset of a split; 1097 rows as 1024,
    64 and 9.
    """
    short, split = (lower(WeightOnlyProduct(9, 512, k)) for k in (512, 4096))
    assert [float(work.launches[0]) for work in (short, split)] == [1, 2]
    assert [float(work.units[0]) for work in (short, split)] == [4, 32]
    sizes = ((256, 4096), (267, 6912), (1097, 5376), (2701, 1024), (2462, 20992))
    work = lower(*(WeightOnlyProduct(m, n, 1024, kernel="marlin") for m, n in sizes))
    assert work.launches.tolist() == [1, 2, 3, 2, 4]


def test_small_kernels_take_the_blocks_that_an_h200_ran() -> None:
    few, many, token = (
        lower(EngineRmsNorm(rows, 7168, quant=quant))
        for rows, quant in ((64, ""), (1024, ""), (64, "token"))
    )
    blocks_of_an_sm = [float(work.slots[0]) for work in (few, many, token)]
    assert blocks_of_an_sm == [2, 8, 2], "blocks of 896, 256 and 1024 threads"
    by_rows = [
        float(lower(EngineRmsNorm(64, dim, quant="token")).unit_flop[0])
        for dim in (2048, 4096, 8192)
    ]
    assert by_rows[0] == by_rows[1] == by_rows[2] / 2, (
        "1024 threads take four values each, whether they have them or not"
    )
    norms = lower(
        *(CompiledRows(16, 4096, function=name) for name in ("rms_norm", "add_rms_norm_quant"))
    )
    assert [name.split(".")[-1] for name in norms.kernel_family] == ["norm", "norm_quant"]
    groups = lower(*(Quantize(rows, 2304, mode="block") for rows in (112, 113)))
    assert groups.unit_flop[1] > 3.9 * groups.unit_flop[0], (
        "2034 groups of 128 values fill blocks of two"
    )
    sorts = lower(*(AlignTokens(rows, 16, experts=16, top_k=2) for rows in (256, 1024)))
    assert sorts.launches.tolist() == [1, 2]
    assert sorts.steps[0] > sorts.steps[1], "a warp sorts 512 choices, 1024 threads 2048"
    longest = lower(*(Sampling(1, logits, mode="greedy") for logits in (128256, 262144)))
    assert longest.steps[0] > longest.steps[1], "one block of 512 threads, then 32 blocks"


def test_engine_operators_survive_json() -> None:
    ops = [
        PagedAttention(8, 2, 128, ((3, 100, 300), (2, 1, 50)), Dtype.FP8, 64),
        FusedExperts(5, 8, 2, 64, 128, skew=0.5),
        ScaledProduct(3, 64, 128, dtype=Dtype.FP8),
    ]
    data = from_json.graph_to_plain(wattcast.workload.Graph.from_operators("some", ops))
    import msgspec

    again = from_json.parse_workload(msgspec.json.encode(data), "some")
    assert [op for op, _ in again.calls()] == ops


MEASURED_IN_STEPS_ALONE = {"engine_lora"}  # by tests/kernels/test_served_adapters.py


def test_every_kind_was_fitted_on_the_h200() -> None:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    kinds = {kind for kind in registered_operators() if kind.startswith("engine_")}
    forms = {form.split()[0] for seen in bundle.seen.values() for form in seen.every_form}
    assert kinds - MEASURED_IN_STEPS_ALONE <= forms


@pytest.mark.parametrize("name", [*RECIPES, None])
def test_a_recipe_keeps_as_many_bytes_as_its_bits_say(name: str | None) -> None:
    wide = compute_footprint("llama3-8b", ModelOptions(stack="engine", phase="decode"))
    found = compute_footprint(
        "llama3-8b", ModelOptions(stack="engine", phase="decode", quantization=name)
    )
    linear = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    bit = 16.0 if name is None else RECIPES[name].bit
    assert wide.weight_byte - found.weight_byte == pytest.approx(linear * (16 - bit) / 8, rel=1e-6)
    assert found.cache_byte == wide.cache_byte


def test_an_fp8_cache_takes_half_the_memory_and_is_quantized_into() -> None:
    options = ModelOptions(stack="engine", phase="decode", batch=8, seq=1000)
    narrow = ModelOptions(stack="engine", phase="decode", batch=8, seq=1000, kv_dtype="fp8")
    wide, half = (compute_footprint("llama3-8b", o).cache_byte for o in (options, narrow))
    assert wide == 2 * half
    kinds = {str(op.kind) for op, _ in build_graph("llama3-8b", narrow).calls()}
    assert "engine_quantize" in kinds


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stack": "eager", "quantization": "fp8"}, "stack engine"),
        ({"stack": "engine", "quantization": "gguf"}, "fp8-block"),
        ({"stack": "engine", "quantization": "awq", "weights": "int4"}, "no recipe beside it"),
        ({"stack": "engine", "kv_dtype": "int8"}, "kv_dtype"),
        ({"stack": "engine", "weights": "int3"}, "int4"),
    ],
)
def test_wrong_formats_are_refused_with_what_to_do(options: dict[str, str], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        ModelOptions.from_names(**options)


def test_a_narrow_format_asks_for_an_engine() -> None:
    graph = build_graph("llama3-8b", ModelOptions(phase="decode", quantization="awq"))
    assert graph.stack == "engine"
    assert any("widened on chip" in line for line in graph.assumptions)
    with pytest.raises(BadInput, match="engine serves"):
        build_graph("resnet50", ModelOptions(quantization="fp8"))


def test_fp4_arithmetic_needs_a_gpu_that_has_it() -> None:
    options = {"stack": "engine", "phase": "decode", "batch": 8}
    with pytest.raises(BadInput, match="fp4"):
        wattcast.predict("llama3-8b", "h200", quantization="nvfp4", **options)
    narrow = wattcast.predict("llama3-8b", "b200", quantization="nvfp4", **options)
    wide = wattcast.predict("llama3-8b", "b200", **options)
    assert narrow.latency_s < wide.latency_s
    assert wattcast.predict("llama3-8b", "h200", weights="fp4", **options).latency_s > 0


def test_machete_widens_small_weights_again_for_every_sixteen_tokens() -> None:
    """vLLM gives 33 to 64 tokens tiles of 16 where the weight is small, of 64 where it is not."""
    small = lower(*(WeightOnlyProduct(m, 4096, 4096) for m in (16, 64)))
    large = lower(*(WeightOnlyProduct(m, 8192, 8192) for m in (16, 64)))
    assert small.features["tile_m"].tolist() == [16.0, 16.0]
    assert large.features["tile_m"].tolist() == [16.0, 64.0]
    cycles = [work.units * work.unit_flop for work in (small, large)]
    assert cycles[0][1] / cycles[0][0] == pytest.approx(4.0)
    assert cycles[1][1] / cycles[1][0] < 2.0


def test_int4_runs_in_machete_on_hopper_and_in_marlin_elsewhere() -> None:
    """AWQ was once predicted in Marlin on Hopper too, and GPTQ in Machete on an A100."""
    assert {RECIPES[name].kernel for name in ("awq", "gptq")} == {"machete"}
    product = WeightOnlyProduct(16, 4096, 4096)
    families = {
        gpu: lower_forecast(gpu, product).kernel_family[0]
        for gpu in ("h100-sxm", "a100-sxm-80gb", "b200")
    }
    assert families["h100-sxm"].endswith("machete")
    assert families["a100-sxm-80gb"].endswith("marlin.int4")
    assert families["b200"].endswith("marlin.int4")


def test_arithmetic_on_widened_weights_draws_less_the_more_tokens_share_them() -> None:
    work = lower(
        WeightOnlyProduct(1, 4096, 4096),
        WeightOnlyProduct(4096, 4096, 4096),
        WeightOnlyProduct(4096, 4096, 4096, kernel="marlin"),
    )
    single, many, other = machete_energy(work).tolist()
    assert 0.98 < single < 1.0
    assert many == pytest.approx(MACHETE.toggling, rel=0.01)
    assert other == 1.0


@pytest.mark.parametrize(("waves", "is_shared"), [(1.5, True), (3.5, True), (4.5, False)])
def test_machete_shares_out_steps_where_tiles_fill_up_to_four_waves(
    waves: float, is_shared: bool
) -> None:
    """Beyond, a short last wave is a small part of the time, and sharing would clear a workspace."""
    assert shares_steps(waves * 132.0, 132.0) is is_shared


def test_experts_of_2025_are_padded_to_tiles_on_blackwell() -> None:
    """vLLM of 2025 took 37 ms between tokens where today's kernels take half of it.

    Qwen3-235B-A22B in fp8 on two B200s, 8 sequences (ML.ENERGY, a row that the law was fitted to).
    DeepGEMM multiplied 127 rows more for each expert, whether tokens visited it or not.
    """
    run = {"phase": "decode", "batch": 8, "seq": 1169, "tp": 2, "ep": 2, "scheduling": "sync"}
    run |= {"quantization": "fp8-block", "force": True}
    today = wattcast.predict("qwen3-235b-a22b", "b200", **run)
    before = wattcast.predict("qwen3-235b-a22b", "b200", engine="vllm-2025", **run)
    assert before.latency_s == pytest.approx(36.7e-3, rel=0.1)
    assert today.latency_s < 0.6 * before.latency_s
    assert before.power_w == pytest.approx(903.0, rel=0.1)
    assert any("DeepGEMM" in note for note in before.assumptions)


def test_experts_of_2025_are_not_padded_where_eight_gpus_share_a_layer() -> None:
    """vLLM left DeepGEMM there for Triton (pull request 29346), which is slower than today's."""
    run = {"phase": "decode", "batch": 64, "seq": 700, "tp": 8, "ep": 8, "force": True}
    run |= {"quantization": "fp8-block", "engine": "vllm-2025"}
    whole = wattcast.predict("deepseek-v3", "b200", **run)
    today = wattcast.predict("deepseek-v3", "b200", **run | {"engine": "vllm"})
    (experts,) = (share for share in whole.ops if isinstance(share.op, FusedExperts))
    assert experts.op.all_picks == 0
    assert 1.1 * today.latency_s < whole.latency_s < 1.6 * today.latency_s


def test_a_card_before_blackwell_runs_in_2025_as_it_does_today() -> None:
    run = {"phase": "decode", "batch": 8, "seq": 500, "tp": 2, "ep": 2, "force": True}
    run |= {"quantization": "fp8-block"}
    today = wattcast.predict("qwen3-30b-a3b", "h200", **run)
    before = wattcast.predict("qwen3-30b-a3b", "h200", engine="vllm-2025", **run)
    assert before.latency_s == today.latency_s
    assert before.power_w == today.power_w


def lower_for_trtllm(*ops: Operator) -> KernelWork:
    gpu = load_gpu("h200")
    chip = replace(reference_chip(gpu), engine="trtllm")
    return build_kernels(ops, (USUAL_CONDITION,) * len(ops), gpu, chip, ()).work


def test_tensorrt_cuts_a_sequence_into_fewer_parts_than_blocks() -> None:
    """It cuts n blocks of 128 keys into √(8n) parts at most (``computeMultiBlockCount``)."""
    lengths = (128, 1024, 8192, 131072)
    ops = [PagedAttention(8, 1, 128, ((1, 1, length),), splits=32) for length in lengths]
    work = lower_for_trtllm(*ops)
    assert work.units.tolist() == [1.0, 8.0, 23.0, 91.0]


def test_tensorrt_reads_keys_for_every_head_without_a_kernel_for_groups() -> None:
    """There is none for more than 32 query heads a key head: measured 0.4 of what was predicted."""
    grouped = PagedAttention(32, 1, 128, ((64, 1, 4096),))
    single = PagedAttention(64, 1, 128, ((64, 1, 4096),))
    work = lower_for_trtllm(grouped, single)
    assert work.l2_byte[1] > 50.0 * work.l2_byte[0]
    assert work.kernel_family.values[work.kernel_family.place[1]].endswith("ungrouped")


def test_a_prompt_of_one_token_is_a_prompt_to_tensorrt() -> None:
    decode = PagedAttention(8, 1, 128, ((64, 1, 512),))
    prompt = PagedAttention(8, 1, 128, ((64, 1, 512),), phase="prefill")
    work = lower_for_trtllm(decode, prompt)
    families = [work.kernel_family.values[place] for place in work.kernel_family.place]
    assert [family.rpartition(".")[2] for family in families] == ["decode", "prefill"]


def test_few_tokens_split_k_before_hopper_where_weights_are_widened() -> None:
    """TensorRT-LLM times its tiles, so that few tokens fill an A100 by parts of k."""
    gpu = load_gpu("a100-sxm-80gb")
    run = {"kernel": "cutlass", "dtype": Dtype.BF16}
    few = WeightOnlyProduct(16, 2048, 16384, "int8", -1, **run)
    many = WeightOnlyProduct(8192, 8192, 4096, "int8", -1, **run)
    chip = forecast_bundle(gpu).reference
    work = build_kernels((few, many), (USUAL_CONDITION,) * 2, gpu, chip, ()).work
    assert work.units[0] == 16.0 * 7.0
    assert work.units[1] == 64.0 * 64.0
    assert work.features["tile_m"].tolist() == [16.0, 128.0]
