"""A model and options -> the graph of operators, with every default stated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.workload import memory, models
from wattcast.workload.architectures import Kind, default_seq
from wattcast.workload.graph import Block, Graph
from wattcast.workload.models import Model
from wattcast.workload.options import Head, Options, Phase, Stack
from wattcast.workload.program import Program, gradient_exchange, optimiser
from wattcast.workload.run import Run


def build(model: str | Model, options: Options = Options()) -> Graph:  # noqa: B008  (frozen)
    """The operators one GPU runs for ``model`` under ``options``."""
    return _build(models.load(model) if isinstance(model, str) else model, options)


@lru_cache(maxsize=256)
def _build(model: Model, options: Options) -> Graph:
    options, said = resolve(model, options)
    if options.phase is Phase.GENERATE:
        blocks, program, more = _generate(model, options)
        said += more
    else:
        program = trace(model, options)
        blocks = program.blocks(options.recompute)
    if options.phase is Phase.TRAIN:
        if options.dp > 1:
            blocks.append(gradient_exchange(program.parameter_count, program_dtype(options), options.dp))
        blocks.append(optimiser(program.parameter_count, program_dtype(options)))
    footprint = memory.of(model, options, program)
    return Graph(title(model, options), tuple(blocks), float(footprint.total_byte), tuple(said))


def resolve(model: Model, options: Options) -> tuple[Options, list[str]]:
    """Options with no None left where the model needs a value, and a sentence for each default."""
    said: list[str] = []
    kind = model.kind
    if options.phase is None:
        phase = Phase.PREFILL if kind is not Kind.VISION else Phase.FORWARD
        options = replace(options, phase=phase)
        said.append(f"phase {phase} (default of a {kind} model)")
    _check_phase(model, options)
    if kind is Kind.VISION:
        if options.image is None:
            options = replace(options, image=model.dims.image)
            said.append(f"pictures of {options.image} by {options.image} (the published input)")
    elif options.seq is None:
        options = replace(options, seq=default_seq(kind, model.dims))
        said.append(f"seq {options.seq} (default)")
    if options.phase is Phase.GENERATE and options.tokens is None:
        options = replace(options, tokens=128)
        said.append("tokens 128 (default)")
    if options.head is None and kind is not Kind.VISION:
        options = replace(options, head=_default_head(kind, options.phase))
        said.append(f"head {options.head} (default)")
    return options, said + _spoken(model, options)


def _default_head(kind: Kind, phase: Phase | None) -> Head:
    if phase is Phase.TRAIN:
        return Head.ALL
    return Head.NONE if kind is Kind.ENCODER else Head.LAST


def _check_phase(model: Model, options: Options) -> None:
    allowed = _PHASES[model.kind]
    if options.phase not in allowed:
        raise bad_value(f"{model.name}: phase", f"one of {', '.join(allowed)}", str(options.phase))


_PHASES = {
    Kind.LANGUAGE: tuple(Phase),
    Kind.ENCODER: (Phase.PREFILL, Phase.FORWARD, Phase.TRAIN),
    Kind.VISION: (Phase.FORWARD, Phase.TRAIN),
}


def _spoken(model: Model, options: Options) -> list[str]:
    """What holds for every run of this kind and is not an option."""
    said = []
    if model.kind is not Kind.VISION:
        said.append("no padding: all sequences are of one length")
    if options.phase in (Phase.DECODE, Phase.GENERATE) and options.stack is Stack.EAGER:
        said.append("cache grows by concatenation (Hugging Face DynamicCache)")
    if options.phase is Phase.DECODE:
        said.append(f"one step behind a cache of {options.seq} tokens")
    if options.phase is Phase.TRAIN:
        said.append(f"weights, gradients and AdamW moments in {program_dtype(options)}; fused AdamW, no clipping")
    return said


def program_dtype(options: Options) -> Dtype:
    """Format of activations: fp8 and int8 narrow the linear weights only."""
    if options.dtype is Dtype.TF32:
        return Dtype.FP32
    return Dtype.BF16 if options.dtype in (Dtype.FP8, Dtype.INT8) else options.dtype


def trace(model: Model, options: Options, past: int = 0, length: int | None = None) -> Program:
    """The program of one pass; in decode one new token behind ``seq`` cached ones."""
    training = options.phase is Phase.TRAIN
    if options.phase is Phase.DECODE:
        past, length = options.seq or 0, 1
    dtype = program_dtype(options)
    run = Run(
        batch=options.batch,
        length=length or options.seq or 1,
        past=past,
        cached=not training and model.kind is Kind.LANGUAGE and options.phase is not Phase.FORWARD,
        dtype=dtype,
        weight_dtype=options.dtype if options.dtype in (Dtype.FP8, Dtype.INT8) else dtype,
        attention=options.attention,
        head=options.head or Head.NONE,
        stack=options.stack,
        tp=options.tp,
        training=training,
        skew=options.skew,
        image=options.image or 0,
        tf32=options.dtype is Dtype.TF32,
    )
    program = model.template.trace(model.dims, run, options.pp)
    if training:
        program.differentiate()
    return program


def _generate(model: Model, options: Options) -> tuple[list[Block], Program, list[str]]:
    """A prefill, then decode steps in groups that share their mean context.

    Groups hold an odd number of steps, so that the mean is a whole number and sums over a group that
    are linear in the context are exact.
    """
    assert options.seq is not None
    assert options.tokens is not None
    program = trace(model, options)
    blocks = program.blocks()
    steps = options.tokens - 1
    size = max(-(-steps // GENERATE_GROUPS) | 1, 1)
    done = 0
    while done < steps:
        here = min(size, steps - done)
        step = trace(model, options, past=options.seq + done + here // 2, length=1)
        blocks += [replace(b, repeat=b.repeat, label=f"decode.{b.label}") for b in _flat(step, here)]
        program, done = step, done + here
    said = [f"{steps} decode steps in groups of {size} at their mean context"] if size > 1 else []
    return blocks, program, said


GENERATE_GROUPS = 16


def _flat(step: Program, times: int) -> list[Block]:
    """``times`` whole steps in a row as blocks; order inside a group is not kept."""
    return [replace(block, repeat=block.repeat * times) for block in step.blocks()]


def title(model: Model, options: Options) -> str:
    """Such as ``llama3-8b prefill b8 s1024 bf16``."""
    size = f"i{options.image}" if model.kind is Kind.VISION else f"s{options.seq}"
    words = [model.name, str(options.phase), f"b{options.batch}", size]
    if options.tokens:
        words.append(f"t{options.tokens}")
    words.append(str(options.dtype))
    if options.stack is not Stack.EAGER:
        words.append(str(options.stack))
    words += [f"{name}{getattr(options, name)}" for name in ("tp", "pp", "dp") if getattr(options, name) > 1]
    return " ".join(words)
