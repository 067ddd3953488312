"""What single coefficients of weighing the energies of a card mean."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate.energy_evidence import (
    EVIDENCE,
    PRODUCTS,
    SERVING,
    EnergyEvidence,
    weigh_energies,
)


def draw_from_memory(kind: str, count: int, factor: float = 1.0) -> list[EnergyEvidence]:
    """Return runs that take ``factor`` times the energy of the forecast, all of it in memory."""
    return [EnergyEvidence(kind, 100.0 * factor, 1e-9, {"dram": 100.0})] * count


def doubt(evidence: list[EnergyEvidence]) -> float:
    """Return the deviation of the logarithm of the energies of memory."""
    return weigh_energies(evidence, ("dram",)).deviation["dram"]


def test_without_watts_an_energy_is_known_to_a_quarter() -> None:
    """The forecast of a B200 from an H200 was 25 % off, those of an A100 and an A10 3 % and less."""
    assert 0.2 < doubt([]) < 0.25


def test_idle_power_is_within_a_quarter_of_its_rule_nine_times_in_ten() -> None:
    deviation = weigh_energies([], ("dram",)).deviation["idle"]
    assert 0.2 < 1.645 * deviation < 0.3


def test_a_card_of_the_same_processor_is_known_twice_as_well_as_boards_are_alike() -> None:
    """Boards of one kind differ by 1 to 3 % (boards.yaml)."""
    near = weigh_energies([], ("dram",), EVIDENCE.same_processor).deviation["dram"]
    assert 0.04 < near < 0.07


def test_modules_that_always_work_together_cannot_be_told_apart() -> None:
    """300 runs know the sum of two energies, and each of both to the spread between modules."""
    run = EnergyEvidence("steps", 100.0, 1e-9, {"dram": 50.0, "tensor": 50.0})
    posterior = weigh_energies([run] * 300, ("dram", "tensor"))
    assert 0.075 < posterior.deviation["dram"] < 0.1


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(PRODUCTS, 0.145, 0.18), ("steps", 0.04, 0.06), (SERVING, 0.05, 0.08)],
)
def test_however_many_runs_of_a_kind_know_energies_no_better_than_their_kind(
    kind: str, least: float, most: float
) -> None:
    """Steps of whole models read 0.97 to 1.00 of a forecast, tables of products 0.6 to 0.95."""
    assert least < doubt(draw_from_memory(kind, 3000)) < most


def test_one_step_of_a_model_knows_energies_to_eight_percent() -> None:
    """Repeats of a run differ by 7 %, and steps as a kind by 5 % from the truth."""
    assert 0.067 < doubt(draw_from_memory("steps", 1)) < 0.084


def test_two_odd_runs_of_eight_move_energies_by_a_third_of_their_mean() -> None:
    """With Student's t, runs beyond four deviations hardly count [Lange1989]."""
    runs = draw_from_memory("steps", 6) + draw_from_memory("steps", 2, factor=1.3)
    moved = np.log(weigh_energies(runs, ("dram",)).factors["dram"])
    mean = 2 / 8 * np.log(1.3)
    assert 0.25 * mean < moved < 0.34 * mean
