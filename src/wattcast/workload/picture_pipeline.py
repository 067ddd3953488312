"""How a pipeline makes a whole picture or clip around a denoiser, and the runs that it is made of.

A picture takes the text encoders once, the denoiser step by step, and the decoder once
(docs/method/workloads.md). Each part is a model of the catalogue, which may be predicted alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from wattcast.core import Dtype, bad_value
from wattcast.options.run_options import SIZE_LIMIT, ModelOptions, OutputHead, WorkloadPhase

DENOISER = "denoiser"  # the part of a picture that runs step by step
_SEPARATOR = ": "  # between a part and the label that a block has in its model


class Guidance(StrEnum):
    """How a denoiser is run on a prompt and on an empty or negative prompt, which guides it."""

    NONE = "none"  # one pass: the network was trained to take the strength as an input, or to none
    BATCH = "batch"  # both in one pass of twice the batch
    PASSES = "passes"  # one pass after the other


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of a pipeline, and how it is run."""

    model: str  # of the catalogue
    tokens: int  # that a prompt is padded to
    prompts: int = 1  # passes: 2 where the negative prompt is encoded as well

    def __post_init__(self) -> None:
        _check_count(f"{self.model}: tokens", self.tokens)
        _check_count(f"{self.model}: prompts", self.prompts)


@dataclass(frozen=True)
class PicturePipeline:
    """What a published pipeline runs for a picture or a clip, by default."""

    item: str  # picture or clip
    steps: int  # denoising steps by default
    source: str  # where steps, guidance and lengths are from
    guidance: Guidance = Guidance.NONE
    encoders: tuple[TextEncoder, ...] = ()
    decoder: str | None = None  # model of the catalogue; None: it is not included
    # the decoder runs in fp32 where the rest is in fp16, which its activations exceed
    widened_decoder: bool = False
    left_out: tuple[str, ...] = ()  # networks of the pipeline that are not included

    def __post_init__(self) -> None:
        _check_count("pipeline.steps", self.steps)

    @property
    def passes_of_step(self) -> int:
        """Passes of the denoiser in a step."""
        return 2 if self.guidance is Guidance.PASSES else 1

    @property
    def batch_factor(self) -> int:
        """Latents that the denoiser sees for each picture."""
        return 2 if self.guidance is Guidance.BATCH else 1


def _check_count(where: str, count: int) -> None:
    if not 1 <= count < SIZE_LIMIT:
        raise bad_value(where, f"a whole number from 1 to {SIZE_LIMIT - 1}", count)


@dataclass(frozen=True)
class PartRun:
    """A part of a picture: a model of the catalogue, its options, and how often it runs."""

    name: str  # as parts are listed
    model: str | None  # None: the denoiser itself
    options: ModelOptions
    repeat: int = 1


def list_part_runs(pipeline: PicturePipeline, options: ModelOptions) -> list[PartRun]:
    """Return the runs of all parts for ``options.batch`` pictures, in their order.

    ``options`` have their defaults filled in: phase generate, steps and size of the picture.
    """
    part = replace(options, phase=WorkloadPhase.FORWARD, steps=None)
    runs = []
    for encoder in pipeline.encoders:
        text = replace(
            part,
            image=None,
            seq=encoder.tokens,
            head=OutputHead.NONE,
            channels_last=False,
        )
        runs.append(PartRun(encoder.model, encoder.model, text, encoder.prompts))

    assert options.steps is not None, "the steps are chosen before the parts"
    denoiser = replace(part, batch=options.batch * pipeline.batch_factor)
    runs.append(PartRun(DENOISER, None, denoiser, options.steps * pipeline.passes_of_step))

    if pipeline.decoder is not None:
        is_widened = pipeline.widened_decoder and options.dtype is Dtype.FP16
        decoder = replace(part, dtype=Dtype.FP32) if is_widened else part
        runs.append(PartRun(pipeline.decoder, pipeline.decoder, decoder))
    return runs


@dataclass(frozen=True)
class PicturePart:
    """A part of a picture as its graph lists it."""

    name: str  # which begins the labels of its blocks
    runs: int


def name_part_block(part: str, label: str) -> str:
    """Return the label of a block of a picture, which begins with its part."""
    return f"{part}{_SEPARATOR}{label}"


def part_of_label(label: str) -> str:
    """Return the part of a picture that a block belongs to; empty for a block of anything else.

    >>> part_of_label("denoiser: layers"), part_of_label("layers")
    ('denoiser', '')
    """
    part, separator, _ = label.partition(_SEPARATOR)
    return part if separator else ""


def describe_pipeline(pipeline: PicturePipeline, options: ModelOptions) -> list[str]:
    """Return sentences that say what a picture is made of and what is not included."""
    item = pipeline.item
    guided = {
        Guidance.NONE: "one pass a step",
        Guidance.BATCH: "one pass a step of twice the batch: the prompt and the negative prompt",
        Guidance.PASSES: "two passes a step: the prompt and the negative prompt",
    }
    words = [f"guidance: {guided[pipeline.guidance]}"]
    for encoder in pipeline.encoders:
        twice = ", for the prompt and the negative prompt" if encoder.prompts > 1 else ""
        words.append(f"{encoder.model}: once on {encoder.tokens} tokens, padded{twice}")
    if pipeline.widened_decoder and options.dtype is Dtype.FP16:
        words.append(f"{pipeline.decoder}: in fp32, whose range it needs")
    if pipeline.decoder is None:
        words.append(f"careful: the decoder is not included, so that a {item} takes more than this")
    left_out = ["tokenizer", "sampler", *pipeline.left_out]
    words.append(f"not included in a {item}: {', '.join(left_out)}, loading and saving")
    words.append(f"a whole {item} was never measured: the sum of its parts")
    return words
