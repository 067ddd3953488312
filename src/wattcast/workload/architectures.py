"""The table of architectures: which dimensions each has, and which template traces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wattcast.workload.program import Program


class Kind(StrEnum):
    """What a model eats, which decides its phases and defaults."""

    LANGUAGE = "language"  # generates token by token, with a cache
    ENCODER = "encoder"  # reads a text once
    VISION = "vision"  # reads or denoises pictures


@dataclass(frozen=True)
class Architecture:
    """One template; its module is imported when a model of the kind is first built."""

    kind: Kind
    module: str
    dims_name: str
    trace_name: str = "trace"
    engine: bool = False  # whether the template itself knows how an inference engine runs it

    @property
    def dims(self) -> type:
        """The dataclass of its dimensions."""
        found: type = getattr(import_module(f"wattcast.workload.{self.module}"), self.dims_name)
        return found

    @property
    def trace(self) -> Callable[..., Program]:
        """The template."""
        found: Callable[..., Program] = getattr(import_module(f"wattcast.workload.{self.module}"), self.trace_name)
        return found


TABLE: dict[str, Architecture] = {
    "decoder": Architecture(Kind.LANGUAGE, "decoder", "DecoderDims", engine=True),
    "gpt": Architecture(Kind.LANGUAGE, "gpt", "GptDims", engine=True),
    "latent": Architecture(Kind.LANGUAGE, "latent", "LatentDims", engine=True),
    "whisper": Architecture(Kind.LANGUAGE, "speech", "WhisperDims"),
    "bert": Architecture(Kind.ENCODER, "encoder", "BertDims", "trace_bert"),
    "vit": Architecture(Kind.VISION, "encoder", "VitDims", "trace_vit"),
    "clip": Architecture(Kind.VISION, "encoder", "ClipDims", "trace_clip"),
    "resnet": Architecture(Kind.VISION, "vision", "ResnetDims", "trace_resnet"),
    "mobilevit": Architecture(Kind.VISION, "vision", "MobileVitDims", "trace_mobilevit"),
    "unet": Architecture(Kind.VISION, "diffusion", "UnetDims", "trace_unet"),
    "dit": Architecture(Kind.VISION, "diffusion", "DitDims", "trace_dit"),
}


def default_seq(kind: Kind, dims: Any) -> int:
    """Prompt length taken when none is given."""
    most = getattr(dims, "max_positions", 0)
    usual = 512 if kind is Kind.ENCODER else 1024
    return min(usual, most) if most else usual
