"""How a model is run: phase, sizes, number format, kernels' fusion, parallelism. Nothing about any GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

from wattcast.dtypes import Dtype
from wattcast.errors import UnknownName, bad_value, unknown_name


class Phase(StrEnum):
    """What is asked of the model."""

    PREFILL = "prefill"  # a whole prompt at once
    DECODE = "decode"  # one token a sequence, behind a cache of ``seq`` tokens
    GENERATE = "generate"  # a prefill and ``tokens - 1`` decode steps
    TRAIN = "train"  # forward, backward, optimiser
    FORWARD = "forward"  # one pass of a model that has no cache


class AttentionMode(StrEnum):
    """Scores written to memory operator by operator, or kept on the chip by one fused kernel."""

    EAGER = "eager"
    FLASH = "flash"


class Head(StrEnum):
    """For which tokens the language-model head runs."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class Stack(StrEnum):
    """Who issues the kernels: PyTorch eager, a compiler that fuses, or an inference engine."""

    EAGER = "eager"
    COMPILED = "compiled"
    ENGINE = "engine"


@dataclass(frozen=True)
class Options:
    """The choices of one run. None means the model's own default, which the graph then states."""

    batch: int = 1
    seq: int | None = None  # prompt length; in decode the tokens already in the cache
    tokens: int | None = None  # new tokens of ``generate``
    phase: Phase | None = None
    dtype: Dtype = Dtype.BF16
    attention: AttentionMode = AttentionMode.FLASH
    head: Head | None = None
    stack: Stack = Stack.EAGER
    tp: int = 1
    pp: int = 1
    dp: int = 1
    skew: float = 0.0  # 0: experts share tokens evenly; 1: all choices fall on the same experts
    recompute: bool = False  # training: run each layer's forward again in place of keeping activations
    image: int | None = None  # side of a square picture, in pixels (latent pixels for diffusion)

    @classmethod
    def of(cls, **given: object) -> Options:
        """Choices by name, as people and files give them: words stand for phases, formats and stacks."""
        for name in given:
            if name not in OPTION_NAMES:
                raise unknown_option(name)
        return cls(**given)  # type: ignore[arg-type]  # checked, and words looked up, when made

    def __post_init__(self) -> None:
        given = self.__dict__
        for name in _SIZES:
            value = given[name]
            if value is not None and not (value.__class__ is int and 0 < value < MOST):
                _check_size(name, value)
        for name, kind in _ENUMS.items():
            value = given[name]
            if value is not None and value.__class__ is not kind:
                object.__setattr__(self, name, _enum(kind, name, value))
        if not (isinstance(self.skew, (int, float)) and 0.0 <= self.skew <= 1.0):
            raise bad_value("skew", "a number from 0 (balanced) to 1 (the same experts always)", self.skew)
        if self.dtype not in RUNNABLE:
            raise bad_value("dtype", f"one of {', '.join(RUNNABLE)}", str(self.dtype))
        self._check_together()

    def _check_together(self) -> None:
        if self.tokens is not None and self.phase is not Phase.GENERATE:
            raise bad_value("tokens", "phase generate", str(self.phase), "Leave tokens out, or choose generate.")
        training = self.phase is Phase.TRAIN
        if self.recompute and not training:
            raise bad_value("recompute", "phase train", str(self.phase), "Only training keeps activations.")
        if training and self.dtype in (Dtype.FP8, Dtype.INT8):
            raise bad_value("dtype", "fp32, tf32, bf16 or fp16 in training", str(self.dtype))
        if training and self.stack is Stack.ENGINE:
            raise bad_value("stack", "eager or compiled in training", "engine", "An engine only serves.")


OPTION_NAMES = tuple(item.name for item in fields(Options))
RUNNABLE = (Dtype.FP32, Dtype.TF32, Dtype.BF16, Dtype.FP16, Dtype.FP8, Dtype.INT8)
_ENUMS: dict[str, type[StrEnum]] = {
    "phase": Phase,
    "dtype": Dtype,
    "attention": AttentionMode,
    "head": Head,
    "stack": Stack,
}
_SIZES = ("batch", "seq", "tokens", "tp", "pp", "dp", "image")
MOST = 1 << 31  # beyond this a size is a slip of the finger, and products would pass 64 bits


def unknown_option(name: str, beside: Iterable[str] = ()) -> UnknownName:
    """What to say of a name that is no option; ``beside`` are others that stand where it was given."""
    settings = tuple(beside)
    there = f"Options of a model: {', '.join(OPTION_NAMES)}."
    if settings:
        there += f" Settings beside them: {', '.join(settings)}."
    return unknown_name("option", name, OPTION_NAMES + settings, there)


def _enum(kind: type[StrEnum], name: str, value: object) -> StrEnum:
    if kind is Dtype and isinstance(value, str):
        return Dtype.of(value)
    try:
        return kind(str(value))
    except ValueError:
        raise bad_value(name, f"one of {', '.join(kind)}", value) from None


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MOST:
        raise bad_value(name, f"a whole number from 1 to {MOST - 1}", value)
