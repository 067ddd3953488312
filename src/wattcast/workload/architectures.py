"""The table of architectures: which dimensions each has, and which template traces it.

A template is imported when it is first asked for, so that a cold prediction pays for one only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
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
    """One template: a module of this package, the names of its dimensions and of its trace function."""

    kind: Kind
    module: str
    dims_name: str
    trace_name: str = "trace"
    engine: bool = False  # whether the template itself knows how an inference engine runs it

    @property
    def dims(self) -> Any:
        """The frozen dataclass of its dimensions."""
        return getattr(self._template, self.dims_name)

    @property
    def trace(self) -> Callable[..., Program]:
        """``trace(dims, run, stages)`` -> the program of one pass."""
        found: Callable[..., Program] = getattr(self._template, self.trace_name)
        return found

    @cached_property
    def _template(self) -> Any:
        return import_module(f"wattcast.workload.{self.module}")


TABLE: dict[str, Architecture] = {
    "decoder": Architecture(Kind.LANGUAGE, "decoder", "DecoderDims", engine=True),
    "gpt": Architecture(Kind.LANGUAGE, "gpt", "GptDims", engine=True),
    "latent": Architecture(Kind.LANGUAGE, "latent", "LatentDims", engine=True),
    "whisper": Architecture(Kind.LANGUAGE, "speech", "WhisperDims"),
    "bert": Architecture(Kind.ENCODER, "encoder", "BertDims", "trace_bert"),
    "vit": Architecture(Kind.VISION, "encoder", "VitDims", "trace_vit"),
    "clip": Architecture(Kind.VISION, "clip", "ClipDims"),
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
