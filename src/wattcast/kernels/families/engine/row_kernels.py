"""Small kernels of an engine, which work on rows: norms, gates, quantizing, routing, sampling.

Their dependent steps are the loads of a thread in each pass over a row; a load from device memory
takes twice as long as one from L2. ``row_costs.csv`` has what they cost, by names, grids, registers
and times of those that an H200 ran.
"""

from __future__ import annotations

from functools import cache
from math import ceil, log2
from typing import NamedTuple

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
    fill_slots,
)
from wattcast.kernels.kernel_table import SM_BLOCKS, WARP_THREADS
from wattcast.workload.engine_row_operators import (
    AlignTokens,
    CacheWrite,
    CompiledRows,
    EngineRmsNorm,
    EngineRotary,
    Route,
    RowKernel,
    Sampling,
)


class EngineRowCoefficients(Coefficients):
    """What small kernels cost that have no line in ``row_costs.csv``."""

    route_cycles: float  # of an SM for a score and a pick of the routing kernel
    sampling_steps: float  # to begin and end a pass over the logits
    split_sampling_steps: float  # of a pass that several blocks share
    top_p_steps: float  # further ones, to look for the likeliest tokens
    top_p_loop_steps: float  # of these, for each logit of a thread
    sort_steps: float  # further ones, to sort all words for top-p alone
    drawn_kept_byte: float  # of a logit, that L2 must keep until the next random draw
    busy_groups: float  # of a scale, below which a block is as slow as one of so many
    slots: float  # blocks that an SM holds of routing and sorting
    scale_values: float  # that share a scale
    route_scores: float  # that a block of the routing kernel takes
    sampling_threads: float  # of a block of a sampler
    split_logits: int  # from which several blocks share a row of logits
    few_choices: float  # of experts, below which one block sorts
    few_experts: int  # up to which one block sorts
    norm_rows: int  # from which norms take smaller blocks
    norm_threads: float  # of such a block
    draw_launches: float  # further kernels of a random draw
    tensor_scale_launches: float  # kernels that quantise with one scale
    sampler_slots: float  # blocks of a sampler that an SM holds


ENGINE_ROWS = load_coefficients("engine_rows", EngineRowCoefficients)

_REGISTERS = 65536.0  # of an SM
# Samplers that were measured in whole steps alone, and the one among the bursts that they are like;
# and quantising to fp4, which is a kind of that by block.
_MEASURED_LIKE = {
    "sorted": "top_p",
    "penalised": "random",
    "fp4": "block.fp4",
}


class _RowCost(NamedTuple):
    """A line of ``row_costs.csv``."""

    element_cycle: float  # of an SM; most where single values become fp8
    threads: float  # of a block at most
    values_each: float  # for which a block has a thread
    vector: float  # values that a thread takes at once
    registers: float  # of a thread
    passes: float  # over a row


class _Grid(NamedTuple):
    """How a kernel is cut into blocks."""

    units: float
    steps: float
    sm_cycles: float  # of all SMs together
    slots: float = ENGINE_ROWS.slots
    launches: float = 1.0


class _RowForm(NamedTuple):
    """What a small kernel does: its kind, its variant, and whether it adds a residual first."""

    kind: str
    detail: str
    adds_residual: bool

    @property
    def name(self) -> str:
        """Its name in ``row_costs.csv``."""
        return f"{self.kind} {self.detail}".strip()

    @property
    def measured_name(self) -> str:
        """The name of the kernel whose bursts tell its corrections and its energy."""
        detail = _MEASURED_LIKE.get(self.detail, self.detail)
        return f"{self.kind} {detail}".strip()

    @property
    def draws(self) -> bool:
        """Whether it draws tokens at random."""
        return self.kind == "sampling" and self.detail != "greedy"


def count_row_kernel(op: RowKernel, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of a small kernel, which has a block a token as a rule."""
    form = _describe_form(op)
    missing = run.missing_share(_working_set_byte(op, form))
    grid = _choose_grid(op, form, run.chip.sm_count, missing)
    byte = op.read_byte + op.write_byte
    work = EngineWork(
        units=grid.units,
        unit_flop=run.flop_per_cycle * grid.sm_cycles / grid.units,
        steps=grid.steps,
        launches=grid.launches,
        l2_byte=byte,
        shared_byte=2.0 * byte,
        dram_read_byte=op.read_byte * missing,
        dram_write_byte=op.write_byte * missing,
        slots=grid.slots,
    )
    plain = {
        "cold": run.is_cold,
        "residual": form.adds_residual,
        "byte_per_element": byte / max(op.elements, 1.0),
        "fill": fill_slots(grid.units, grid.slots * run.chip.sm_count),
    }
    logs = {
        "log_rows": op.rows,
        "log_dim": op.dim,
        "log_byte": byte,
        "log_n": op.elements,
    }
    root = "rmsnorm" if isinstance(op, EngineRmsNorm) else "elementwise"
    family = f"{root}.engine.rows.{form.measured_name.replace(' ', '.')}"
    return CountedKernel(family, work, plain, logs)


def _describe_form(op: RowKernel) -> _RowForm:
    """Return what a small kernel does."""
    kind = op.kind.removeprefix("engine_")
    if isinstance(op, CompiledRows):
        detail = "gate" if op.function.startswith("silu") else "norm"
        if op.function.endswith("quant"):
            detail += "_quant"
        return _RowForm(kind, detail, op.function.startswith("add"))
    if isinstance(op, CacheWrite):
        return _RowForm(kind, "fp8" if op.kv_dtype is Dtype.FP8 else "", False)
    detail = getattr(op, "quant", "") or getattr(op, "mode", "")
    return _RowForm(kind, detail, bool(getattr(op, "residual", False)))


def _working_set_byte(op: RowKernel, form: _RowForm) -> float:
    """Return the bytes that must stay in L2 for the next run of a kernel to find them there."""
    if isinstance(op, EngineRotary) or form.adds_residual:
        return op.read_byte  # results replace the operands
    if isinstance(op, Sampling):
        # The likeliest word is looked for in the logits and a copy of them that all passes read
        return op.elements * ENGINE_ROWS.drawn_kept_byte if form.draws else op.read_byte
    return op.read_byte + op.write_byte


def _choose_grid(
    op: RowKernel,
    form: _RowForm,
    sm_count: float,
    missing: float,
) -> _Grid:
    if isinstance(op, Sampling):
        return _sample_logits(op, form)
    if isinstance(op, Route):
        return _route_tokens(op)
    if isinstance(op, AlignTokens):
        return _align_tokens(op)
    return _walk_rows(op, form, sm_count, missing)


def _sample_logits(op: Sampling, form: _RowForm) -> _Grid:
    """Return the grid of a sampler.

    512 threads find the maximum of a row, of 2^17 logits and more in several blocks. Softmax is
    then one block's, and one of 128 threads looks for the likeliest.
    """
    loops = op.dim / ENGINE_ROWS.sampling_threads
    is_split = op.dim >= ENGINE_ROWS.split_logits
    has_top_p = form.detail in ("top_p", "sorted")
    pass_steps = ENGINE_ROWS.sampling_steps + loops

    steps = ENGINE_ROWS.split_sampling_steps if is_split else pass_steps
    if form.draws:
        steps += pass_steps
    if has_top_p:
        steps += ENGINE_ROWS.top_p_steps + ENGINE_ROWS.top_p_loop_steps * loops
    launches = 2.0 + is_split + ENGINE_ROWS.draw_launches * form.draws + has_top_p
    if form.detail == "sorted":
        steps += ENGINE_ROWS.sort_steps
    return _Grid(
        float(op.rows),
        steps,
        0.0,
        slots=ENGINE_ROWS.sampler_slots,
        launches=launches,
    )


def _route_tokens(op: Route) -> _Grid:
    """Return the grid of routing: for each pick the threads of a token find their maximum."""
    is_power_of_two = not op.experts & (op.experts - 1)
    if op.mode == "grouped":
        pick_steps = 1.0
    elif is_power_of_two:
        pick_steps = 0.5 * log2(op.experts)
    else:
        pick_steps = log2(op.experts)
    return _Grid(
        units=max(op.rows * op.experts / ENGINE_ROWS.route_scores, 1.0),
        steps=op.top_k * pick_steps,
        sm_cycles=ENGINE_ROWS.route_cycles * op.top_k * op.elements,
        launches=2.0 - is_power_of_two,
    )


def _align_tokens(op: AlignTokens) -> _Grid:
    """Return the grid of sorting choices by expert: one block sorts, another writes what it
    found.
    """
    is_small = op.elements < ENGINE_ROWS.few_choices and op.experts <= ENGINE_ROWS.few_experts
    if is_small:
        return _Grid(1.0, op.elements / max(op.experts, WARP_THREADS), 0.0)
    return _Grid(2.0, op.elements / ENGINE_ROWS.few_choices, 0.0, launches=2.0)


def _walk_rows(
    op: RowKernel,
    form: _RowForm,
    sm_count: float,
    missing: float,
) -> _Grid:
    """Return the grid of a kernel whose threads walk over rows, by its line of
    ``row_costs.csv``.
    """
    cost = _row_costs()[form.name]
    units = float(op.rows)
    most_threads = cost.threads
    if form.detail in ("block", "fp4", "gate", "gate_quant"):
        units = max(op.elements / (cost.threads * cost.vector), 1.0)
    elif form.kind == "rms_norm" and form.detail != "token" and op.rows >= ENGINE_ROWS.norm_rows:
        most_threads = ENGINE_ROWS.norm_threads
    row_elements = op.elements / units
    threads = min(ceil(row_elements / cost.values_each), most_threads)
    loops = ceil(row_elements / (threads * cost.vector))

    # Idle threads count as well, on the busiest SM.
    busiest_share = ceil(units / sm_count) / max(units / sm_count, 1.0)
    padded = loops * threads * cost.vector * units * busiest_share
    if form.name == "quantize block":
        padded *= _group_crowding(op)
    loads = 1.0 + loops * (1.0 + form.adds_residual)
    return _Grid(
        units,
        steps=cost.passes * loads * (1.0 + missing),
        sm_cycles=cost.element_cycle * padded,
        slots=min(_REGISTERS // (cost.registers * threads), SM_BLOCKS),
        launches=ENGINE_ROWS.tensor_scale_launches if form.detail == "tensor" else 1.0,
    )


def _group_crowding(op: RowKernel) -> float:
    """Return how much slower blocks of few groups are: they take as many as divide all groups."""
    groups = max(int(op.elements / ENGINE_ROWS.scale_values), 1)
    groups_of_block = groups & -groups
    return max(ENGINE_ROWS.busy_groups / groups_of_block, 1.0)


@cache
def _row_costs() -> dict[str, _RowCost]:
    """Read what small kernels cost, by name."""
    rows = read_shipped_table("wattcast.kernels.families.engine", "row_costs.csv")
    return {
        row["kernel"]: _RowCost(*(float(row[name]) for name in _RowCost._fields)) for row in rows
    }


register_kernels(
    *RowKernel.__subclasses__(), mapping=count_each(count_row_kernel, tensor_cores=False)
)
