"""A model and options -> the graph of operators one GPU runs, with every default stated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from wattcast.dtypes import Dtype
from wattcast.workload import memory, models, plans, resolution
from wattcast.workload.architectures import Kind
from wattcast.workload.graph import Block, Collective, Graph
from wattcast.workload.models import Model
from wattcast.workload.options import Head, Options, Phase, Stack
from wattcast.workload.program import Program, gradient_exchange, optimiser
from wattcast.workload.resolution import activation_dtype, group_size, resolve
from wattcast.workload.run import Run


def build(model: str | Model, options: Options = Options()) -> Graph:  # noqa: B008  (frozen)
    """The operators one GPU runs for ``model`` under ``options``."""
    return _build(models.load(model) if isinstance(model, str) else model, options)


@lru_cache(maxsize=256)
def _build(model: Model, options: Options) -> Graph:
    options, said = resolve(model, options)
    blocks, held_byte = plans.blocks_of(model, options, _traced)
    return Graph(resolution.title(model, options), tuple(blocks), float(held_byte), tuple(said))


def _traced(model: Model, options: Options) -> tuple[list[Block], int]:
    """The blocks of operators, and the bytes a GPU holds at their peak."""
    if options.phase is Phase.GENERATE:
        blocks, passes = _generate(model, options)
    else:
        passes = [trace(model, options)]
        blocks = passes[0].blocks(options.recompute)
    blocks += _between_gpus(options, passes[0])
    if options.phase is Phase.TRAIN:
        blocks.append(optimiser(passes[0].parameter_count, activation_dtype(options)))
    held_byte = memory.of(options, passes).total_byte
    for program in passes:
        program.release()
    return blocks, held_byte


@lru_cache(maxsize=256)
def parameter_count(model: Model) -> int:
    """All weights of a model, tied ones once, its head included."""
    options, _ = resolve(model, Options(head=None if model.kind is Kind.VISION else _full_head(model)))
    return trace(model, options).parameter_count


def _full_head(model: Model) -> Head:
    return Head.NONE if model.kind is Kind.ENCODER else Head.LAST


def programs(model: Model, options: Options) -> list[Program]:
    """The passes that bound a run's memory: the one pass, or the prefill and the last step of a generation."""
    first = trace(model, options)
    steps = (options.tokens or 1) - 1
    return [first, _step(model, options, steps - 1)] if steps else [first]


def trace(model: Model, options: Options, past: int = 0, length: int | None = None) -> Program:
    """The program of one pass; in decode one new token behind ``seq`` cached ones."""
    training = options.phase is Phase.TRAIN
    if options.phase is Phase.DECODE:
        past, length = options.seq or 0, 1
    dtype = activation_dtype(options)
    served = options.stack is Stack.ENGINE and model.template.engine
    run = Run(
        batch=options.batch,
        length=length or options.seq or 1,
        past=past,
        cached=not training and model.kind is Kind.LANGUAGE and options.phase is not Phase.FORWARD,
        dtype=dtype,
        weight_dtype=options.dtype if options.dtype in (Dtype.FP8, Dtype.INT8) else dtype,
        attention=options.attention,
        head=options.head or Head.NONE,
        stack=Stack.ENGINE if served else Stack.EAGER,
        tp=options.tp,
        training=training,
        skew=options.skew,
        image=options.image or 0,
        tf32=options.dtype is Dtype.TF32,
    )
    program = model.template.trace(model.dims, run, options.pp)
    if training:
        program.differentiate()
    if options.stack is not Stack.EAGER and not served:
        program.fuse()
    return program


def _generate(model: Model, options: Options) -> tuple[list[Block], list[Program]]:
    """A prefill, then decode steps in groups that share their mean context.

    Groups hold an odd number of steps, so that the mean is a whole number and sums over a group that
    are linear in the context are exact.
    """
    assert options.tokens is not None
    passes = [trace(model, options)]
    blocks = passes[0].blocks()
    steps, done = options.tokens - 1, 0
    size = group_size(steps)
    while done < steps:
        here = min(size, steps - done)
        step = _step(model, options, done + here // 2)
        blocks += [replace(b, repeat=b.repeat * here, label=f"decode.{b.label}") for b in step.blocks()]
        step.release()
        done += here
    return blocks, [*passes, _step(model, options, steps - 1)] if steps else passes


def _step(model: Model, options: Options, number: int) -> Program:
    return trace(model, options, past=(options.seq or 0) + number, length=1)


def _between_gpus(options: Options, program: Program) -> list[Block]:
    """What pipeline stages hand on, and gradients that replicas sum."""
    blocks = []
    if options.pp > 1:
        layers = next(s for s in program.sections if s.repeat > 1 or s.label == "layers")
        byte = layers.outputs[0].storage.byte
        sends = 2 if options.phase is Phase.TRAIN else 1  # activations on, gradients back
        op = Collective("send", byte, 2, dtype=activation_dtype(options), count=sends, label="pipeline")
        blocks.append(Block((op,), 1, "pipeline"))
    if options.dp > 1 and options.phase is Phase.TRAIN:
        blocks.append(gradient_exchange(program.parameter_count, activation_dtype(options), options.dp))
    return blocks
