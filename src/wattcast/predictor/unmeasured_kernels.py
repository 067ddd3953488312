"""Find the kernels of a workload that lie outside what was measured, and say why each does."""

from __future__ import annotations

from collections.abc import (
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import split_rows
from wattcast.core.units import show_plain
from wattcast.kernels.kernel_table import (
    Kernels,
    group_forms,
    root_family,
)
from wattcast.predictor.bundle.bundle_file import Bundle, MeasuredRange
from wattcast.predictor.bundle.support_widening import OutsideReason, learned_distances
from wattcast.predictor.timeline import Timeline
from wattcast.workload.operator_base import (
    Operator,
    OperatorColumns,
    RowIndex,
    select_operators,
)


class SupportCoefficients(Coefficients):
    """When a prediction counts as measured, near or far."""

    near_share: float  # of time or energy beyond what was measured, to be called near
    far_share: float  # of time or energy far beyond it, to be called far
    clock_margin: float  # octaves of a clock or a limit that are as good as measured
    binding_share: float  # of the power that is held, above which a limit binds
    size_margin: float  # octaves of a size that are as good as measured
    many_forms: int  # that ran as one kind of kernel, to speak for one that was not measured


SUPPORT = load_coefficients("support", SupportCoefficients)


@dataclass(frozen=True)
class UnmeasuredKernel:
    """A kernel outside what was measured: the reason, a sentence for people, and whether it is far
    outside.
    """

    reason: OutsideReason
    description: str
    far: bool = True


UnmeasuredKernels = Mapping[int, UnmeasuredKernel]  # by row; others are inside


def find_unmeasured(timeline: Timeline, bundle: Bundle) -> dict[int, UnmeasuredKernel]:
    """Find the kernels outside what was measured, by row."""
    kernels = timeline.kernels
    outside: dict[int, UnmeasuredKernel] = {}
    # Kernels of kinds that were measured, whose sizes are to be compared, by the family whose
    # corrections are learned together
    rows_to_size: dict[str, list[RowIndex]] = {}
    for group, rows in _list_alike(kernels):
        op = kernels.ops[int(rows[0])]
        learner = root_family(group)
        lacks_held_out = op.family in bundle.residuals and not bundle.residuals[op.family].rows
        if lacks_held_out and op.family == "collective":
            continue  # the interval of a collective comes from public timings
        if not lacks_held_out and learner not in bundle.seen:
            continue  # the bundle does not say what was measured of this family
        judged: tuple[OutsideReason, str] | None
        if lacks_held_out:
            judged = (OutsideReason.KIND, f"no held-out rows for {op.family}")
        else:
            judged = _judge_kind(op, group, bundle.seen[learner])
        if judged is None:
            rows_to_size.setdefault(learner, []).append(rows)
            continue
        reason, sentence = judged
        is_far = reason is not OutsideReason.FORM
        for row, name in zip(rows.tolist(), _describe_rows(kernels, rows), strict=True):
            description = sentence if lacks_held_out else f"{name}: {sentence}"
            outside[row] = UnmeasuredKernel(reason, description, is_far)

    near_octaves = learned_distances().conditions["size"].near
    for learner, row_parts in rows_to_size.items():
        sizes = _find_sizes_outside(kernels, bundle.seen[learner], np.concatenate(row_parts))
        names = _describe_rows(kernels, np.array([size.row for size in sizes], np.intp))
        for name, size in zip(names, sizes, strict=True):
            description = f"{name}: {size.description}"
            is_far = size.octaves > near_octaves
            outside[size.row] = UnmeasuredKernel(OutsideReason.SIZE, description, is_far)
    return outside


def _list_alike(kernels: Kernels) -> Iterator[tuple[str, RowIndex]]:
    """Yield the kinds of kernels and, for each form of operator that ran as one, its rows."""
    groups = kernels.work.kernel_family
    form = np.empty(len(kernels.ops), np.intp)
    for number, rows in enumerate(group_forms(kernels.ops)):
        form[rows] = number
    codes, place = np.unique(form * len(groups.values) + groups.place, return_inverse=True)
    for code, rows in zip(codes.tolist(), split_rows(place, len(codes)), strict=True):
        yield groups.values[code % len(groups.values)], rows


def _judge_kind(
    op: Operator,
    group: str,
    seen: MeasuredRange,
) -> tuple[OutsideReason, str] | None:
    """Say why an operator that runs as a kind of kernel was not measured; None where it was."""
    if op.dtype not in seen.dtypes:
        formats = ", ".join(seen.dtypes)
        sentence = f"{op.family} was measured in {formats}, not in {op.dtype}"
        return OutsideReason.DTYPE, sentence
    if group not in seen.groups:
        return OutsideReason.KIND, f"no kernel of the kind {group} was measured"
    if seen.forms is None or op.form in seen.every_form:
        return None  # older bundles list no forms
    # Where many forms ran as one kernel, as plain functions of an element do, another is much like
    # them. Where few did, as in reductions, different code may share the name of a kernel.
    measured = seen.forms.get(group, ())
    reason = OutsideReason.FORM if len(measured) >= SUPPORT.many_forms else OutsideReason.KIND
    few = ", ".join(measured[:3]) or "others"
    if len(measured) > 3:
        few += f" and {len(measured) - 3} more"
    return reason, f"{op.form} was never measured, only {few} that run as {group}"


def _describe_rows(kernels: Kernels, rows: RowIndex) -> Sequence[str]:
    ops = select_operators(kernels.ops, rows)
    if isinstance(ops, OperatorColumns):
        return ops.describe()
    return [str(op) for op in ops]


@dataclass(frozen=True)
class _SizeOutside:
    """The size of a kernel that is furthest beyond those measured."""

    row: int
    octaves: float
    description: str


def _find_sizes_outside(
    kernels: Kernels,
    seen: MeasuredRange,
    rows: RowIndex,
) -> list[_SizeOutside]:
    """Find the kernels with a size beyond those measured."""
    features = kernels.work.features
    every_name, every_low, every_high = seen.bounds
    places = [i for i, name in enumerate(every_name) if name in features]
    if not places:
        return []
    names = [every_name[i] for i in places]
    low = every_low[places]
    high = every_high[places]

    values = np.array([features[name] for name in names]).take(rows, axis=1)
    octaves = np.maximum(low - values, values - high)
    is_outside = octaves.max(axis=0) > SUPPORT.size_margin
    columns = np.flatnonzero(is_outside)
    furthest = octaves[:, columns].argmax(axis=0)

    outside = []
    for column, size in zip(columns.tolist(), furthest.tolist(), strict=True):
        description = _describe_size(names[size], values[size, column], seen)
        row = int(rows[column])
        outside.append(_SizeOutside(row, float(octaves[size, column]), description))
    return outside


def _describe_size(
    name: str,
    log_size: float,
    seen: MeasuredRange,
) -> str:
    """Say how large a size is, of which the log to base 2 is given, and what was measured."""
    least, most = seen.sizes[name]
    size = show_plain(2.0**log_size, 3)
    measured = f"measured from {show_plain(2**least, 3)} to {show_plain(2**most, 3)}"
    return f"{name.removeprefix('log_')} of {size}, {measured}"
