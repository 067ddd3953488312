"""Build the graph of a model under given options, and the memory one GPU needs for it.

A model's template is traced on symbolic tensors. The trace gives the operators in issue order and
how long each tensor lives, from which follow weights, cache, activations, gradients and optimiser
state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
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
from wattcast.workload.model_catalogue import (
    ModelKind,
    ModelSpec,
    load_model,
)
from wattcast.workload.model_options import (
    ModelOptions,
    OutputHead,
    SoftwareStack,
    WeightUpdate,
    WorkloadPhase,
    makes_pictures,
    pixels_of_a_latent,
    resolve_options,
)
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Collective
from wattcast.workload.picture_pipeline import (
    PartRun,
    PicturePart,
    PicturePipeline,
    list_part_runs,
    name_part_block,
)
from wattcast.workload.program import (
    PassSettings,
    Program,
    trace_program,
)
from wattcast.workload.weight_update import update_block
from wattcast.workload.workload_coefficients import WORKLOADS

# PyTorch's default cuBLAS workspace on Hopper, a handle and stream (CUBLAS_WORKSPACE_CONFIG,
# PyTorch notes)
WORKSPACE_BYTE = round(WORKLOADS.workspace_byte)
_LARGEST_BATCH = 1 << 20
# A table of step costs takes a hundred graphs, of a dozen kB each. Kinds of GPU share them, so the
# tables of several layouts must fit.
_KEPT_GRAPHS = 1024
# The phases that an engine serves in steps.
_SERVED = (WorkloadPhase.PREFILL, WorkloadPhase.DECODE, WorkloadPhase.GENERATE)


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


def build_graph(
    model: str | ModelSpec,
    options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
) -> Graph:
    """Return the operators one GPU runs for ``model`` under ``options``."""
    return _build_graph(load_model(model) if isinstance(model, str) else model, options)


@lru_cache(maxsize=_KEPT_GRAPHS)
def _build_graph(model: ModelSpec, options: ModelOptions) -> Graph:
    options, assumptions = resolve_options(model, options)
    if model.pipeline is not None and makes_pictures(model, options):
        return _build_picture(model, model.pipeline, options, assumptions)
    first = trace_pass(model, options)
    passes = [first]
    blocks = _list_prompt_blocks(model, options, first)
    steps = _count_decode_steps(options)
    if steps:
        blocks += _list_decode_blocks(model, options, steps, place=len(blocks))
        passes.append(trace_pass(model, options, steps - 1))
    blocks += _list_exchanges(options, first, blocks[-1])
    if options.phase is WorkloadPhase.TRAIN:
        dtype = model_options.activation_dtype(options)
        blocks.append(update_block(first, dtype, options.update or WeightUpdate.FUSED))
    if options.stack is SoftwareStack.ENGINE:
        blocks = [_use_engine_collectives(block) for block in blocks]

    memory_byte = float(sum_footprint(options, passes).total_byte)
    for program in passes:
        program.release()
    tokens, items = model_options.count_output(model, options)
    return Graph(
        name=model_options.name_graph(model, options),
        blocks=tuple(blocks),
        memory_byte=memory_byte,
        assumptions=tuple(assumptions),
        stack=str(options.stack),
        phase=str(options.phase),
        tokens=tokens,
        items=items,
        item=model.template.item,
        gpu_count=options.gpu_count,
        layer_host=_weigh_layer(model),
    )


def _build_picture(
    model: ModelSpec,
    pipeline: PicturePipeline,
    options: ModelOptions,
    assumptions: Sequence[str],
) -> Graph:
    """Return the operators of a whole picture: those of its parts, each as often as it runs."""
    blocks = []
    runs_of_part: dict[str, int] = {}
    for run in list_part_runs(pipeline, options):
        runs_of_part[run.name] = runs_of_part.get(run.name, 0) + run.repeat
        for block in _build_graph(_find_part(model, run), run.options).blocks:
            label = name_part_block(run.name, block.label)
            blocks.append(replace(block, repeat=block.repeat * run.repeat, label=label))

    _, pictures = model_options.count_output(model, options)
    return Graph(
        name=model_options.name_graph(model, options),
        blocks=tuple(blocks),
        memory_byte=float(compute_footprint(model, options).total_byte),
        assumptions=tuple(assumptions),
        stack=str(options.stack),
        phase=str(options.phase),
        items=pictures,
        item=pipeline.item,
        parts=tuple([PicturePart(name, runs) for name, runs in runs_of_part.items()]),
        gpu_count=options.gpu_count,
        layer_host=_weigh_layer(model),
    )


def _find_part(model: ModelSpec, run: PartRun) -> ModelSpec:
    """Return the model of a part of a picture; the denoiser is ``model`` itself."""
    return model if run.model is None else load_model(run.model)


def _weigh_layer(model: ModelSpec) -> float:
    """Return what the Python of a layer costs the host, over that of GPT-2 or of Llama."""
    if model.architecture == "vit":
        return WORKLOADS.vit_layer_host
    if model.architecture == "gpt" and model.dims.style == "opt":
        return WORKLOADS.opt_layer_host
    return 1.0


def _runs_in_steps(options: ModelOptions) -> bool:
    """Tell whether an engine serves the model."""
    return options.stack is SoftwareStack.ENGINE and options.phase in _SERVED


def _count_decode_steps(options: ModelOptions) -> int:
    """Count the decode steps of a generation; its prefill yields the first token."""
    return (options.tokens or 1) - 1


def _list_prompt_blocks(
    model: ModelSpec,
    options: ModelOptions,
    first: Program,
) -> list[Block]:
    """Return the blocks of the first pass, which an engine runs in steps."""
    blocks = first.blocks(options.recompute)
    if not _runs_in_steps(options):
        return blocks
    step = schedule_pass(_count_launches(blocks, model, options), options)
    return [replace(block, step=step) for block in blocks]


def _list_decode_blocks(
    model: ModelSpec,
    options: ModelOptions,
    steps: int,
    place: int,
) -> list[Block]:
    """Return the blocks of the decode steps of a generation; ``place`` counts the blocks before.

    Steps come in groups that share their mean context. A group holds an odd number of steps, so
    that this is a whole number and sums over a group that are linear in the context are exact."""
    blocks: list[Block] = []
    done = 0
    while done < steps:
        count = min(model_options.decode_group_size(steps), steps - done)
        program = trace_pass(model, options, done + count // 2)
        step_blocks = program.blocks()
        engine_step = None
        if _runs_in_steps(options):
            launches = _count_launches(step_blocks, model, options)
            engine_step = schedule_decodes(launches, options, count, place + len(blocks))
        for block in step_blocks:
            repeat = block.repeat * count
            label = f"decode.{block.label}"
            blocks.append(
                replace(
                    block,
                    repeat=repeat,
                    label=label,
                    step=engine_step,
                )
            )
        program.release()
        done += count
    return blocks


def _list_exchanges(
    options: ModelOptions,
    first: Program,
    last_block: Block,
) -> list[Block]:
    """Return the exchanges between stages of a pipeline, and between replicas in training."""
    blocks = []
    training = options.phase is WorkloadPhase.TRAIN
    dtype = model_options.activation_dtype(options)
    replica_gpus = options.tp * options.cp
    if options.pp > 1:  # activations go forward to the next stage, gradients backward
        layers = next(s for s in first.sections if s.repeat > 1 or "layers" in s.label)
        # GPUs between neighbouring stages: replicas stand outermost in serving, stages in training
        stride = replica_gpus * options.dp if training else replica_gpus
        send = Collective(
            "send",
            bytes=layers.outputs[0].storage.byte,
            gpus=2,
            stride=stride,
            dtype=dtype,
            count=2 if training else 1,
            label="pipeline",
        )
        blocks.append(Block((send,), 1, "pipeline", last_block.step))
    if options.dp > 1 and training:  # replicas sum their gradients, once a step
        reduction = Collective(
            "all_reduce",
            bytes=first.parameter_count * dtype.byte,
            gpus=options.dp,
            stride=replica_gpus,
            dtype=dtype,
            label="gradients",
        )
        blocks.append(Block((reduction,), 1, "gradients"))
    return blocks


def _use_engine_collectives(block: Block) -> Block:
    """Return a block whose exchanges are the engine's kernels."""
    ops: list[Operator] = []
    for op in block.ops:
        if isinstance(op, Collective):
            op = replace(op, software="engine")
        ops.append(op)
    return replace(block, ops=tuple(ops))


def _count_launches(
    blocks: Sequence[Block],
    model: ModelSpec,
    options: ModelOptions,
) -> EngineLaunches:
    calls = ((op, op.count * block.repeat) for block in blocks for op in block.ops)
    return count_launches(calls, model.dims, options)


def trace_pass(
    model: ModelSpec,
    options: ModelOptions,
    step: int | None = None,
) -> Program:
    """Trace one pass of a model, or one ``step`` of its generation.

    In decode a token comes behind ``seq`` others.
    """
    run = _settle_pass(model, options, step)
    program = trace_program(model.template.trace, model.dims, run, options.pp)
    if run.training:
        program.differentiate()
    if options.stack is not SoftwareStack.EAGER and not run.engine:
        program.fuse()
    return program


def _settle_pass(
    model: ModelSpec,
    options: ModelOptions,
    step: int | None,
) -> PassSettings:
    """Return the settings of a pass."""
    training = options.phase is WorkloadPhase.TRAIN
    dtype = model_options.activation_dtype(options)
    past, length, source = _count_tokens(model, options, step)
    generates = not training and options.phase is not WorkloadPhase.FORWARD
    by_engine = options.stack is SoftwareStack.ENGINE and model.template.engine
    narrow_experts = getattr(options.recipe, "experts_alone", False)
    has_experts = getattr(model.dims, "experts", 0) > 0
    weight_dtype = dtype
    if options.dtype in (Dtype.FP8, Dtype.INT8) and not options.recipe:
        weight_dtype = options.dtype
    return PassSettings(
        batch=options.batch,
        length=-(-length // options.cp),
        past=past,
        source=source,
        cached=generates and model.kind is ModelKind.LANGUAGE,
        dtype=dtype,
        weight_dtype=weight_dtype,
        attention=options.attention,
        head=options.head or OutputHead.NONE,
        stack=SoftwareStack.ENGINE if by_engine else SoftwareStack.EAGER,
        tp=options.tp,
        ep=options.ep,
        cp=options.cp,
        training=training,
        skew=options.skew,
        image=(options.image or 0) // pixels_of_a_latent(model),
        tf32=options.dtype is Dtype.TF32,
        recipe=options.recipe,
        experts_alone=narrow_experts and has_experts,
        kv_dtype=options.kv_dtype,
        sampling=options.sampling,
        served_rank=options.lora or 0,
        served_adapters=options.adapters or 1,
        wide_norms=options.update is WeightUpdate.MASTERS and dtype is Dtype.FP16,
        channels_last=options.channels_last,
    )


def _count_tokens(
    model: ModelSpec,
    options: ModelOptions,
    step: int | None,
) -> tuple[int, int, int]:
    """Return the tokens in the cache, the new ones and those that an encoder reads."""
    prompt = options.seq or 1
    past = 0
    length = prompt
    if step is not None:
        past = (options.seq or 0) + step
        length = 1
    if options.phase is WorkloadPhase.DECODE:
        past = options.seq or 0
        length = 1
    if not model.template.encodes_prompt:
        return past, length, 0
    if options.phase in (WorkloadPhase.PREFILL, WorkloadPhase.GENERATE):
        # The decoder begins with a start token, then its answer
        past = past - prompt + 1 if past else 0
        length = 1
    return past, length, prompt


@lru_cache(maxsize=256)
def count_parameters(model: ModelSpec) -> int:
    """Count all weights of a model, tied ones once, its head included."""
    head = {ModelKind.LANGUAGE: OutputHead.LAST, ModelKind.ENCODER: OutputHead.NONE}.get(model.kind)
    one_pass = ModelOptions(head=head, stack=SoftwareStack.EAGER)
    if model.pipeline is not None:
        one_pass = replace(one_pass, phase=WorkloadPhase.FORWARD)
    options, _ = resolve_options(model, one_pass)
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
    if model.pipeline is not None and makes_pictures(model, options):
        runs = list_part_runs(model.pipeline, options)
        return _join_footprints(
            [compute_footprint(_find_part(model, run), run.options) for run in runs]
        )
    passes = [trace_pass(model, options)]
    steps = (options.tokens or 1) - 1
    if steps:
        passes.append(trace_pass(model, options, steps - 1))
    return sum_footprint(options, passes)


def _join_footprints(parts: Sequence[MemoryFootprint]) -> MemoryFootprint:
    """Return the memory of a picture: the weights of all parts stay, and one part runs at a
    time.
    """
    return MemoryFootprint(
        weight_byte=sum(part.weight_byte for part in parts),
        cache_byte=0,
        activation_byte=max(part.activation_byte for part in parts),
        gradient_byte=0,
        optimiser_byte=0,
        workspace_byte=WORKSPACE_BYTE,
    )


def sum_footprint(options: ModelOptions, programs: Sequence[Program]) -> MemoryFootprint:
    """Return the memory of these passes at the worst moment of any of them.

    In training, activations are those the backward pass waits for (with recomputation: the input of
    each repeated layer, and the activations of one layer) plus the most that is alive inside one
    section; gradients are as large as the weights, AdamW's two moments twice that."""
    training = options.phase is WorkloadPhase.TRAIN
    weights = programs[0].weight_byte
    activations = [_activation_byte(program, training, options.recompute) for program in programs]
    return MemoryFootprint(
        weight_byte=weights,
        cache_byte=max(program.cache_byte for program in programs),
        activation_byte=max(activations),
        gradient_byte=weights if training else 0,
        optimiser_byte=_count_optimiser_byte(options, weights) if training else 0,
        workspace_byte=WORKSPACE_BYTE,
    )


def _activation_byte(
    program: Program,
    training: bool,
    recompute: bool,
) -> int:
    """Return the bytes that wait for the backward pass, and the most alive inside a section."""
    byte = max(section.peak_byte for section in program.sections)
    if not training:
        return byte
    most_recomputed = 0
    for section in program.sections:
        if recompute and section.repeat > 1:
            byte += section.input_byte * section.repeat
            most_recomputed = max(most_recomputed, section.saved_byte)
        else:
            byte += section.saved_byte * section.repeat
    return byte + most_recomputed


def _count_optimiser_byte(options: ModelOptions, weight_byte: int) -> int:
    """Return the bytes of two moments, and of masters where there are, which are all in fp32."""
    if options.update is not WeightUpdate.MASTERS:
        return 2 * weight_byte
    weights = weight_byte // model_options.activation_dtype(options).byte
    # masters, their gradients, and both moments
    return 4 * Dtype.FP32.byte * weights


def find_largest_batch(
    model: str | ModelSpec,
    options: ModelOptions,
    capacity_byte: float,
) -> int:
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
        if byte <= capacity_byte:
            low = guess
        else:
            high = guess
        slope = max((byte - last_byte) / (guess - last), 1.0)
        last = guess
        last_byte = byte
        if tries % 3 == 0:
            guess = (low + high) // 2
        else:
            guess += int((capacity_byte - byte) // slope)
        guess = min(max(guess, low + 1), high - 1)
    return low
