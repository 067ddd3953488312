"""Programs that kernels may run on designs, and their traffic by the capacity of L2.

The base's library is asked what it would run on chips with more or fewer SMs; products may have
larger tiles too. Traffic that follows the capacity of L2 is lowered at capacities from a 64th of
the base's to 1024 times it. It never grows with the capacity, and once L2 holds the whole run,
weights included, device memory gives nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    Sweepable,
    map_distinct,
)
from wattcast.explore.design_coefficients import DESIGNS
from wattcast.hardware import Gpu
from wattcast.kernels import (
    Kernels,
    ReferenceChip,
    lower_graph,
)
from wattcast.kernels.kernel_table import (
    KernelWork,
    join_work,
    resident_share,
)
from wattcast.kernels.lowering import compute_work
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.kernel_phases import find_scale
from wattcast.predictor.pipeline import find_padding_factor
from wattcast.workload.graph import Graph

RowIndex = npt.NDArray[np.intp]

# SMs over the base's, at which the base's library is asked for its programs
_SM_RATIOS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0, 8.0)
_L2_RATIOS = tuple(2.0 ** (step / 2.0) for step in range(-12, 21))
# Columns of the work that follow the capacity of L2, none of which grows with it
_L2_COLUMNS = ("steps", "dram_read_byte", "dram_write_byte", "between_dram_byte")
_SAME = 1e-3  # relative difference up to which two programs count as one


@dataclass(frozen=True)
class DesignAxes:
    """What a design has over the base, each a number or ``(*sweep, 1)``, and what of it varies.

    ``l2_byte`` is a capacity; the others are ratios. ``weight_sparsity`` is 1 for dense weights and
    2 for two of four; ``die_link_s_per_byte`` the seconds that a byte of L2's loads takes between
    dies, on average over all bytes.
    """

    sm_count: Sweepable
    l2_byte: Sweepable | None = None  # None: as the base
    l2_port: Sweepable = 1.0  # rate of L2, an SM
    registers: Sweepable = 1.0
    threads: Sweepable = 1.0
    shared: Sweepable = 1.0
    shared_rate: Sweepable = 1.0
    integer_rate: Sweepable = 1.0
    weight_sparsity: Sweepable = 1.0
    die_link_s_per_byte: Sweepable = 0.0
    dies: Sweepable = 1.0


@dataclass(frozen=True)
class DesignKernels:
    """The programs of a workload's kernels, and how their work follows a design."""

    graph: Graph
    gpu: Gpu  # the base
    bundle: Bundle
    kernels: Kernels  # the base's own programs, (kernel,)
    padding: Array | None  # factor on the time of products with rows to spare, (kernel,)
    row_of: RowIndex  # kernel of each program; the first programs are the base's own
    work: KernelWork  # columns (program,)
    growth: Array  # (program,) area of its tiles over the base's
    handicap: Array  # (program,)
    shared_share: Array  # (program,) of its shared-memory traffic that the base's times allow
    capacity_byte: Array  # (node,) of L2
    # by column, what is added to a program's at each capacity, (node, kernel)
    l2_tables: Mapping[str, Array]
    cold_s: Array | None  # (node, kernel) extra seconds inside a model

    @property
    def groups(self) -> list[RowIndex]:
        """The programs of each kernel that has several, the base's own first."""
        kernel_count = len(self.kernels.ops)
        kernels = np.unique(self.row_of[kernel_count:]).tolist()
        return [np.flatnonzero(self.row_of == kernel) for kernel in kernels]


def lower_programs(
    graph: Graph,
    gpu: Gpu,
    bundle: Bundle,
    *,
    programs: bool,
    capacities: bool,
) -> DesignKernels:
    """Lower a workload to the programs of designs around ``gpu``, without handicaps.

    ``programs``: kernels may run other programs than the base's; ``capacities``: that of L2 varies.
    """
    reference = bundle.reference
    kernels = lower_graph(graph, gpu, reference)
    scale = find_scale(kernels, bundle.corrections, bundle.learned)
    padding = find_padding_factor(kernels, gpu, bundle, scale.time)
    row_of, work, growth = _base_programs(kernels)
    if programs:
        row_of, work, growth = _list_programs(kernels, reference)
    nodes = np.array([reference.l2_byte])
    tables: dict[str, Array] = {}
    cold_s = None
    if capacities:
        nodes = reference.l2_byte * np.array(_L2_RATIOS)
        tables, cold_s = _tabulate_capacities(graph, kernels, bundle, nodes)
    elif bundle.cold is not None and not graph.operands:
        cold_s = bundle.cold.extra_s(kernels, reference.l2_byte)[np.newaxis]
    ones = np.ones(len(row_of))
    return DesignKernels(
        graph,
        gpu,
        bundle,
        kernels,
        padding,
        row_of,
        work,
        growth,
        ones,
        ones,
        nodes,
        tables,
        cold_s,
    )


def _base_programs(kernels: Kernels) -> tuple[RowIndex, KernelWork, Array]:
    count = len(kernels.ops)
    return np.arange(count), kernels.work, np.ones(count)


def _list_programs(
    kernels: Kernels, reference: ReferenceChip
) -> tuple[RowIndex, KernelWork, Array]:
    """List the programs that kernels may run: the base's own first, then those that differ."""
    own_rows, own_work, own_growth = _base_programs(kernels)
    rows = [own_rows]
    works = [own_work]
    growths = [own_growth]
    seen = [_describe_programs(own_work)]
    for ratio in _SM_RATIOS:
        sm_count = max(round(ratio * reference.sm_count), 1)
        for choice in (reference.choice, None):
            chip = replace(reference, sm_count=float(sm_count), choice=choice)
            work = compute_work(kernels.ops, kernels.conditions, kernels.pipe_event, chip)
            traits = _describe_programs(work)
            is_new = np.ones(len(own_rows), dtype=bool)
            for earlier in seen:
                is_new &= (np.abs(traits - earlier) > _SAME * np.abs(earlier)).any(axis=0)
            seen.append(traits)
            new_rows = np.flatnonzero(is_new)
            if new_rows.size:
                rows.append(new_rows)
                works.append(work.select_rows(new_rows))
                growths.append(np.ones(new_rows.size))
    grown_rows = np.flatnonzero(_has_tiles(kernels) & (own_work.units > 1.0))
    growth = 2.0
    while grown_rows.size and growth <= DESIGNS.most_growth:
        rows.append(grown_rows)
        works.append(_grow_tiles(own_work.select_rows(grown_rows), growth))
        growths.append(np.full(grown_rows.size, growth))
        growth *= 2.0
    return np.concatenate(rows), join_work(works), np.concatenate(growths)


def _describe_programs(work: KernelWork) -> Array:
    """Return what tells two programs apart, ``(trait, kernel)``."""
    return np.array([work.units, work.unit_flop, work.steps, work.l2_byte, work.between_byte])


def _has_tiles(kernels: Kernels) -> Mask:
    """Tell which kernels are products whose tiles registers and shared memory bound."""
    is_product = map_distinct("gemm".__eq__, kernels.family)
    return np.asarray(is_product & on_tensor_cores(kernels))


def on_tensor_cores(kernels: Kernels) -> Mask:
    """Tell which kernels run on tensor cores, ``(kernel,)``."""
    is_tensor = map_distinct(lambda event: event.startswith("tensor"), kernels.pipe_event)
    return np.asarray(is_tensor, dtype=bool)


def _grow_tiles(work: KernelWork, growth: float) -> KernelWork:
    """Return the work of tiles ``growth`` times as large: fewer, and each side loads less often."""
    units = np.ceil(work.units / growth)
    return replace(
        work,
        units=units,
        unit_flop=work.unit_flop * (work.units / units),
        l2_byte=work.l2_byte / np.sqrt(growth),
        shared_byte=work.shared_byte / np.sqrt(growth),
    )


def _tabulate_capacities(
    graph: Graph,
    kernels: Kernels,
    bundle: Bundle,
    nodes: Array,
) -> tuple[dict[str, Array], Array | None]:
    """Return what columns of the work gain or lose at each capacity of L2, ``(node, kernel)``, and
    the extra seconds inside a model.
    """
    reference = bundle.reference
    works = []
    cold = []
    takes_cold = bundle.cold is not None and not graph.operands
    for capacity_byte in nodes.tolist():
        chip = replace(reference, l2_byte=capacity_byte)
        work = compute_work(kernels.ops, kernels.conditions, kernels.pipe_event, chip)
        works.append(work)
        if takes_cold:
            assert bundle.cold is not None
            cold.append(bundle.cold.extra_s(replace(kernels, work=work), capacity_byte))
    base = int(np.argmin(np.abs(np.log(nodes / reference.l2_byte))))
    tables = {}
    for name in _L2_COLUMNS:
        kernel_values = getattr(kernels.work, name)
        column = np.array([getattr(work, name) for work in works])
        column[base] = kernel_values
        column = _never_rising(column, base)
        if name != "steps":
            column *= _share_outside(graph, kernels, nodes, reference.l2_byte)[:, np.newaxis]
        if (column != kernel_values).any():
            tables[name] = column - kernel_values
    if not takes_cold:
        return tables, None
    cold_table = _never_rising(np.array(cold), base)
    return tables, cold_table


def _never_rising(column: Array, base: int) -> Array:
    """Return a table over rising capacities that never rises, with the base's own row unchanged."""
    above = np.minimum.accumulate(column[base:], axis=0)
    below = np.maximum.accumulate(column[base::-1], axis=0)[::-1]
    return np.concatenate([below[:-1], above])


def _share_outside(
    graph: Graph,
    kernels: Kernels,
    nodes: Array,
    base_byte: float,
) -> Array:
    """Return the share of traffic that device memory still sees where L2 keeps data from one run to
    the next, ``(node,)``; 1 at the base.
    """
    work = kernels.work
    run_byte = graph.memory_byte
    if run_byte is None:
        run_byte = float(kernels.calls @ (work.dram_read_byte + work.dram_write_byte))
    base_share = float(resident_share(run_byte, base_byte))
    if base_share >= 1.0:
        return np.ones(len(nodes))
    shares = [float(resident_share(run_byte, node)) for node in nodes.tolist()]
    gained = np.maximum(np.array(shares) - base_share, 0.0)
    return np.asarray(1.0 - gained / (1.0 - base_share))
