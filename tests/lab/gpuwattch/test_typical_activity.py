"""What typical activity means: the ranges of kernels whose counters a simulator reported."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.arrays import Array
from wattcast.lab.gpuwattch.simulator_logs import read_power_report
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, TraceSampling
from wattcast.lab.gpuwattch.unseen_counters import TYPICAL
from wattcast.power.activity import Activity

SAMPLE_CYCLES = 500.0
GTX480_SMS = 15
GTX480_SCHEDULERS = 2
WARP_LANES = 32


@pytest.fixture(scope="module")
def reported(reference: Path) -> Activity:
    """Return the mean counters of 13 kernels that GPGPU-Sim ran on a GTX480."""
    report = reference / "simulator_runs" / "gtx480_gpuwattch" / "power_report.log"
    sampling = TraceSampling(SAMPLE_CYCLES, 700e6)
    kernels = read_power_report(report, SimulatorDialect.GPUWATTCH, {}, sampling)
    assert len(kernels.names) == 13
    return kernels.activity


def assert_is_range(expected: tuple[float, float, float], ratios: Array) -> None:
    least_median_most = (ratios.min(), np.median(ratios), ratios.max())
    assert expected == pytest.approx(least_median_most, rel=0.03, abs=0.002)


@pytest.mark.parametrize(
    "event", ["register_read", "register_write", "other_operand", "int_access", "fpu_access"]
)
def test_lanes_of_an_instruction_use_what_simulated_kernels_used(
    reported: Activity, event: str
) -> None:
    lanes = WARP_LANES * reported.event_values("warp_instruction")
    assert_is_range(getattr(TYPICAL, event), reported.event_values(event) / lanes)


def test_special_functions_are_those_of_kernels_that_do_other_things_too(
    reported: Activity,
) -> None:
    """The median of all 13 kernels, and the ends of those with less than two a lane."""
    ratios = reported.event_values("sfu_access") / (
        WARP_LANES * reported.event_values("warp_instruction")
    )
    mixed = ratios[ratios < 2.0]
    assert len(mixed) == 12
    least, typical, most = TYPICAL.sfu_access
    assert (least, most) == pytest.approx((mixed.min(), mixed.max()), rel=0.03)
    assert typical == pytest.approx(np.median(ratios), rel=0.03)


def test_pipes_are_busy_for_nearly_all_slots_that_instructions_fill(reported: Activity) -> None:
    slots = SAMPLE_CYCLES * GTX480_SMS * GTX480_SCHEDULERS
    filled_share = reported.event_values("warp_instruction") / slots
    assert_is_range(TYPICAL.duty_of_issue, reported.event_values("pipe_duty") / filled_share)


# The Quadro GV100 of AccelWattch's published watts
GV100_SMS = 80
GV100_SCHEDULERS = 4
GV100_HZ = 1447e6
# Watts of a mix of units that is not known, by AccelWattch's XML: the first lane of a warp, and
# each further one.
MEAN_MIX_FIRST_LANE_W = 17.21745077
MEAN_MIX_LANE_W = 0.650630555
UNITS = (
    *("INTP", "FPUP", "DPUP", "INT_MULP", "FP_MULP", "FP_SQRTP", "FP_LGP"),
    *("FP_SINP", "FP_EXP", "DP_MULP", "TENSORP"),
)
TENSOR_KERNELS = ("cudaTensor", "cutlass")


@dataclass(frozen=True)
class PublishedKernels:
    """What AccelWattch says of kernels that ran on the card, ``(kernel,)``."""

    instruction_w: Array  # of the instruction buffer
    unit_w: Array
    static_w: Array
    pipe_duty: Array
    idle_sms: Array


def read_published(reference: Path, with_tensor_cores: bool) -> PublishedKernels:
    path = reference / "accelwattch" / "volta_hw_counters_power_components.csv"
    rows = [
        row
        for row in csv.DictReader(path.read_text().splitlines())
        if row["kernel"].startswith(TENSOR_KERNELS) is with_tensor_cores
    ]

    def column(name: str) -> Array:
        return np.array([float(row[name]) for row in rows])

    return PublishedKernels(
        instruction_w=column("accelwattch_HW_IBP"),
        unit_w=sum((column(f"accelwattch_HW_{unit}") for unit in UNITS), np.zeros(len(rows))),
        static_w=column("accelwattch_HW_STATICP"),
        pipe_duty=column("hw_Pipeline_Duty"),
        idle_sms=column("hw_Num_Idle_SMs"),
    )


@pytest.fixture(scope="module")
def instruction_j(reference: Path) -> float:
    """Return AccelWattch's energy of an instruction in the instruction buffer."""
    path = reference / "accelwattch" / "coefficients" / "accelwattch_sass_hw.csv"
    lines = path.read_text().splitlines()
    row = next(row for row in csv.DictReader(lines) if row["counter"] == "TOT_INST")
    return float(row["effective_energy_J_per_count"])


def assert_is_middle(expected: tuple[float, float, float], ratios: Array) -> None:
    """Compare a range with the tenth, fiftieth and ninetieth of a hundred kernels."""
    assert expected == pytest.approx(np.quantile(ratios, (0.1, 0.5, 0.9)), rel=0.03)


@pytest.mark.parametrize("with_tensor_cores", [False, True])
def test_instructions_fill_the_slots_that_published_watts_imply(
    reference: Path, instruction_j: float, with_tensor_cores: bool
) -> None:
    kernels = read_published(reference, with_tensor_cores)
    slots_per_s = GV100_HZ * GV100_SMS * GV100_SCHEDULERS
    filled_share = kernels.instruction_w / instruction_j / slots_per_s
    expected = TYPICAL.tensor_issue_of_duty if with_tensor_cores else TYPICAL.issue_of_duty
    assert_is_middle(expected, filled_share / kernels.pipe_duty)


@pytest.mark.parametrize("with_tensor_cores", [False, True])
def test_units_take_the_energy_an_instruction_that_published_watts_imply(
    reference: Path, instruction_j: float, with_tensor_cores: bool
) -> None:
    """Within a tenth: the column of published watts does not name all units that a kernel used."""
    kernels = read_published(reference, with_tensor_cores)
    unit_pj = kernels.unit_w / kernels.instruction_w * instruction_j * 1e12
    expected = TYPICAL.tensor_unit_energy_pj if with_tensor_cores else TYPICAL.unit_energy_pj
    least_and_median = np.quantile(unit_pj, (0.1, 0.5))
    assert expected == pytest.approx((*least_and_median, unit_pj.max()), rel=0.1)


@pytest.mark.parametrize("with_tensor_cores", [False, True])
def test_static_power_is_the_published_share_of_that_of_a_mean_mix(
    reference: Path, with_tensor_cores: bool
) -> None:
    kernels = read_published(reference, with_tensor_cores)
    full_warp_w = MEAN_MIX_FIRST_LANE_W + (WARP_LANES - 1) * MEAN_MIX_LANE_W
    awake_share = 1.0 - kernels.idle_sms / GV100_SMS
    expected = TYPICAL.tensor_static_share if with_tensor_cores else TYPICAL.static_share
    assert_is_middle(expected, kernels.static_w / (full_warp_w * awake_share))


def test_most_instructions_go_to_arithmetic_pipes(reported: Activity) -> None:
    share = reported.event_values("scheduled_instruction") / reported.event_values(
        "warp_instruction"
    )
    assert_is_range(TYPICAL.scheduled_share, share)
