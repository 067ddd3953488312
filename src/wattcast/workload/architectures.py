"""The table of architectures: which dimensions each has, and which template traces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wattcast.workload import clip, decoder, diffusion, encoder, gpt, latent, speech, vision
from wattcast.workload.program import Program


class Kind(StrEnum):
    """What a model eats, which decides its phases and defaults."""

    LANGUAGE = "language"  # generates token by token, with a cache
    ENCODER = "encoder"  # reads a text once
    VISION = "vision"  # reads or denoises pictures


@dataclass(frozen=True)
class Architecture:
    """One template."""

    kind: Kind
    dims: type
    trace: Callable[..., Program]
    engine: bool = False  # whether the template itself knows how an inference engine runs it


TABLE: dict[str, Architecture] = {
    "decoder": Architecture(Kind.LANGUAGE, decoder.DecoderDims, decoder.trace, engine=True),
    "gpt": Architecture(Kind.LANGUAGE, gpt.GptDims, gpt.trace, engine=True),
    "latent": Architecture(Kind.LANGUAGE, latent.LatentDims, latent.trace, engine=True),
    "whisper": Architecture(Kind.LANGUAGE, speech.WhisperDims, speech.trace),
    "bert": Architecture(Kind.ENCODER, encoder.BertDims, encoder.trace_bert),
    "vit": Architecture(Kind.VISION, encoder.VitDims, encoder.trace_vit),
    "clip": Architecture(Kind.VISION, clip.ClipDims, clip.trace),
    "resnet": Architecture(Kind.VISION, vision.ResnetDims, vision.trace_resnet),
    "mobilevit": Architecture(Kind.VISION, vision.MobileVitDims, vision.trace_mobilevit),
    "unet": Architecture(Kind.VISION, diffusion.UnetDims, diffusion.trace_unet),
    "dit": Architecture(Kind.VISION, diffusion.DitDims, diffusion.trace_dit),
}


def default_seq(kind: Kind, dims: Any) -> int:
    """Prompt length taken when none is given."""
    most = getattr(dims, "max_positions", 0)
    usual = 512 if kind is Kind.ENCODER else 1024
    return min(usual, most) if most else usual
