"""Engines by name: the scheduler of each, its arguments, and what it takes where nothing is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, get_type_hints

import numpy as np

from wattcast.core import bad_value
from wattcast.core.errors import unknown_name
from wattcast.hardware import Gpu
from wattcast.options.serving_options import EngineOptions
from wattcast.serving.engines.scheduler_coefficients import SCHEDULERS
from wattcast.serving.engines.sglang_scheduler import SglangArguments
from wattcast.serving.engines.step_scheduler import StartScheduler
from wattcast.serving.engines.trtllm_scheduler import TrtllmArguments
from wattcast.serving.engines.vllm_scheduler import VllmScheduler
from wattcast.serving.step_coefficients import STEPS
from wattcast.workload.engine_schedule import STEP_TOKENS

_VLLM_SEQS = 256  # of a step, as plans have them too
_MIB = float(1 << 20)
_GIB = float(1 << 30)
# Memory of a card -> the most tokens of a step of prompts (SGLang's ``chunked_prefill_size``).
_SGLANG_CHUNKS = ((35 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, 8192))
_SGLANG_LARGEST_CHUNK = 16384
_SGLANG_TOKEN_BYTE = 1.5 * _MIB  # of a chunk, in the memory that it reserves
_SGLANG_SEQUENCE_BYTE = 2.0 * _MIB  # of its largest graph
_SGLANG_GPU_BYTE = 128.0 * _MIB  # of each GPU that shares the model
_SGLANG_GRAPHS = {False: 256, True: 512}  # sequences of its largest graph, by four GPUs or more


class MemoryShare(StrEnum):
    """What an engine's share of the memory holds."""

    ALL = "all"  # weights, activations and cache: vLLM's gpu_memory_utilization
    STATIC = "static"  # weights and cache: SGLang's mem_fraction_static
    FREE = "free"  # the cache alone, of what is free: TensorRT-LLM's free_gpu_memory_fraction


@dataclass(frozen=True)
class VllmArguments:
    """vLLM's scheduler takes no arguments besides the options that every engine has."""

    @property
    def start(self) -> StartScheduler:
        """Start a scheduler."""
        return VllmScheduler


EngineArguments = VllmArguments | SglangArguments | TrtllmArguments
_ARGUMENTS: dict[str, type[EngineArguments]] = {
    "sglang": SglangArguments,
    "trtllm": TrtllmArguments,
}
_TITLES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_MEMORY_SHARES = {"sglang": MemoryShare.STATIC, "trtllm": MemoryShare.FREE}


@dataclass(frozen=True)
class EngineLimits:
    """The limits of one engine, all of them set."""

    max_batched_tokens: int
    max_seqs: int
    block_tokens: int
    memory_utilisation: float
    memory_share: MemoryShare = MemoryShare.ALL


def fill_limits(options: EngineOptions, gpu: Gpu, gpus: int) -> EngineLimits:
    """Return the limits that were set, and the engine's own for those that were not.

    ``gpus`` share the model (tensor parallel).
    """
    limits = _default_limits(gpu, gpus, options.max_batched_tokens)
    names = ("max_batched_tokens", "max_seqs", "block_tokens", "memory_utilisation")
    chosen: dict[str, Any] = {}
    for name in names:
        value = getattr(options, name)
        if value is not None:
            chosen[name] = value
    limits = replace(limits, **chosen)
    if gpu.engine in _ARGUMENTS and options.max_seqs is None:
        most = limits.max_batched_tokens // (1 + options.speculative_tokens)
        limits = replace(limits, max_seqs=min(limits.max_seqs, most))
    return limits


def _default_limits(
    gpu: Gpu,
    gpus: int,
    chunk: int | None,
) -> EngineLimits:
    """Return what an engine takes on a card where nothing is set, but perhaps its ``chunk``."""
    share = _MEMORY_SHARES.get(gpu.engine, MemoryShare.ALL)
    if gpu.engine == "sglang":
        tokens = chunk or _choose_chunk(gpu)
        return EngineLimits(
            tokens, SCHEDULERS.sglang_seqs, 1, _static_share(gpu, gpus, tokens), share
        )
    if gpu.engine == "trtllm":
        return EngineLimits(
            SCHEDULERS.trtllm_tokens,
            SCHEDULERS.trtllm_seqs,
            SCHEDULERS.trtllm_block_tokens,
            SCHEDULERS.trtllm_free_share,
            share,
        )
    return EngineLimits(
        STEP_TOKENS, _VLLM_SEQS, STEPS.block_tokens, STEPS.memory_utilisation, share
    )


def _choose_chunk(gpu: Gpu) -> int:
    memory_byte = float(np.min(gpu.memory.capacity_byte))
    for limit_byte, tokens in _SGLANG_CHUNKS:
        if memory_byte < limit_byte:
            return tokens
    return _SGLANG_LARGEST_CHUNK


def _static_share(gpu: Gpu, gpus: int, chunk: int) -> float:
    """Return SGLang's ``mem_fraction_static``: the memory less what it reserves for steps."""
    memory_byte = float(np.min(gpu.memory.capacity_byte))
    reserved_byte = SCHEDULERS.sglang_reserved_byte + _SGLANG_TOKEN_BYTE * chunk
    reserved_byte += _SGLANG_SEQUENCE_BYTE * _SGLANG_GRAPHS[gpus >= 4]
    reserved_byte += _SGLANG_GPU_BYTE * gpus
    return round(1.0 - reserved_byte / memory_byte, 3)


def describe_scheduler(engine: str) -> list[str]:
    """Say whose scheduler is simulated, where it is another than vLLM's."""
    title = _TITLES.get(engine)
    if title is None:
        return []
    return [f"scheduler: {title}'s; times of its host are vLLM's, for want of measured ones"]


def start_scheduler(engine: str, arguments: str | None) -> StartScheduler:
    """Return the scheduler of an engine with its own arguments, ``name=value,name=value``."""
    kind = _ARGUMENTS.get(engine, VllmArguments)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    chosen: dict[str, Any] = {}
    for name, text in _split_arguments(arguments).items():
        if name not in names:
            if not names:
                expected = "none: vLLM's scheduler has the options of every engine alone"
                raise bad_value("engine_args", expected, name)
            raise unknown_name("argument of the engine", name, names)
        chosen[name] = _read_argument(name, text, hints[name])
    return kind(**chosen).start


def _split_arguments(arguments: str | None) -> Mapping[str, str]:
    pairs = {}
    for part in (arguments or "").replace(",", " ").split():
        name, equals, text = part.partition("=")
        if not equals or not text:
            raise bad_value("engine_args", "name=value, with commas between them", part)
        pairs[name.removeprefix("--").replace("-", "_")] = text
    return pairs


def _read_argument(name: str, text: str, kind: type) -> Any:
    """Read the value of an argument as its declaration has it."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise bad_value("engine_args", f"{name}=true or {name}=false", text)
        return text.lower() == "true"
    if issubclass(kind, StrEnum):
        choices = [str(choice) for choice in kind]
        if text.upper() not in choices:
            raise unknown_name(name, text, choices)
        return kind(text.upper())
    try:
        number = int(text) if kind is int else float(text)
    except ValueError:
        raise bad_value("engine_args", f"a number for {name}", text) from None
    if number < 0:
        raise bad_value("engine_args", f"{name} of zero or more", text)
    return number
