"""Whole pictures: text encoders, denoising steps and decoder, each a model of the catalogue."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import yaml

from wattcast.core import Dtype
from wattcast.core.errors import BadInput
from wattcast.options.run_options import ModelOptions, OutputHead, WorkloadPhase
from wattcast.workload import build_graph
from wattcast.workload.build_model import compute_footprint
from wattcast.workload.graph import Graph, compute_totals, count_operators
from wattcast.workload.model_catalogue import list_models, load_model
from wattcast.workload.model_options import resolve_options
from wattcast.workload.picture_pipeline import (
    DENOISER,
    Guidance,
    PicturePipeline,
    list_part_runs,
    part_of_label,
)

PIPELINES = [name for name in list_models() if load_model(name).pipeline is not None]
STEP = ModelOptions(phase=WorkloadPhase.FORWARD)


def count_part(graph: Graph, part: str) -> Counter:
    """How often each operator of a part is called."""
    count: Counter = Counter()
    for block in graph.blocks:
        if part_of_label(block.label) == part:
            for op in block.ops:
                count[op] += op.count * block.repeat
    return count


def test_models_that_make_pictures_are_those_that_denoise() -> None:
    architectures = {load_model(name).architecture for name in PIPELINES}
    others = {load_model(name).architecture for name in set(list_models()) - set(PIPELINES)}
    assert {"unet", "dit", "joint", "video"} <= architectures
    assert not architectures & others


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_has_no_key_that_nobody_reads(name: str) -> None:
    from wattcast.core import files

    path = files("wattcast.workload").joinpath("catalogue", f"{name}.yaml")
    keys = set(yaml.safe_load(path.read_bytes())["pipeline"])
    assert keys <= set(PicturePipeline.__dataclass_fields__)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_picture_is_the_sum_of_its_parts(name: str) -> None:
    """Encoders + steps x passes of the denoiser + decoder, operator by operator."""
    model = load_model(name)
    pipeline = model.pipeline
    picture = build_graph(name, ModelOptions(steps=3))
    whole = Counter(count_operators(picture))

    batch = 2 if pipeline.guidance is Guidance.BATCH else 1
    passes = 6 if pipeline.guidance is Guidance.PASSES else 3
    expected = [(DENOISER, build_graph(name, replace(STEP, batch=batch)), passes)]
    for encoder in pipeline.encoders:
        alone = build_graph(encoder.model, replace(STEP, seq=encoder.tokens, head=OutputHead.NONE))
        expected.append((encoder.model, alone, encoder.prompts))
    if pipeline.decoder is not None:
        image = resolve_options(model, ModelOptions())[0].image
        alone = build_graph(pipeline.decoder, replace(STEP, image=image))
        expected.append((pipeline.decoder, alone, 1))

    assert {part.name: part.runs for part in picture.parts} == {
        part: runs for part, _, runs in expected
    }
    total: Counter = Counter()
    for part, alone, runs in expected:
        count = Counter({op: calls * runs for op, calls in count_operators(alone).items()})
        assert count_part(picture, part) == count
        total += count
    assert whole == total
    assert picture.item == pipeline.item
    assert picture.items == 1
    assert any("never measured" in sentence for sentence in picture.assumptions)
    lacks_decoder = [line for line in picture.assumptions if "decoder is not included" in line]
    assert bool(lacks_decoder) == (pipeline.decoder is None)


@pytest.mark.parametrize("name", PIPELINES)
def test_twice_the_steps_add_exactly_that_many(name: str) -> None:
    few = build_graph(name, ModelOptions(steps=4))
    many = build_graph(name, ModelOptions(steps=8))
    denoiser = count_part(few, DENOISER)
    assert Counter(count_operators(many)) == Counter(count_operators(few)) + denoiser
    assert few.memory_byte == many.memory_byte


def test_steps_are_the_pipelines_without_a_number() -> None:
    """FluxPipeline and StableDiffusion3Pipeline take 28, StableDiffusionXLPipeline 50 (diffusers);
    FLUX.1 schnell was distilled to 4.
    """
    steps = {"flux.1-dev": 28, "flux.1-schnell": 4, "sd3-medium": 28, "sdxl": 50}
    for name, expected in steps.items():
        picture = build_graph(name, ModelOptions())
        assert picture.phase == "generate"
        runs = {part.name: part.runs for part in picture.parts}
        assert runs[DENOISER] == expected


def test_a_batch_of_pictures_scales() -> None:
    """Products grow with the pictures, and so does what comes out; weights do not."""
    one = build_graph("sd3-medium", ModelOptions(steps=2))
    four = build_graph("sd3-medium", ModelOptions(steps=2, batch=4))
    flop = compute_totals(one).product_flop_dense
    assert compute_totals(four).product_flop_dense == pytest.approx(4 * flop, rel=1e-12)
    assert four.items == 4
    weight_byte = compute_footprint("sd3-medium", ModelOptions(steps=2)).weight_byte
    assert compute_footprint("sd3-medium", ModelOptions(steps=2, batch=4)).weight_byte == (
        weight_byte
    )
    # 2.03, 0.12, 0.69, 4.76 and 0.05 billion weights, of two bytes each
    assert weight_byte == pytest.approx(2 * 7.66e9, rel=0.005)


def test_only_what_a_pipeline_widens_is_widened() -> None:
    """SDXL's decoder runs in fp32 beside fp16 (``force_upcast``), and in bf16 beside bf16."""
    model = load_model("sdxl-unet")
    formats = {}
    for dtype in (Dtype.FP16, Dtype.BF16):
        options, _ = resolve_options(model, ModelOptions(dtype=dtype))
        runs = list_part_runs(model.pipeline, options)
        formats[dtype] = [str(run.options.dtype) for run in runs]
    assert formats == {Dtype.FP16: ["fp16"] * 3 + ["fp32"], Dtype.BF16: ["bf16"] * 4}


def test_a_model_shows_its_pipeline(call) -> None:
    said = call("models", "show", "wan2.1-1.3b").out
    assert "a clip: umt5-xxl-encoder on 512 tokens, 50 denoising steps, no decoder here" in said
    assert "WanPipeline" in said


def test_a_step_is_still_to_be_had() -> None:
    step = build_graph("flux.1-dev", STEP)
    assert (step.item, step.items, step.parts) == ("denoising step", 1, ())
    assert "one pass of the denoiser, not a whole picture" in step.assumptions


def test_dit_takes_its_published_arithmetic() -> None:
    """Peebles and Xie 2022 (arXiv:2212.09748), table 4: 118.64 Gflops for DiT-XL/2 at 256 by 256,
    where a multiply-add counts once. Theirs leave out the products of the modulation or not: 1 %.
    """
    flop = compute_totals(build_graph("dit-xl-2", STEP)).product_flop_dense
    assert flop / 2 == pytest.approx(118.64e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("llama3-8b", {"steps": 4}, "llama3-8b: steps: expected no denoising steps"),
        ("bert-base", {"steps": 4}, "bert-base: steps: expected no denoising steps"),
        ("flux.1-dev", {"phase": "train", "steps": 4}, "steps: expected phase generate"),
        ("flux.1-dev", {"steps": 0}, "steps: expected a whole number from 1"),
        ("flux.1-dev", {"phase": "generate", "tokens": 4}, "no tokens for a picture"),
        ("wan2.1-1.3b", {"phase": "decode"}, "phase: expected one of generate, forward, train"),
        ("vit-base", {"phase": "generate"}, "phase: expected one of forward, train"),
        ("sdxl", {"tp": 2}, "1 for a vision model"),
        ("sdxl", {"pp": 2}, "1 for a whole picture"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        build_graph(name, ModelOptions.from_names(**options))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
