"""Show what watts of a chip are worth: none, one row, eight rows, all.

A chip's energies begin as the physics carried over from the H200, as if nobody had measured a watt
of it; rows of the evidence half then move them (``calibrate/energy_evidence.py``), and rows of
other models judge. On an A100 and an A10 rows are published whole models (EnergAIzer), halved by
the crc32 of the model's name; on a B200 served models (ML.ENERGY), as ``served_rows`` halves them.
Few rows are drawn several times by a crc32 of their names, and errors are means over the draws. The
H200 is the parent of all forecasts and cannot be left out.
Run: ``python -m wattcast.lab.validate.public_checks.chips_left_out --reference FOLDER``.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.calibrate.energy_evidence import (
    EnergyEvidence,
    scalable_modules,
    weigh_energies,
)
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.hardware import (
    Gpu,
    OperatingPoint,
    load_gpu,
)
from wattcast.lab.fit.served_evidence import served_evidence
from wattcast.lab.fit.served_rows import GPU as SERVED_GPU
from wattcast.lab.fit.served_rows import (
    ServedRow,
    read_served_rows,
    select_half,
)
from wattcast.lab.fit.served_steps import ask_row
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    clean_runs,
    read_other_gpus,
    read_published_runs,
)
from wattcast.predictor.bundle import (
    Bundle,
    bundle_for,
    forecast_bundle,
)
from wattcast.predictor.prediction import Prediction, predict_graph

WHERE = "watts of a chip left out"
_FEW = (1, 8)
_DRAWS = 5
_STEPS = "steps"


@dataclass(frozen=True)
class _Chip:
    """A chip as if it had no watts: evidence that may move it, and how its rows judge a bundle."""

    name: str
    prior: Bundle
    evidence: list[EnergyEvidence]
    judge: Callable[[Bundle], tuple[float, float]]  # error of watts in percent, and inside
    judged: int


def left_out_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return the errors of each chip by how many of its rows moved its energies."""
    if reference is None or not (reference / "energaizer").is_dir():
        return [make_absent_row(WHERE, "power", "no reference data")]
    rows = []
    for make in (_make_a100, _make_a10, _make_b200):
        chip = make(reference)
        tell(f"{WHERE}: {chip.name}")
        rows += _judge_chip(chip)
    return rows


def _judge_chip(chip: _Chip) -> list[LedgerRow]:
    counts = [0, *_FEW, len(chip.evidence)]
    rows = []
    for count in counts:
        draws = _DRAWS if count in _FEW else 1
        scores = []
        for draw in range(draws):
            chosen = _draw(chip.evidence, count, draw)
            moved = weigh_energies(chosen, scalable_modules(chip.prior)).move(chip.prior)
            scores.append(chip.judge(moved))
        error, inside = np.mean(scores, axis=0)
        words = "all" if count == counts[-1] else str(count)
        row = make_ledger_row(
            f"{WHERE}, {chip.name}", f"power, {words} rows of its own", chip.judged, float(error)
        )
        rows.append(row | {"coverage": round(float(inside), 1), "evidence": count})
    return rows


def _draw(
    evidence: Sequence[EnergyEvidence],
    count: int,
    draw: int,
) -> list[EnergyEvidence]:
    """Draw so many rows by a crc32 of their watts and the number of the draw."""
    names = [f"{item.measured_w:.6g} {draw}" for item in evidence]
    order = sorted(range(len(names)), key=lambda place: zlib.crc32(names[place].encode()))
    return [evidence[place] for place in order[:count]]


def _make_a100(reference: Path) -> _Chip:
    runs = clean_runs(read_published_runs(reference, "900"))
    return _make_published(PUBLISHED_GPU, runs)


def _make_a10(reference: Path) -> _Chip:
    return _make_published("a10", read_other_gpus(reference)["a10"])


def _make_published(name: str, runs: Sequence[PublishedRun]) -> _Chip:
    """Return a chip of published whole models; half of the models are evidence."""
    chip = load_gpu(name)
    prior = bundle_for(chip).with_power_of(forecast_bundle(chip))
    evidence_runs = [run for run in runs if zlib.crc32(run.model.encode()) % 2 == 0]
    judged = [run for run in runs if zlib.crc32(run.model.encode()) % 2 == 1]
    evidence = [_read_run(run, chip, prior) for run in evidence_runs]

    def judge(bundle: Bundle) -> tuple[float, float]:
        answers = [_predict_run(run, chip, bundle) for run in judged]
        measured = np.array([run.power_w for run in judged])
        predicted = np.array([float(item.power_w) for item in answers])
        ends = np.array([np.ravel(item.interval.power_w) for item in answers])
        inside = (measured >= ends[:, 0]) & (measured <= ends[:, 1])
        return _percent(predicted, measured), 100.0 * float(inside.mean())

    return _Chip(
        name,
        prior,
        evidence,
        judge,
        len(judged),
    )


def _predict_run(
    run: PublishedRun,
    chip: Gpu,
    bundle: Bundle,
) -> Prediction:
    at = OperatingPoint(clock_hz=run.clock_hz)
    return predict_graph(run.graph, chip, at, bundle)


def _read_run(
    run: PublishedRun,
    chip: Gpu,
    bundle: Bundle,
) -> EnergyEvidence:
    """Return a run's watts and those of the prior's parts at the run's own time."""
    assert run.power_w is not None, "published runs have watts"
    prediction = _predict_run(run, chip, bundle)
    stretched = float(prediction.latency_s) / run.latency_s
    modules = scalable_modules(bundle)
    watts = {item.name: float(item.power_w) for item in prediction.modules}
    own_w = {module: watts[module] * stretched for module in modules if module in watts}
    still_w = sum(value for name, value in watts.items() if name not in modules)
    return EnergyEvidence(_STEPS, run.power_w, still_w, own_w)


def _make_b200(reference: Path) -> _Chip:
    """Return the B200 of served models."""
    chip = load_gpu(SERVED_GPU)
    prior = bundle_for(chip).with_power_of(forecast_bundle(chip))
    rows = read_served_rows(reference)
    judged = select_half(rows, False)
    evidence = served_evidence(select_half(rows, True), chip, prior)

    def judge(bundle: Bundle) -> tuple[float, float]:
        return _judge_served(judged, bundle)

    return _Chip(
        SERVED_GPU,
        prior,
        evidence,
        judge,
        len(judged),
    )


def _judge_served(rows: Sequence[ServedRow], bundle: Bundle) -> tuple[float, float]:
    answers = [ask_row(row, bundle) for row in rows]
    measured = np.array([row.power_w for row in rows])
    predicted = np.array([item.power_w for item in answers])
    ends = np.array([item.ends["power_w"] for item in answers])
    inside = (measured >= predicted * ends[:, 0]) & (measured <= predicted * ends[:, 1])
    return _percent(predicted, measured), 100.0 * float(inside.mean())


def _percent(predicted: np.ndarray, measured: np.ndarray) -> float:
    return 100.0 * float(np.mean(np.abs(predicted / measured - 1.0)))


def main() -> None:
    """Print a line a chip and count of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True)
    options = parser.parse_args()
    require_measurements(options.reference / "energaizer")
    for row in left_out_rows(options.reference, lambda _: None):
        figures = f"{row['mape']:>6.2f} %  inside {row['coverage']} %"
        print(f"{row['set']:42} {row['quantity']:28} {row['n']:>3} judged {figures}", flush=True)


if __name__ == "__main__":
    run_module(main)
