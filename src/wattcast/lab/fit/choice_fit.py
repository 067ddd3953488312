"""Fit the choice of kernels to the kernel names in a database: a conditional logit per class of
products.

Maximum likelihood with ridge [McFadden1974; Hastie2009, 4.4]: weak on the terms that all candidates
share, firm on each candidate's own coefficients of the shape, since most candidates were seen a few
times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.calibrate.kernel_rows import KernelRows
from wattcast.calibrate.latency_fit import pack_trees
from wattcast.core.arrays import Array
from wattcast.kernels import (
    ReferenceChip,
    kernel_choice,
    kernel_labels,
)
from wattcast.kernels.families.convolution_shapes import (
    CONVOLUTION_CHOICE_COLUMNS as CONVOLUTION_COLUMNS,
)
from wattcast.kernels.families.product_shapes import PRODUCT_CHOICE_COLUMNS as PRODUCT_COLUMNS
from wattcast.kernels.kernel_choice import (
    Candidates,
    KernelChooser,
    TreeVotes,
)
from wattcast.kernels.kernel_labels import KernelLabel
from wattcast.kernels.lowering import kernel_choice_inputs
from wattcast.workload.operator_base import Operator

_SHARED_RIDGE = 0.02
_OWN_RIDGE = 1.0
_STEPS = 80
_SPLIT_BLOCKS = 1.9  # blocks a tile, from which K was split; padding of the grid stays below
LEAST_CHOICE_ROWS = 8  # of a class, to choose at all
_STRAYS = 0.02
# classes for which trees vote: cuDNN's rules have many corners
VOTED_CLASSES = (
    "conv2d-half",
    "conv2d-tf32",
    "conv2d-fp32",
)
_TREES = 40


def fit_kernel_choice(rows: KernelRows, reference: ReferenceChip) -> dict[str, KernelChooser]:
    """Fit a chooser for each class of products with enough named rows; each operator counts
    once.
    """
    products = _collect_products(rows)
    choosers = {}
    for name, members in products.members.items():
        if len(members) < LEAST_CHOICE_ROWS:
            continue
        chosen = _leave_out_strays(np.array(members), products.labels)
        ran = [label for place in chosen if (label := products.labels[place]) is not None]
        columns = CONVOLUTION_COLUMNS if name.startswith("conv2d") else PRODUCT_COLUMNS
        table = np.stack([products.shape[column][chosen] for column in columns], axis=-1)
        sizes = tuple(size[chosen] for size in products.sizes)
        chooser = _fit_chooser(
            ran,
            sizes,
            table,
            columns,
            reference.sm_count,
        )
        if name in VOTED_CLASSES:
            chooser = replace(chooser, votes=_grow_votes(chooser, ran, table))
        choosers[name] = chooser
    return choosers


@dataclass(frozen=True)
class _NamedProducts:
    """The products of a database whose kernels are named, each operator once."""

    members: Mapping[str, Sequence[int]]  # places of each class whose kernel is known
    labels: Sequence[KernelLabel | None]  # of each product
    sizes: tuple[Array, ...]
    shape: Mapping[str, Array]


def _collect_products(rows: KernelRows) -> _NamedProducts:
    """Collect the products with a kernel name, the first row of each operator."""
    first: dict[tuple[str, Operator], int] = {}
    for place, key in enumerate(zip(rows.spec, rows.ops, strict=True)):
        first.setdefault(key, place)
    is_named = np.zeros(len(rows), dtype=bool)
    for place in first.values():
        is_named[place] = bool(rows.names[place])
    named = rows.select_rows(is_named)
    classes, sizes, shape = kernel_choice_inputs(named.ops, named.conditions)
    labels = find_labels_run(named)
    members: dict[str, list[int]] = {}
    for place, name in enumerate(classes):
        if name:
            places = members.setdefault(name, [])
            if labels[place] is not None:
                places.append(place)
    return _NamedProducts(members, labels, tuple(sizes), shape)


def _leave_out_strays(
    at: npt.NDArray[np.int64], labels: Sequence[KernelLabel | None]
) -> npt.NDArray[np.int64]:
    """Return the rows of Hopper's kernels where nearly all are.

    One stray would make its kernel a candidate for all, at a guess."""
    kinds = [label.kind for i in at if (label := labels[i]) is not None]
    hopper = np.array(kinds) == "hopper"
    return at[hopper] if hopper.mean() > 1.0 - _STRAYS else at


def find_labels_run(rows: KernelRows) -> list[KernelLabel | None]:
    """Find the kernel that ran in each row; None where nothing is chosen or no name is known.

    More blocks than tiles mean that K was split, whatever the name says.
    """
    kernels = _find_kernels_run(rows)
    return [label and label._replace(split=label.split or parts > 1) for label, parts in kernels]


def count_k_parts(rows: KernelRows) -> list[int]:
    """Count the parts of K of the kernel that ran, by its grid; 0 where nothing is known."""
    return [parts for _, parts in _find_kernels_run(rows)]


def _find_kernels_run(rows: KernelRows) -> list[tuple[KernelLabel | None, int]]:
    """Return the kernel of each row and its blocks per tile; 0 for Hopper's, whose blocks walk over
    tiles.
    """
    classes, (batch, m, n, _), _ = kernel_choice_inputs(rows.ops, rows.conditions)
    kernels_run = []
    for place, names in enumerate(rows.names):
        label = kernel_labels.find_label(names) if classes[place] and names else None
        parts = 0
        blocks = _find_product_blocks(label, names, rows.blocks[place])
        if label is not None and blocks is not None:
            tiles_n = np.ceil(n[place] / label.tile_n)
            tiles_m = np.ceil(m[place] / label.tile_m)
            blocks_per_tile = blocks / (batch[place] * tiles_n * tiles_m)
            is_split = blocks_per_tile >= _SPLIT_BLOCKS
            parts = round(float(blocks_per_tile)) if is_split else 1
        kernels_run.append((label, parts))
    return kernels_run


def _find_product_blocks(
    label: KernelLabel | None,
    names: Sequence[str],
    blocks: Sequence[int],
) -> int | None:
    """Return the blocks of the kernel that computes the product; None where it has no tiles of its
    own or its grid is not known.
    """
    if label is None or label.kind in ("hopper", "vector"):
        return None
    place = kernel_labels.find_product_kernel(names)
    if place is None or place >= len(blocks):
        return None
    return blocks[place]


def choose_labels(rows: KernelRows, reference: ReferenceChip) -> list[KernelLabel | None]:
    """Choose the kernel of each row by the fitted choice; None where it chooses nothing."""
    classes, sizes, shape = kernel_choice_inputs(rows.ops, rows.conditions)
    b, m, n, k = sizes
    choosable = [i for i, name in enumerate(classes) if name in (reference.choice or {})]
    labels: list[KernelLabel | None] = [None] * len(rows)
    if choosable:
        at = np.array(choosable)
        picks = kernel_choice.pick_kernels(
            reference.choice,
            [classes[i] for i in choosable],
            [kernel_labels.NOT_RUN] * len(choosable),
            (b[at], m[at], n[at], k[at]),
            {name: values[at] for name, values in shape.items()},
            list,
            reference.sm_count,
        )
        for row, i in enumerate(choosable):
            labels[i] = picks.label(row)
    return labels


def _fit_chooser(
    ran: Sequence[KernelLabel],
    sizes: tuple[Array, ...],
    table: Array,
    names: tuple[str, ...],
    sms: float,
) -> KernelChooser:
    from scipy.optimize import minimize

    labels = sorted(set(ran))
    target = np.array([labels.index(label) for label in ran])
    candidates = Candidates(
        np.array([label.kind for label in labels]),
        np.array([float(label[1]) for label in labels]),
        np.array([float(label[2]) for label in labels]),
        np.array([label.split for label in labels]),
    )
    b, m, n, k = sizes
    by_term = kernel_choice.candidate_terms((b, m, n, k), candidates, sms)
    terms = np.moveaxis(by_term, 0, -1)
    scale = np.maximum(terms.reshape(-1, terms.shape[-1]).std(axis=0), 1e-9)
    mean = table.mean(axis=0)
    spread = np.where(table.std(axis=0) > 1e-9, table.std(axis=0), 1.0)
    shape = np.column_stack([np.ones(len(table)), (table - mean) / spread])
    width = terms.shape[-1]
    barred = kernel_choice.impossible_candidates(candidates.kind, m, table, names)
    barred[np.arange(len(target)), target] = False  # unless one of them ran
    solution = minimize(
        _compute_misfit,
        np.zeros(width + len(labels) * shape.shape[1]),
        args=(np.ascontiguousarray(terms / scale), shape, target, np.where(barred, _NEVER, 0.0)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _STEPS},
    ).x
    return KernelChooser(
        candidates.kind,
        candidates.tile_n,
        candidates.tile_m,
        candidates.split,
        solution[:width] / scale,
        solution[width:].reshape(len(labels), -1),
        names,
        mean,
        spread,
    )


def _grow_votes(
    chooser: KernelChooser,
    ran: Sequence[KernelLabel],
    table: Array,
) -> TreeVotes | None:
    """Grow trees that tell apart the kernels that ran; None where most kernels ran only once."""
    from sklearn.ensemble import ExtraTreesClassifier

    if 2 * len(set(ran)) > len(ran):
        return None
    kinds = zip(
        chooser.kind,
        chooser.tile_n,
        chooser.tile_m,
        chooser.split,
        strict=True,
    )
    place = {
        KernelLabel(str(k), int(n), int(m), bool(split)): i
        for i, (k, n, m, split) in enumerate(kinds)
    }
    model = ExtraTreesClassifier(_TREES, random_state=0).fit(table, [place[label] for label in ran])
    grown = []
    for tree in (estimator.tree_ for estimator in model.estimators_):
        inner = tree.feature, tree.threshold, tree.children_left, tree.children_right
        grown.append(
            (tree.children_left < 0, *inner, model.classes_[tree.value[:, 0].argmax(axis=1)])
        )
    feature, threshold, lower, upper, candidate = pack_trees(grown)
    return TreeVotes(
        feature,
        threshold,
        lower,
        upper,
        candidate.astype(np.int32),
    )


_NEVER = 50.0  # penalty on the score of an impossible candidate, in logs


def _compute_misfit(
    value: Array,
    terms: Array,
    shape: Array,
    target: npt.NDArray[np.int64],
    barred: Array,
) -> tuple[float, Array]:
    """Return the negative log-likelihood with ridge, and its gradient."""
    rows, count, width = terms.shape
    weight = value[:width]
    own_weights = value[width:].reshape(count, -1)
    flat = terms.reshape(-1, width)
    score = (flat @ weight).reshape(rows, count) + shape @ own_weights.T - barred
    score -= score.max(axis=1, keepdims=True)
    share = np.exp(score)
    share /= share.sum(axis=1, keepdims=True)
    picked = share[np.arange(rows), target]
    cost = -np.log(np.maximum(picked, 1e-300)).sum()
    cost += 0.5 * _SHARED_RIDGE * weight @ weight + 0.5 * _OWN_RIDGE * (own_weights**2).sum()
    share[np.arange(rows), target] -= 1.0
    slope = np.concatenate(
        [
            share.ravel() @ flat + _SHARED_RIDGE * weight,
            (share.T @ shape + _OWN_RIDGE * own_weights).ravel(),
        ]
    )
    return float(cost), slope
