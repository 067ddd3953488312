"""Kernels of a design run the program that is fastest on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.core.errors import BadInput
from wattcast.explore import explorations
from wattcast.explore.design_coefficients import DESIGNS
from wattcast.explore.design_kernels import analyse_design, lower_for_designs
from wattcast.explore.design_programs import DesignAxes
from wattcast.explore.study import Study, evaluate_points
from wattcast.kernels import lower_graph
from wattcast.predictor.timeline import compute_kernel_s


def prompt_study(*words: str, **options: object) -> Study:
    chosen = {"batch": 4, "seq": 512} | options
    return explorations.build_study("llama3-8b", "h200", list(words), **chosen)


def test_tiles_shrink_with_shared_memory_and_registers() -> None:
    """Up to its margin shared memory may shrink; then tiles do, and load more. Registers and shared
    memory together make room for larger ones.
    """
    study = prompt_study("sm_count=132,200")
    design = lower_for_designs(
        study.graph, study.gpu, study.bundle, programs=True, capacities=False
    )
    products = [row for row, family in enumerate(design.kernels.family) if family == "gemm"]

    def count_l2_byte(**changes: float) -> np.ndarray:
        axes = DesignAxes(sm_count=132.0, **changes)
        timeline = analyse_design(design, study.gpu, axes, 1.98e9)
        own = timeline.value[:, timeline.events.index("l2_byte")]
        return np.asarray(timeline.varied.get("l2_byte", own))[..., products]

    base = count_l2_byte()
    # Two stages of 128 by 256 outputs and 64 elements of K in bf16 take 96 KiB of 227.
    assert np.array_equal(count_l2_byte(shared=100 / 227), base)
    assert (count_l2_byte(shared=90 / 227) > base).any()
    assert (count_l2_byte(shared=48 / 227) > base).all()
    assert (count_l2_byte(registers=0.5) > base).all()
    roomy = count_l2_byte(registers=4.0, shared=4.0)
    assert (roomy <= base).all()
    # A tile of twice the sides loads half for its work, which some products have room for.
    twice_area = count_l2_byte(registers=2.0, shared=2.0)
    assert roomy.sum() < twice_area.sum() < 0.9 * base.sum()


def test_sparse_weights_take_the_bytes_of_their_format() -> None:
    """Two of four values of 16 bits and two bits for the place of each."""
    assert DESIGNS.sparse_weight_share == (2 * 16 + 2 * 2) / (4 * 16)
    study = prompt_study("sparsity=1,2", phase="decode", batch=1)
    found = evaluate_points(study, study.space.points(0, 2))
    ratio = found["latency_s"][1] / found["latency_s"][0]
    assert DESIGNS.sparse_weight_share < ratio < 0.75


def test_the_base_runs_its_own_programs() -> None:
    study = prompt_study("sm_count=132,200")
    design = study.design
    assert design is not None
    timeline = analyse_design(design, study.gpu, DesignAxes(sm_count=132.0), 1.98e9)
    own = lower_graph(study.graph, study.gpu, study.bundle.reference)
    assert np.array_equal(timeline.active, own.work.units / np.maximum(_waves(own), 1e-30))
    assert not timeline.varied


def _waves(kernels: object) -> np.ndarray:
    from wattcast.predictor.timeline import count_waves

    return count_waves(kernels, 132.0)  # type: ignore[arg-type]


def test_another_chip_runs_other_programs() -> None:
    """On a chip of four times the SMs decode attention is cut into more parts."""
    study = prompt_study("sm_count=132,528", phase="decode", batch=1, seq=8192)
    design = study.design
    assert design is not None
    assert len(design.row_of) > len(design.kernels.ops)
    fixed = replace(study)
    found = evaluate_points(fixed, study.space.points(0, 2))
    assert found["latency_s"][1] < found["latency_s"][0]


def test_a_program_never_runs_faster_on_the_base_than_its_own() -> None:
    study = prompt_study("sm_count=132,200")
    design = lower_for_designs(
        study.graph, study.gpu, study.bundle, programs=True, capacities=False
    )
    for clock_hz in (0.6e9, 1.2e9, 1.98e9):
        chosen = analyse_design(design, study.gpu, DesignAxes(sm_count=132.0), clock_hz)
        plain = lower_for_designs(
            study.graph, study.gpu, study.bundle, programs=False, capacities=False
        )
        own = analyse_design(plain, study.gpu, DesignAxes(sm_count=132.0), clock_hz)
        hertz = np.array(clock_hz)
        assert np.allclose(
            compute_kernel_s(chosen.phases, hertz), compute_kernel_s(own.phases, hertz), rtol=1e-12
        )


def test_an_l2_that_holds_the_model_spares_device_memory() -> None:
    """From 5 MB to 20 GB of L2 nothing changed once; an L2 above the whole run leaves nothing to
    read.
    """
    study = prompt_study("l2=20MB,62914560B,1GB,60GB", phase="decode", power_limit="100000W")
    found = evaluate_points(study, study.space.points(0, 4))
    latency_s = found["latency_s"]
    assert latency_s[3] < 0.75 * latency_s[1]  # loads from L2 and fixed times are left
    assert latency_s[0] >= latency_s[1] >= latency_s[2]


@pytest.mark.parametrize("word", ["sparsity=3", "sparsity=0", "memory.kind=HBM9"])
def test_designs_that_make_no_sense_are_refused(word: str) -> None:
    with pytest.raises(BadInput, match=word.partition("=")[0]):
        prompt_study(word)


def test_an_unknown_budget_is_refused() -> None:
    with pytest.raises(BadInput, match="hold"):
        prompt_study("l2=20MB,40MB", hold="weight")
