"""What single coefficients of training jobs mean: each test fails with its number a third off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import wattcast
from wattcast.hardware import load_gpu
from wattcast.kernels import build_kernels, reference_chip
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.lab.validate.public_checks.training_checks import (
    predict_training_row,
    read_training_rows,
)
from wattcast.options.training_options import TrainingRecipe
from wattcast.training import step_time
from wattcast.training.microbatch import _as_generated, trace_microbatch
from wattcast.training.step_time import host_byte_per_s, overlapped_s
from wattcast.training.train_job import TrainingResult, relative_interval, widen_interval
from wattcast.training.training_report import recommend_limit
from wattcast.training.training_strategy import Sharding, TrainingStrategy
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.operator_types import Collective, Elementwise, Softmax


@pytest.fixture(scope="module")
def job() -> TrainingResult:
    options: dict[str, Any] = {
        "tp": 1,
        "pp": 1,
        "micro_batch": 1,
        "global_batch": 8,
        "recompute": "none",
    }
    return wattcast.train("qwen3-0.6b", "h100-sxm", gpus=8, force=True, **options)


def test_the_first_and_the_last_bucket_of_gradients_do_not_hide() -> None:
    """Gradients travel in some ten buckets, of which one has no compute beside it."""
    compute_s = np.asarray(1.0)
    assert float(overlapped_s(compute_s, 0.85, slowed=0.0)) == 1.0
    waiting_s = float(overlapped_s(compute_s, 1.0, slowed=0.0)) - 1.0
    assert 0.05 < waiting_s < 0.2


def test_compute_slows_by_the_sms_that_nccl_takes() -> None:
    """NCCL takes 16 to 24 of the 132 SMs of an H100 (docs/method/training-jobs.md)."""
    slowed = 2.0 * (float(overlapped_s(np.asarray(1.0), 0.5)) - 1.0)
    assert 16 / 132 < slowed < 24 / 132


def test_copies_to_the_host_leave_room_for_the_packets_of_pcie() -> None:
    """PCIe 5.0 sends 32 GT/s on each of 16 lanes in blocks of 130 bits for 128, and packets of 256
    bytes with 24 of header and checksum.
    """
    lanes_byte_per_s = 16 * 32e9 / 8
    packets_byte_per_s = lanes_byte_per_s * 128 / 130 * 256 / (256 + 24)
    copied_byte_per_s = host_byte_per_s(load_gpu("h100-sxm"))
    assert 0.75 * packets_byte_per_s < copied_byte_per_s < packets_byte_per_s


def test_a_job_leaves_some_gigabytes_of_a_card_to_the_driver_and_nccl(job: TrainingResult) -> None:
    left_byte = 80e9 - job.capacity_byte
    assert 2e9 < left_byte < 8e9


@pytest.mark.parametrize(("gpus", "least", "most"), [(8, 0.25, 0.35), (16, 0.4, 0.6)])
def test_exchanges_between_nodes_are_known_less_well(
    job: TrainingResult, gpus: int, least: float, most: float
) -> None:
    """A step that only exchanges is predicted to a third inside a node and to a half beyond."""
    cost = job.candidates[0].cost
    assert cost is not None
    nothing = np.zeros(())
    waiting = replace(
        job.step, compute_s=nothing, exchange_s=np.ones(()), bubble_s=nothing, optimiser_s=nothing
    )
    low, high = relative_interval(cost, waiting, gpus, node_gpus=8)
    assert least < 1.0 - low < most
    assert least < high - 1.0 < most


def test_jobs_of_several_gpus_have_wider_intervals() -> None:
    """Four in five of 396 published jobs were inside, where nine in ten are meant to be.

    It notices a changed coefficient: 1.24 to 1.48 is what other families asked for when one of
    them was left out (``lab.validate.public_checks.training_family_checks``).
    """
    assert widen_interval((0.9, 1.2), 1) == (0.9, 1.2)
    low, high = widen_interval((0.9, 1.2), 8)
    assert 1.24 < np.log(low) / np.log(0.9) < 1.48
    assert 1.24 < np.log(high) / np.log(1.2) < 1.48


def test_a_limit_that_takes_an_eighth_more_time_is_not_recommended(job: TrainingResult) -> None:
    points = [(700.0, 1.9e9, 100.0, 50.0), (600.0, 1.8e9, 108.0, 45.0), (500.0, 1.7e9, 112.5, 40.0)]
    assert recommend_limit(replace(job, curve=tuple(points))) == 600.0


def test_a_collective_occupies_the_sms_that_compute_beside_it_lacks() -> None:
    """Compute slows by 15 % beside NCCL, and DeepEP's benchmarks settle on 24 of 132 SMs."""
    gpu = load_gpu("h100-sxm")
    op = Collective("all_reduce", 2**30, 8)
    work = build_kernels((op,), (USUAL_CONDITION,), gpu, reference_chip(gpu), ()).work
    slowed = 2.0 * (float(overlapped_s(np.asarray(1.0), 0.5)) - 1.0)
    assert float(work.units[0]) / 132 == pytest.approx(slowed, abs=0.05)


def test_a_compiler_lets_rows_of_200_share_a_block_and_not_rows_of_300() -> None:
    """A block of 256 threads has one for each element of a short row, with more rows beside it."""
    short, long = (_as_generated(Softmax(4096, dim), False) for dim in (200, 300))
    assert isinstance(short, Elementwise)
    assert isinstance(long, Softmax)


def test_a_fused_loss_holds_the_logits_of_an_eighth_of_the_tokens() -> None:
    """torchtune's ``CEWithChunkedOutputLoss`` computes eight chunks of the tokens one by one."""
    model = load_model("llama3-8b")
    whole, fused = (
        trace_microbatch(model, TrainingRecipe(fused_loss=is_fused), 1, 4096)
        for is_fused in (False, True)
    )
    eighth = trace_microbatch(model, TrainingRecipe(), 1, 4096 // 8)
    assert fused.sections[-1].label == "head"
    assert fused.sections[-1].peak_byte < 0.2 * whole.sections[-1].peak_byte
    assert fused.sections[-1].peak_byte == pytest.approx(eighth.sections[-1].peak_byte, rel=0.1)


def test_users_lose_as_much_as_published_families_do(reference: Path) -> None:
    """Two families of users that ran on A100s in 2023 and 2024 come out without a bias.

    It notices a changed coefficient: both are among those that chose it.
    """
    rows = [
        row
        for row in read_training_rows(reference)
        if row["id"].startswith(("internevo-tgs-tp1", "llmfoundry-a100_80gb-amp_bf16-mpt7b"))
    ]
    ratios = []
    for row in rows[:12]:
        result = predict_training_row(row)
        ratios.append(result.tokens_per_s / result.gpus / float(row["tokens_per_s_per_gpu"]))
    assert len(ratios) >= 8
    assert abs(np.median(ratios) - 1.0) < 0.04


def test_sharded_weights_are_gathered_beside_half_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other half of the pass has the gradients beside it. A gather of two fifths of the pass hides
    as well as beside all of it, one of three fifths does not.
    """
    stage: Any = SimpleNamespace(backward_s=np.array([1.0]))
    work: Any = SimpleNamespace(sections=())
    links = step_time.ClusterLinks(load_gpu("a100-sxm-80gb"))
    strategy = TrainingStrategy(dp=8, sharding=Sharding.ZERO2)

    def gather(seconds: float) -> float:
        monkeypatch.setattr(step_time, "_replica_exchange_s", lambda *_: seconds)
        return float(step_time._exposed_sync_s(stage, work, TrainingRecipe(), strategy, links))

    def hide(seconds: float) -> float:
        return float(overlapped_s(np.asarray(1.0), seconds)) - 1.0

    assert gather(0.4) == pytest.approx(hide(0.4))
    assert gather(0.6) > hide(0.6) + 0.05
