"""Build the graph of a model under given options, and the memory one GPU needs for it.

A model's template is traced on symbolic tensors. The trace gives the operators in issue order and
how long each tensor lives, from which follow weights, cache, activations, gradients and optimiser
state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from wattcast.core import Dtype, bad_value
from wattcast.workload import model_options
from wattcast.workload.engine_schedule import (
    EngineLaunches,
    count_launches,
    schedule_decodes,
    schedule_pass,
)
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_catalogue import ModelKind, ModelSpec, load_model
from wattcast.workload.model_options import (
    ModelOptions,
    OutputHead,
    SoftwareStack,
    WorkloadPhase,
    resolve_options,
)
from wattcast.workload.operator_types import Collective
from wattcast.workload.program import PassSettings, Program, optimiser_block, trace_program

# PyTorch's default cuBLAS workspace on Hopper, a handle and stream (CUBLAS_WORKSPACE_CONFIG,
# PyTorch notes)
WORKSPACE_BYTE = 32 * 2**20
_LARGEST_BATCH = 1 << 20
# A table of step costs takes a hundred graphs, of a dozen kB each. Kinds of GPU share them, so the
# tables of several layouts must fit.
_KEPT_GRAPHS = 1024
_SERVED = (
    WorkloadPhase.PREFILL,
    WorkloadPhase.DECODE,
    WorkloadPhase.GENERATE,
)  # by an engine, in steps


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes by purpose, on one GPU. The CUDA context and the allocator's slack come on top."""

    weight_byte: int
    cache_byte: int
    activation_byte: int
    gradient_byte: int
    optimiser_byte: int
    workspace_byte: int

    @property
    def total_byte(self) -> int:
        """Sum of all purposes."""
        return sum(getattr(self, item.name) for item in fields(self))

    def fits(self, capacity_byte: float) -> bool:
        """Tell whether all of it goes into ``capacity_byte``."""
        return self.total_byte <= capacity_byte


def build_graph(model: str | ModelSpec, options: ModelOptions = ModelOptions()) -> Graph:  # noqa: B008  (frozen)
    """Return the operators one GPU runs for ``model`` under ``options``."""
    return _build_graph(load_model(model) if isinstance(model, str) else model, options)


@lru_cache(maxsize=_KEPT_GRAPHS)
def _build_graph(model: ModelSpec, options: ModelOptions) -> Graph:
    options, assumptions = resolve_options(model, options)
    first = trace_pass(model, options)
    passes = [first]
    blocks = first.blocks(options.recompute)
    by_engine = options.stack is SoftwareStack.ENGINE and options.phase in _SERVED
    if by_engine:
        prompt_step = schedule_pass(_count_launches(blocks, model, options), options)
        blocks = [replace(block, step=prompt_step) for block in blocks]
    # Decode steps of a generation come in groups that share their mean context. A group holds an
    # odd number of steps, so that this is a whole number and sums over a group that are linear in
    # the context are exact.
    steps = (options.tokens or 1) - 1
    done = 0
    while done < steps:
        here = min(model_options.decode_group_size(steps), steps - done)
        step = trace_pass(model, options, done + here // 2)
        of_step = step.blocks()
        decodes = None
        if by_engine:
            decodes = schedule_decodes(
                _count_launches(of_step, model, options), options, here, place=len(blocks)
            )
        for block in of_step:
            label = f"decode.{block.label}"
            blocks.append(replace(block, repeat=block.repeat * here, label=label, step=decodes))
        step.release()
        done += here
    if steps:
        passes.append(trace_pass(model, options, steps - 1))
    training = options.phase is WorkloadPhase.TRAIN
    dtype = model_options.activation_dtype(options)
    if options.pp > 1:  # activations go forward to the next stage, gradients backward
        layers = next(s for s in first.sections if s.repeat > 1 or "layers" in s.label)
        # between neighbouring stages: replicas stand outermost in serving, stages in training
        stride = options.tp * options.cp * (options.dp if training else 1)
        byte = layers.outputs[0].storage.byte
        op = Collective(
            "send", byte, 2, stride=stride, dtype=dtype, count=1 + training, label="pipeline"
        )
        blocks.append(Block((op,), 1, "pipeline", blocks[-1].step))
    if options.dp > 1 and training:  # replicas sum their gradients, once a step
        byte = first.parameter_count * dtype.byte
        stride = options.tp * options.cp
        op = Collective(
            "all_reduce", byte, options.dp, stride=stride, dtype=dtype, label="gradients"
        )
        blocks.append(Block((op,), 1, "gradients"))
    if training:
        blocks.append(optimiser_block(first.parameter_count, dtype))
    if options.stack is SoftwareStack.ENGINE:
        for i, block in enumerate(blocks):
            ops = (
                replace(op, software="engine") if isinstance(op, Collective) else op
                for op in block.ops
            )
            blocks[i] = replace(block, ops=tuple(ops))
    memory_byte = float(sum_footprint(options, passes).total_byte)
    for program in passes:
        program.release()
    name = model_options.name_graph(model, options)
    how = (str(options.stack), str(options.phase))
    tokens, items = model_options.count_output(model, options)
    item = model.template.item
    count = options.gpu_count
    return Graph(
        name, tuple(blocks), memory_byte, tuple(assumptions), *how, tokens, items, item, count
    )


def _count_launches(
    blocks: Sequence[Block], model: ModelSpec, options: ModelOptions
) -> EngineLaunches:
    calls = ((op, op.count * block.repeat) for block in blocks for op in block.ops)
    return count_launches(calls, model.dims, options)


def trace_pass(model: ModelSpec, options: ModelOptions, step: int | None = None) -> Program:
    """Trace one pass of a model, or one ``step`` of its generation; in decode a token comes behind
    ``seq`` others.
    """
    training = options.phase is WorkloadPhase.TRAIN
    past, length = (0, options.seq or 1) if step is None else ((options.seq or 0) + step, 1)
    if options.phase is WorkloadPhase.DECODE:
        past = options.seq or 0
        length = 1
    source = (options.seq or 1) if model.template.source else 0
    if source and options.phase in (WorkloadPhase.PREFILL, WorkloadPhase.GENERATE):
        # the decoder begins with a start token, then its answer
        past = past - source + 1 if past else 0
        length = 1
    dtype = model_options.activation_dtype(options)
    served = options.stack is SoftwareStack.ENGINE and model.template.engine
    run = PassSettings(
        batch=options.batch,
        length=-(-length // options.cp),
        past=past,
        source=source,
        cached=not training
        and model.kind is ModelKind.LANGUAGE
        and options.phase is not WorkloadPhase.FORWARD,
        dtype=dtype,
        weight_dtype=options.dtype
        if options.dtype in (Dtype.FP8, Dtype.INT8) and not options.recipe
        else dtype,
        attention=options.attention,
        head=options.head or OutputHead.NONE,
        stack=SoftwareStack.ENGINE if served else SoftwareStack.EAGER,
        training=training,
        image=options.image or 0,
        tf32=options.dtype is Dtype.TF32,
        served_rank=options.lora or 0,
        served_adapters=options.adapters or 1,
        experts_alone=getattr(options.recipe, "experts_alone", False)
        and getattr(model.dims, "experts", 0) > 0,
        **{
            name: getattr(options, name)
            for name in ("tp", "ep", "cp", "skew", "recipe", "kv_dtype", "sampling")
        },
    )
    program = trace_program(model.template.trace, model.dims, run, options.pp)
    if training:
        program.differentiate()
    if options.stack is not SoftwareStack.EAGER and not served:
        program.fuse()
    return program


@lru_cache(maxsize=256)
def count_parameters(model: ModelSpec) -> int:
    """Count all weights of a model, tied ones once, its head included."""
    head = {ModelKind.LANGUAGE: OutputHead.LAST, ModelKind.ENCODER: OutputHead.NONE}.get(model.kind)
    options, _ = resolve_options(model, ModelOptions(head=head, stack=SoftwareStack.EAGER))
    return trace_pass(model, options).parameter_count


def compute_footprint(
    model: str | ModelSpec,
    options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
) -> MemoryFootprint:
    """Return the memory ``model`` needs at its peak under ``options``.

    The peak of a generation is its prefill or its last step.
    """
    model = load_model(model) if isinstance(model, str) else model
    options, _ = resolve_options(model, options)
    passes = [trace_pass(model, options)]
    steps = (options.tokens or 1) - 1
    if steps:
        passes.append(trace_pass(model, options, steps - 1))
    return sum_footprint(options, passes)


def sum_footprint(options: ModelOptions, programs: Sequence[Program]) -> MemoryFootprint:
    """Return the memory of these passes at the worst moment of any of them.

    In training, activations are those the backward pass waits for (with recomputation: the input of
    each repeated layer, and the activations of one layer) plus the most that is alive inside one
    section; gradients are as large as the weights, AdamW's two moments twice that."""
    training = options.phase is WorkloadPhase.TRAIN
    weights = sum(
        sum([p.storage.byte for p in s.tape.parameters]) * s.repeat for s in programs[0].sections
    )
    return MemoryFootprint(
        weight_byte=weights,
        cache_byte=max(program.cache_byte for program in programs),
        activation_byte=max(
            _activation_byte(program, training, options.recompute) for program in programs
        ),
        gradient_byte=weights if training else 0,
        optimiser_byte=2 * weights if training else 0,
        workspace_byte=WORKSPACE_BYTE,
    )


def _activation_byte(program: Program, training: bool, recompute: bool) -> int:
    passing = max(section.peak_byte for section in program.sections)
    if not training:
        return passing
    if not recompute:
        return passing + sum(section.saved_byte * section.repeat for section in program.sections)
    repeated = [section for section in program.sections if section.repeat > 1]
    single = sum(section.saved_byte for section in program.sections if section.repeat == 1)
    kept = sum(section.input_byte * section.repeat for section in repeated)
    return passing + single + kept + max((section.saved_byte for section in repeated), default=0)


def find_largest_batch(model: str | ModelSpec, options: ModelOptions, capacity_byte: float) -> int:
    """Return the largest batch that fits into ``capacity_byte``, 0 when not even one does.

    The footprint grows with the batch and nearly in proportion to it: each guess lies on the line
    through the last two, every third one halfway between what fits and what does not, which bounds
    the guesses where it bends."""
    if not capacity_byte > 0:
        raise bad_value("capacity", "bytes above zero", capacity_byte)
    low = 0
    high = _LARGEST_BATCH + 1
    last = 0
    last_byte = 0
    guess = 1
    tries = 0
    while high - low > 1:
        tries += 1
        byte = compute_footprint(model, replace(options, batch=guess)).total_byte
        low, high = (guess, high) if byte <= capacity_byte else (low, guess)
        slope = max((byte - last_byte) / (guess - last), 1.0)
        last = guess
        last_byte = byte
        guess = (
            (low + high) // 2 if tries % 3 == 0 else guess + int((capacity_byte - byte) // slope)
        )
        guess = min(max(guess, low + 1), high - 1)
    return low
