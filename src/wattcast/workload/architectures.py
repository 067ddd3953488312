"""The table of architectures: which dimensions each has, and which template traces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wattcast.workload import decoder, encoder, gpt, vision
from wattcast.workload.program import Program


class Kind(StrEnum):
    """What a model eats, which decides its phases and defaults."""

    LANGUAGE = "language"  # generates token by token, with a cache
    ENCODER = "encoder"  # reads a text once
    VISION = "vision"  # reads pictures


@dataclass(frozen=True)
class Architecture:
    """One template."""

    kind: Kind
    dims: type
    trace: Callable[..., Program]


TABLE: dict[str, Architecture] = {
    "decoder": Architecture(Kind.LANGUAGE, decoder.DecoderDims, decoder.trace),
    "gpt": Architecture(Kind.LANGUAGE, gpt.GptDims, gpt.trace),
    "bert": Architecture(Kind.ENCODER, encoder.BertDims, encoder.trace),
    "resnet": Architecture(Kind.VISION, vision.ResnetDims, vision.trace_resnet),
}


def default_size(kind: Kind, dims: Any) -> int:
    """Prompt length taken when none is given."""
    most = getattr(dims, "max_positions", 0)
    usual = 512 if kind is Kind.ENCODER else 1024
    return min(usual, most) if most else usual
