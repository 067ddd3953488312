"""Steps of an engine that serves LoRA adapters, beside those that an H200 took."""

from __future__ import annotations

from typing import Any

import pytest

from wattcast import predict
from wattcast.core.errors import BadInput
from wattcast.core.row_tables import database_folder
from wattcast.hardware import load_gpu
from wattcast.kernels import build_kernels, reference_chip
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.kernels.lowering import TENSOR_EVENT
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.workload.adapter_operators import AdapterProduct

STEPS = {
    "decode-b1-c1024": 2.0,
    "decode-b8-c4096": 2.5,
    "decode-b16-c512": 2.5,
    "decode-b64-c1024": 2.5,
    "decode-b8-c16384": 2.5,
    "prefill-p1x2048": 2.5,
    "prefill-p8x512": 3.0,
}


@pytest.fixture(scope="module")
def measured_steps() -> dict[str, dict[str, Any]]:
    records = load_engine_records(database_folder("h200") / "adapters")
    of_model = [row for row in records.rows if row["model"] == "llama-3.1-8b-lora"]
    return {row["id"].partition("/")[2]: row for row in of_model}


@pytest.mark.parametrize(("step", "most_percent"), STEPS.items())
def test_steps_with_adapters_take_what_an_engine_took(
    measured_steps: dict[str, dict[str, Any]], step: str, most_percent: float
) -> None:
    """Without adapters these steps were predicted 13 to 31 % too fast and up to 20 % too high in
    watts. The law was fitted to them: they show that it means what it says."""
    row = measured_steps[step]
    is_prompt = row["kind"] == "prefill"
    prediction = predict(
        "llama3-8b",
        "h200-000",
        phase=row["kind"],
        batch=int(row["prompts"] if is_prompt else row["batch"]),
        seq=int(row["prompt_tokens"]) if is_prompt else round(row["context_mean"]),
        lora=16,
        adapters=4,
        force=True,
    )
    assert prediction.latency_s == pytest.approx(row["latency_s"], rel=0.01 * most_percent)
    assert prediction.power_w == pytest.approx(row["power_w"], rel=0.03)


def test_eight_adapters_of_a_higher_rank_take_longer(
    measured_steps: dict[str, dict[str, Any]],
) -> None:
    """A law without the rank was 12.9 % off on Qwen2.5-7B with eight adapters of rank 32, which a
    linear layer takes 42 us longer with."""
    options: dict[str, Any] = {"phase": "decode", "batch": 8, "seq": 4096, "force": True}
    plain = predict("llama3-8b", "h200-000", **options)
    few = predict("llama3-8b", "h200-000", **options, lora=16, adapters=4)
    many = predict("llama3-8b", "h200-000", **options, lora=32, adapters=8)
    few_s = few.latency_s - plain.latency_s
    many_s = many.latency_s - plain.latency_s
    assert few_s / (4 * 32) == pytest.approx(18e-6, rel=0.1)  # of a linear layer
    assert 1.9 < many_s / few_s < 2.5


def test_adapters_take_memory() -> None:
    """An adapter of rank 64 on all linear layers of an 8B model takes 336 MB."""
    options: dict[str, Any] = {"phase": "decode", "batch": 16, "seq": 512}
    plain = predict("llama3-8b", "h200", **options)
    served = predict("llama3-8b", "h200", **options, lora=64, adapters=16)
    values = 32 * 64 * (3 * 4096 + 6144 + 4096 + 4096 + 2 * 4096 + 28672 + 14336 + 4096)
    extra_byte = served.memory_byte - plain.memory_byte
    assert extra_byte == pytest.approx(16 * 2 * values, rel=0.01)


def test_more_adapters_than_sequences_cost_no_more_time() -> None:
    options: dict[str, Any] = {"phase": "decode", "batch": 4, "seq": 512, "lora": 16}
    four = predict("llama3-8b", "h200", **options, adapters=4)
    many = predict("llama3-8b", "h200", **options, adapters=64)
    assert many.latency_s == four.latency_s


@pytest.mark.parametrize("options", [{"lora": 16}, {"sampling": "greedy"}])
def test_a_model_without_an_engine_template_takes_neither(options: dict[str, Any]) -> None:
    """BERT took both once, and its prediction did not change."""
    with pytest.raises(BadInput, match="bert has no engine template"):
        predict("bert-base", "h200", stack="engine", **options)


def test_a_prediction_says_which_adapters_are_served() -> None:
    served = predict("llama3-8b", "h200", phase="decode", batch=4, seq=64, lora=16, adapters=2)
    assert any("2 LoRA adapters of rank 16" in sentence for sentence in served.assumptions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapters": 4}, "a rank beside it"),
        ({"lora": 16, "stack": "eager"}, "wattcast train --lora"),
        ({"lora": 0}, "from 1 to"),
    ],
)
def test_wrong_adapters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        predict("llama3-8b", "h200", phase="decode", **options)


def test_one_adapter_of_rank_16_takes_12_us_of_a_linear_layer() -> None:
    """So vLLM's decode steps of Llama-3.1-8B say; four took 18 us."""
    options: dict[str, Any] = {"phase": "decode", "batch": 8, "seq": 4096, "force": True}
    plain = predict("llama3-8b", "h200-000", **options)
    one = predict("llama3-8b", "h200-000", **options, lora=16, adapters=1)
    assert (one.latency_s - plain.latency_s) / (4 * 32) == pytest.approx(12e-6, abs=0.4e-6)


def test_2048_tokens_shrink_to_a_rank_in_20_us_more_than_16() -> None:
    """The kernel for queries, keys and values took 25.7 and 6.2 us on an H200 at 1.84 to 1.98
    GHz."""
    gpu = load_gpu("h200")
    few, many = (AdapterProduct(m=m, n=1, k=4096, rank=16, slices=3) for m in (16, 2048))
    chip = reference_chip(gpu)
    work = build_kernels((few, many), (USUAL_CONDITION,) * 2, gpu, chip, ()).work
    flop_per_s = chip.per_cycle[TENSOR_EVENT[few.dtype]] * chip.top_hz
    more_s = (work.unit_flop[1] - work.unit_flop[0]) / flop_per_s
    assert float(more_s) == pytest.approx(25.7e-6 - 6.2e-6, rel=0.1)
