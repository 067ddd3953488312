"""Compare the user's own card with the usual one, and say what its other work will draw.

With y the logarithm of a load's measured watts over those predicted at the same clock and pace, and
x that of the card's watts in all work,

    y = x + a load's own part + error of the prediction

Cards spread by s (``Bundle.cards``), of which a share is a kernel's own. The error of a prediction
is that of its interval for the card it was fitted on. x is therefore less than the mean of y: the
better a load is predicted, the more of what it differs by is the card's. The loads are weighted by
how well they are known, and the errors of two predictions go together as in a workload.

A load that runs faster than predicted draws more, on any card: what it counts (bytes, products)
takes its joules in less time, while idle power and waiting SMs draw on as before. So watts are
predicted for the pace that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.card_figures import (
    CardFigures,
    HostPass,
    LoadFigures,
)
from wattcast.core.errors import Refused
from wattcast.core.own_cards import (
    CardLoad,
    OwnCard,
    PowerFactor,
)
from wattcast.hardware import Gpu, load_gpu, strip_board
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.power.module_power import CLOCK, STATIC
from wattcast.predictor.api import host_cost_of_run, predict
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.support_widening import NORMAL_P90, learned_distances
from wattcast.predictor.prediction import Prediction

STEADY_PARTS = (STATIC, CLOCK, "sm")  # of the power, whose watts do not rise with the pace
_FREE_W = 1e4  # a limit that holds no card down: watts are compared at the clock that was read


class OwnCardCoefficients(Coefficients):
    """What a measurement of a card says of its other work."""

    kernel_share: float  # of the variance between cards that is a kernel's own
    most_sigmas: float  # standard deviations beyond which a load is not believed
    host_repeat: float  # factor by which two measurements of one host differ


OWN_CARD = load_coefficients("own_card", OwnCardCoefficients)


@dataclass(frozen=True)
class CardComparison:
    """A card beside the usual one of its kind."""

    card: OwnCard
    gpu: str  # the most special name of the card in the catalogue
    idle_predicted_w: float
    host_s_per_operator: float | None
    latency_ratios: tuple[float, ...]  # measured over predicted, by load
    host_words: str

    @property
    def factor(self) -> PowerFactor:
        """The factor that predictions of this very board take."""
        return self.card.power[self.gpu]

    @property
    def sentences(self) -> list[str]:
        """What was measured, what was predicted, and what follows, one line each."""
        card = self.card
        lines = [
            f"{card.name} ({self.gpu}), board {card.board or 'not told'}, {card.uuid}",
            f"idle: {card.idle_w:.0f} W, predicted {self.idle_predicted_w:.0f} W",
        ]
        for load, ratio in zip(card.loads, self.latency_ratios, strict=True):
            watts = load.measured_w / load.predicted_w
            cap = ", held by the power limit" if load.is_capped else ""
            memory = "" if load.memory_w is None else f" ({load.memory_w:.0f} W of it memory)"
            lines.append(
                f"{load.name}: {load.measured_w:.0f} W{memory} at "
                f"{load.clock_hz / 1e6:.0f} MHz{cap}, "
                f"predicted {load.predicted_w:.0f} W at that pace ({watts:.3f}); time {ratio:.3f} "
                "of predicted"
            )
        factor = self.factor
        lines.append(
            f"watts while working: {factor.value:.3f} times the usual, give or take "
            f"{factor.spread:.1%}; what remains of the differences above may be the predictions' "
            "own error"
        )
        if card.host_factor is None or self.host_s_per_operator is None:
            lines.append(f"host: not measured ({self.host_words})")
        else:
            is_usual = card.host_factor == 1.0
            usual = "as usual, within what two measurements of one host differ by"
            said = usual if is_usual else f"{card.host_factor:.2f} times the usual time"
            cost = units.show(self.host_s_per_operator, "s", 3)
            lines.append(f"host: {cost} to issue an operator, {said} ({self.host_words})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what ``doctor --card --json`` prints."""
        return {
            "card": msgspec.to_builtins(self.card),
            "gpu": self.gpu,
            "power_factor": self.factor.value,
            "power_spread": self.factor.spread,
            "host_factor": self.card.host_factor,
            "host_s_per_operator": self.host_s_per_operator,
            "idle_predicted_w": self.idle_predicted_w,
            "latency_ratios": list(self.latency_ratios),
            "host": self.host_words,
        }


def compare_card(measured: CardFigures) -> CardComparison:
    """Compare what was measured with predictions, and return what is to be remembered."""
    names = name_card(measured.name, measured.board)
    by_name = {name: [_predict_load(load, name) for load in measured.loads] for name in names}
    power = {}
    for name, predictions in by_name.items():
        spread = bundle_for(load_gpu(name)).cards.power
        power[name] = estimate_factor(measured.loads, predictions, spread)
    special = names[-1]
    chip = load_gpu(special)
    loads = []
    for load, prediction in zip(measured.loads, by_name[special], strict=True):
        loads.append(
            CardLoad(
                load.name,
                load.power_w,
                predict_paced_w(prediction, load.latency_s),
                load.is_capped,
                load.clock_hz,
                load.memory_w,
            )
        )
    host_s, host_factor = _compare_host(measured.host)
    card = OwnCard(
        uuid=measured.uuid,
        name=measured.name,
        board=measured.board,
        date=datetime.now(UTC).date().isoformat(),
        power=power,
        host_factor=host_factor,
        idle_w=measured.idle_w,
        loads=tuple(loads),
    )
    latencies = [
        load.latency_s / float(prediction.latency_s)
        for load, prediction in zip(measured.loads, by_name[special], strict=True)
    ]
    return CardComparison(
        card,
        special,
        _predict_idle_w(chip, measured),
        host_s,
        tuple(latencies),
        measured.host.words,
    )


def name_card(driver_name: str, board: str) -> list[str]:
    """Return the names of a card in the catalogue, the most special last.

    >>> name_card("NVIDIA H200", "692-2G520-0282-001")
    ['h200', 'h200-001']
    """
    name = load_gpu(driver_name).name
    boards = list_boards(strip_board(name))
    special = [board_name for board_name, part in boards.items() if part == board]
    return [name, *special]


def _predict_load(load: LoadFigures, gpu: str) -> Prediction:
    """Predict a load at the clock and the temperature that were read, for the usual card."""
    clocks = load_gpu(gpu).clocks
    lowest_hz = float(np.min(clocks.min_hz or 1.0))
    highest_hz = float(np.max(clocks.max_hz))
    return predict(
        {"name": load.name, "ops": [dict(load.operator)]},
        gpu,
        operands="cold",
        clock=min(max(load.clock_hz, lowest_hz), highest_hz),
        temperature=load.temperature_c,
        power_limit=_FREE_W,
        card="this",
        host_factor=1.0,
        power_factor=1.0,
        force=True,
    )


def estimate_factor(
    loads: Sequence[LoadFigures],
    predictions: Sequence[Prediction],
    card_spread: float,
) -> PowerFactor:
    """Return the factor on the watts of a card that works, and the spread that remains.

    Raises an error where a load draws what no card does.
    """
    ratios = []
    for load, prediction in zip(loads, predictions, strict=True):
        ratios.append(load.power_w / predict_paced_w(prediction, load.latency_s))
    logs = np.log(ratios)
    errors = np.array([_prediction_error(prediction) for prediction in predictions])
    for load, log, error in zip(loads, logs, errors, strict=True):
        if abs(log) > OWN_CARD.most_sigmas * math.hypot(error, card_spread):
            raise Refused(
                f"{load.name}: {load.power_w:.0f} W is {math.exp(log):.2f} times what is "
                "predicted, which is more than cards differ by. Does another program use the card, "
                "or is it another board? Nothing is remembered."
            )
    return combine_logs(logs, errors, card_spread)


def predict_paced_w(prediction: Prediction, latency_s: float) -> float:
    """Return the watts of a predicted run that takes ``latency_s`` instead."""
    detail = prediction.basis.detail
    is_steady = np.isin(detail.parts, STEADY_PARTS)
    steady_w = float(detail.part_j[is_steady].sum()) / float(prediction.latency_s)
    return steady_w + float(detail.part_j[~is_steady].sum()) / latency_s


def combine_logs(
    logs: Array,
    errors: Array,
    card_spread: float,
) -> PowerFactor:
    """Return the factor that follows from logarithms of measured over predicted watts.

    ``errors`` are the standard deviations of the predictions' own errors.

    >>> round(combine_logs(np.array([0.1]), np.array([0.0]), 0.02).value, 4)
    1.0661
    """
    own = OWN_CARD.kernel_share * card_spread**2
    shared = card_spread**2 - own
    weights = 1.0 / (np.square(errors) + own)
    weights = weights / weights.sum()

    # variance of the weighted mean: errors go together, loads' own parts do not
    together = learned_distances().together.power
    correlated = float(weights @ errors) ** 2
    independent = float(np.square(weights) @ np.square(errors))
    noise = together * correlated + (1.0 - together) * independent
    noise += own * float(np.square(weights).sum())

    believed = shared / (shared + noise)
    mean = float(weights @ logs)
    remaining = math.sqrt(shared * (1.0 - believed) + own)
    return PowerFactor(math.exp(believed * mean), remaining)


def _prediction_error(prediction: Prediction) -> float:
    """Return the standard deviation of the logarithm of predicted watts."""
    low_w, high_w = np.ravel(prediction.interval.power_w)[:2]
    return float(math.log(high_w / low_w) / (2.0 * NORMAL_P90))


def _predict_idle_w(chip: Gpu, measured: CardFigures) -> float:
    """Return the idle watts of the usual card at the clock that was read."""
    power = bundle_for(chip).power
    if measured.idle_temperature_c is None:
        return float(power.idle_power_w(measured.idle_clock_hz))
    return float(power.idle_power_w(measured.idle_clock_hz, measured.idle_temperature_c))


def _compare_host(host: HostPass) -> tuple[float | None, float | None]:
    """Return the host's seconds to issue an operator, and these over the usual ones.

    A host that differs by no more than two measurements of one host do counts as usual.
    """
    if host.seconds is None:
        return None, None
    own_s = host_cost_of_run(
        "gpt2",
        host.seconds,
        batch=1,
        seq=host.tokens,
        head="none",
    )
    usual_s = float(np.mean(bundle_for(load_gpu("h200")).launch.host_s_per_operator))
    factor = own_s / usual_s
    is_usual = 1.0 / OWN_CARD.host_repeat < factor < OWN_CARD.host_repeat
    return own_s, 1.0 if is_usual else factor
