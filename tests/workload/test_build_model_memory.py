"""Bytes held: weights, cache, activations, optimiser; what fits and how much of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph, build_model, model_catalogue
from wattcast.workload.build_model import count_parameters
from wattcast.workload.engine_operators import FusedExperts, WeightOnlyProduct
from wattcast.workload.scan_operators import StateScan


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "bert-large", "resnet50", "deepseek-v3"])
def test_weights_are_counted_once_in_their_format(name: str) -> None:
    seq = None if model_catalogue.load_model(name).kind == "vision" else 64
    held = build_model.compute_footprint(name, ModelOptions(stack="eager", seq=seq))
    assert held.weight_byte == pytest.approx(
        2 * count_parameters(model_catalogue.load_model(name)), rel=1e-5
    )
    assert build_graph(name, ModelOptions(stack="eager", seq=seq)).memory_byte == held.total_byte


@pytest.mark.parametrize(
    "name",
    [n for n in model_catalogue.list_models() if model_catalogue.load_model(n).kind == "language"],
)
def test_all_stacks_hold_the_same_weights(name: str) -> None:
    held = {
        build_model.compute_footprint(
            name, ModelOptions(seq=16, stack=s, quantization=q)
        ).weight_byte
        for s, q in (("eager", None), ("compiled", None), ("engine", "none"))
    }
    assert len(held) == 1


@pytest.mark.parametrize(
    ("name", "checkpoint_gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)]
)
def test_of_gpt_oss_only_the_experts_are_narrow(name: str, checkpoint_gib: float) -> None:
    """Sizes of the checkpoints: OpenAI's model card, table 1. With narrow attention the smaller one
    was 12.0 GiB.
    """
    held = build_model.compute_footprint(name, ModelOptions(phase="decode", seq=64, stack="engine"))
    assert held.weight_byte / 2**30 == pytest.approx(checkpoint_gib, abs=0.06)
    calls = [
        op
        for op, _ in build_graph(name, ModelOptions(phase="decode", seq=64, stack="engine")).calls()
    ]
    assert {op.weights for op in calls if isinstance(op, FusedExperts)} == {"fp4"}
    assert not [op for op in calls if isinstance(op, WeightOnlyProduct)]
    everywhere = build_graph(
        name, ModelOptions(phase="decode", seq=64, stack="engine", weights="fp4")
    )
    assert [op for op, _ in everywhere.calls() if isinstance(op, WeightOnlyProduct)], (
        "--weights is of all layers"
    )


def test_the_state_of_nemotron_is_kept_in_fp32_by_engines() -> None:
    """vLLM 0.25.1 does so unless the configuration names another format
    (``NemotronHForCausalLMConfig``).
    """
    sizes = {"phase": "decode", "seq": 64}
    held, eager = (
        build_model.compute_footprint(
            "nemotron-h-8b", ModelOptions(stack=stack, **sizes)
        ).cache_byte
        for stack in ("engine", "eager")
    )
    assert held - eager == 24 * 128 * 64 * 128 * 2
    scans = [
        op for op, _ in build_graph("nemotron-h-8b", ModelOptions(stack="engine", **sizes)).calls()
    ]
    (scan,) = [op for op in scans if isinstance(op, StateScan)]
    assert scan.write_byte - replace(scan, wide_state=False).write_byte == 128 * 64 * 128 * 2


def test_the_cache_is_two_vectors_a_token_a_layer_a_head() -> None:
    held = build_model.compute_footprint(
        "llama3-8b", ModelOptions(stack="eager", phase="decode", batch=4, seq=1000)
    )
    assert held.cache_byte == 2 * 32 * 8 * 128 * 2 * 4 * 1001
    served = build_model.compute_footprint(
        "llama3-8b", ModelOptions(phase="decode", batch=4, seq=1000, stack="engine")
    )
    assert served.cache_byte == held.cache_byte
    latent = build_model.compute_footprint(
        "deepseek-v3", ModelOptions(stack="eager", phase="decode", seq=1000)
    )
    assert latent.cache_byte == 61 * (512 + 64) * 2 * 1001


def test_generation_holds_the_cache_of_its_last_step() -> None:
    held = build_model.compute_footprint(
        "gpt2", ModelOptions(stack="eager", phase="generate", seq=100, tokens=50)
    )
    assert (
        held.cache_byte
        == build_model.compute_footprint(
            "gpt2", ModelOptions(stack="eager", phase="decode", seq=148)
        ).cache_byte
    )


def test_a_window_bounds_the_cache() -> None:
    short, long = (
        build_model.compute_footprint(
            "mistral-7b", ModelOptions(stack="eager", phase="decode", seq=seq)
        )
        for seq in (6000, 12000)
    )
    assert short.cache_byte == long.cache_byte == 2 * 32 * 8 * 128 * 2 * 4096


def test_training_holds_gradients_moments_and_what_backward_waits_for() -> None:
    held = build_model.compute_footprint("gpt2", ModelOptions(phase="train", batch=8, seq=512))
    assert held.gradient_byte == held.weight_byte
    assert held.optimiser_byte == 2 * held.weight_byte
    assert held.cache_byte == 0
    lean = build_model.compute_footprint(
        "gpt2", ModelOptions(phase="train", batch=8, seq=512, recompute=True)
    )
    assert lean.activation_byte < 0.7 * held.activation_byte
    # one layer keeps at least its input, both norms' outputs, q, k, v and the attention's output:
    # 34·s·b·h bytes in 16 bits without attention scores (Korthikanti et al. 2022, Reducing
    # Activation Recomputation, eq. 1)
    layer = 8 * 512 * 768
    assert held.activation_byte > 12 * 34 * layer


@pytest.mark.parametrize("phase", ["decode", "prefill", "train"])
def test_the_largest_batch_fits_and_one_more_does_not(phase: str) -> None:
    capacity = 80e9
    options = ModelOptions(stack="eager", phase=phase, seq=512)
    batch = build_model.find_largest_batch("qwen2-1.5b", options, capacity)
    from dataclasses import replace

    assert batch > 1
    assert build_model.compute_footprint("qwen2-1.5b", replace(options, batch=batch)).fits(capacity)
    assert not build_model.compute_footprint("qwen2-1.5b", replace(options, batch=batch + 1)).fits(
        capacity
    )


def test_nothing_fits_into_too_little() -> None:
    assert (
        build_model.find_largest_batch(
            "llama3-70b", ModelOptions(stack="eager", phase="decode"), 80e9
        )
        == 0
    )
    with pytest.raises(BadInput, match="capacity"):
        build_model.find_largest_batch("gpt2", ModelOptions(), 0.0)


def test_tensor_parallel_shares_out_the_weights() -> None:
    one, eight = (
        build_model.compute_footprint("llama3-70b", ModelOptions(stack="eager", tp=tp))
        for tp in (1, 8)
    )
    assert eight.weight_byte == pytest.approx(one.weight_byte / 8, rel=1e-3)
    stages = build_model.compute_footprint("llama3-70b", ModelOptions(stack="eager", pp=4))
    assert stages.weight_byte < 0.3 * one.weight_byte
