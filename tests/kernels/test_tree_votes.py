"""Trees that vote beside the kernel choice, and what no library takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.calibrate.kernel_rows import KernelRows, load_kernel_rows
from wattcast.core.errors import WattcastError
from wattcast.core.tree_ensemble import TreeWalk
from wattcast.hardware import load_gpu
from wattcast.kernels import ReferenceChip, reference_chip
from wattcast.kernels.kernel_choice import (
    TreeVotes,
    choice_from_arrays,
    choice_to_arrays,
    impossible_candidates,
)
from wattcast.lab.fit.choice_fit import choose_labels, find_labels_run, fit_kernel_choice
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.operator_types import Conv2d, Linear

GPU = load_gpu("h200")


@pytest.fixture(scope="module")
def database() -> KernelRows:
    rows = load_kernel_rows("h200")
    return rows.select_rows(rows.is_kind("burst"))


@pytest.fixture(scope="module")
def convolutions(database: KernelRows) -> KernelRows:
    half = [isinstance(op, Conv2d) and op.dtype.byte == 2 and op.groups == 1 for op in database.ops]
    return database.select_rows(np.array(half))


@pytest.fixture(scope="module")
def reference(convolutions: KernelRows) -> ReferenceChip:
    plain = reference_chip(GPU)
    return replace(
        plain,
        choice=fit_kernel_choice(
            convolutions.select_rows(np.arange(len(convolutions)) % 2 == 0), plain
        ),
    )


def test_trees_vote_for_the_leaf_a_row_falls_into() -> None:
    # column 0 <= 1 ? candidate 2 : (column 1 <= 5 ? candidate 0 : candidate 1); the second tree
    # always says 1
    votes = TreeVotes(
        feature=np.array([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], np.int32),
        threshold=np.array([[1.0, 0.0, 5.0, 0.0, 0.0], [0.0] * 5]),
        left=np.array([[1, 1, 3, 3, 4], [0, 1, 2, 3, 4]], np.int32),
        right=np.array([[2, 1, 4, 3, 4], [0, 1, 2, 3, 4]], np.int32),
        candidate=np.array([[0, 2, 0, 0, 1], [1, 0, 0, 0, 0]], np.int32),
    )
    share = votes.share(np.array([[0.0, 9.0], [2.0, 5.0], [2.0, 6.0]]), 3)
    assert_allclose(share, [[0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])


def test_trees_that_end_early_are_left_behind_where_they_ended() -> None:
    """The trees that ship end after three to 25 questions; all rows walked to the end vote the
    same.
    """
    reference = bundle_for(GPU).reference
    votes = reference.choice["conv2d-half"].votes
    columns = np.random.default_rng(3).normal(4.0, 4.0, size=(50, int(votes.feature.max()) + 1))
    walk = TreeWalk.from_arrays(votes.feature, votes.threshold, votes.left, votes.right)
    vote = votes.candidate.ravel()[walk.leaves(columns)]
    count = int(votes.candidate.max()) + 1
    assert walk.depth > 12
    assert_allclose(
        votes.share(columns, count), (vote[..., np.newaxis] == np.arange(count)).mean(axis=1)
    )


def test_votes_find_more_kernels_of_shapes_not_seen(
    convolutions: KernelRows, reference: ReferenceChip
) -> None:
    """Half of the convolutions fit, the other half test."""
    test = convolutions.select_rows(np.arange(len(convolutions)) % 2 == 1)
    ran = find_labels_run(test)
    alone = {
        name: replace(chooser, votes=None) for name, chooser in (reference.choice or {}).items()
    }

    def right(of: ReferenceChip) -> float:
        took = choose_labels(test, of)
        return float(
            np.mean(
                [a == b for a, b in zip(ran, took, strict=True) if a is not None and b is not None]
            )
        )

    assert right(reference) > right(replace(reference, choice=alone)) > 0.3


def test_votes_survive_being_saved(convolutions: KernelRows, reference: ReferenceChip) -> None:
    arrays = choice_to_arrays(reference.choice or {}, "choice")
    back = replace(reference, choice=choice_from_arrays(arrays, "choice"))
    assert choose_labels(convolutions, back) == choose_labels(convolutions, reference)
    older = {name: values for name, values in arrays.items() if ".votes." not in name}
    assert all(chooser.votes is None for chooser in choice_from_arrays(older, "choice").values())


def test_votes_for_what_does_not_exist_are_refused(reference: ReferenceChip) -> None:
    arrays = choice_to_arrays(reference.choice or {}, "choice")
    arrays["choice.conv2d-half.votes.candidate"] = (
        arrays["choice.conv2d-half.votes.candidate"] + 1000
    )
    with pytest.raises(WattcastError, match="votes"):
        choice_from_arrays(arrays, "choice")


def test_no_library_takes_a_vector_kernel_for_many_rows_nor_hopper_for_large_filters() -> None:
    """A product of 4096 rows was once given a kernel for a few, and predicted eighteen times too
    slow.
    """
    kind = np.array(["vector", "hopper", "ampere"])
    few = impossible_candidates(kind, np.array([8.0, 4096.0]), np.zeros((2, 1)), ("k",))
    assert few.tolist() == [[False, False, False], [True, False, False]]
    taps = impossible_candidates(kind, np.full(2, 8.0), np.log2([[25.0], [49.0]]), ("log_rs",))
    assert taps.tolist() == [[False, False, False], [False, True, False]]


def test_a_stray_does_not_become_a_candidate(database: KernelRows) -> None:
    """Four gradients of one token ran another kind of kernel: every product in half precision was
    then a blend.
    """
    half = [
        isinstance(op, Linear) and op.dtype.byte == 2 and (op.turned or op.m == 1024)
        for op in database.ops
    ]
    choice = fit_kernel_choice(database.select_rows(np.array(half)), reference_chip(GPU))
    assert set(choice["half"].kind.tolist()) == {"hopper"}
