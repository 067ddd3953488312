"""What a few rows of a card are worth: the forecast alone, the forecast moved by them, and a fit from nothing.

No other card's kernels were measured, so one is pretended. The parent is fitted on three of five folds of the
database; rows of a fourth fold are the card's own; errors are of the fifth, which neither has seen. Three pretended
cards: *a twin*, whose rows are as measured, so that the forecast needs no change; *another chip*, whose rows are
distorted in ways the forecast does not know: each phase of time, each family, each module's energy and idle power by
factors drawn at random (seed = draw), about as far as forecasts are found off (groups of kernels are not distorted);
and *a chip known by its catalogue entry*, as measured, whose forecast is the provisional rule and inherits no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fit import kernels_data
from wattcast.fit.inherit_kernels import PHASES, Idle, _energies, _moved, inherit
from wattcast.fit.kernels import bundle_of, fit_rows, idle_curve, random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_run import _one_thread
from wattcast.fit.kernels_split import folds_of, predict_with
from wattcast.fitted import fitted, provisional
from wattcast.fitted.bundle import Bundle
from wattcast.hardware import Gpu
from wattcast.power.module import ModulePower
from wattcast.validate.learning import Tell
from wattcast.validate.rows import Row, row

COUNTS = (50, 100, 200)
DRAWS = 3
CARDS = ("a twin", "another chip", "a chip known by its catalogue entry")
SUSTAINED = 1 / 3  # of the rows
# log-spreads of the distortion
_PHASE, _FAMILY, _ENERGY, _MODULE, _IDLE = 0.15, 0.08, 0.15, 0.10, 0.08
ARMS = ("forecast", "forecast moved", "fit from nothing")


@dataclass(frozen=True)
class Setting:
    """A parent, and the rows of the pretended card: its own to fit, and others to test."""

    gpu: Gpu
    parent: Bundle
    own: Rows
    test: Rows
    idle: Idle


def few_rows(gpu: str, card: str, tell: Tell) -> list[Row]:
    """Errors of the three ways of one card, by number of rows, mean over draws; the floor is the forecast's."""
    found: dict[tuple[int, str], list[Array]] = {}
    with _one_thread():
        base = setting(gpu)
        for draw in range(DRAWS):
            some = pretended(base, card, draw)
            for count in COUNTS:
                tell(f"few rows: {card}, draw {draw + 1} of {DRAWS}, {count} rows")
                for arm, error in compared(some, count, draw).items():
                    found.setdefault((count, arm), []).append(error)
    return _rows(gpu, card, found)


def setting(gpu: str) -> Setting:
    """The parent from folds 0 to 2, the card's own rows from fold 3, the test from fold 4."""
    chip, rows, idle = hardware.load(gpu), kernels_data.load(gpu), kernels_data.idle(gpu)
    shipped = fitted(gpu)
    if shipped is None:
        raise BadInput(f"no bundle ships for {gpu}: its intervals are needed. Run `wattcast fit kernels`.")
    fold = folds_of(rows)
    usable = rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0) & random(rows)
    past = rows.where(fold < 3)
    parent = bundle_of(fit_rows(past, chip, idle_curve(idle, chip)), past, chip, shipped.residuals, "")
    return Setting(chip, parent, rows.where(usable & (fold == 3)), rows.where(usable & (fold == 4)), idle)


def pretended(base: Setting, card: str, draw: int) -> Setting:
    """The setting of a card."""
    if card == CARDS[1]:
        return distorted(base, draw)
    return base if card == CARDS[0] else replace(base, parent=provisional(base.gpu))


def distorted(base: Setting, seed: int) -> Setting:
    """The same as if the card were another: rows scaled by a distorted parent over the parent."""
    rng = np.random.default_rng([seed, 17])
    power = base.parent.power
    assert isinstance(power, ModulePower)
    families = sorted({name.partition(".")[0] for name in base.parent.corrections})
    own = np.repeat(rng.normal(0.0, _FAMILY, len(families)), len(PHASES))
    theta = np.concatenate([rng.normal(0.0, _PHASE, len(PHASES)), own])
    modules = dict(zip(power.modules, rng.normal(0.0, _MODULE, len(power.modules)), strict=True))
    idle = float(np.exp(rng.normal(0.0, _IDLE)))
    energies = _energies(power, modules, float(rng.normal(0.0, _ENERGY)))
    truth = replace(
        base.parent,
        corrections=_moved(base.parent.corrections, theta, families, []),
        power=replace(energies, idle=replace(power.idle, power_w=idle * power.idle.power_w)),
    )
    own_rows, test = (_scaled(rows, base, truth) for rows in (base.own, base.test))
    return replace(base, own=own_rows, test=test, idle=[(hz, idle * w, c) for hz, w, c in base.idle])


def _scaled(rows: Rows, base: Setting, truth: Bundle) -> Rows:
    ratio = predict_with(truth, rows, base.gpu) / predict_with(base.parent, rows, base.gpu)
    sustained = rows.is_kind("sustained")
    watts = np.where(sustained, ratio[:, 1], 1.0)
    hertz = np.where(sustained, ratio[:, 2], 1.0)
    by: Mapping[str, Array] = {
        "latency_s": ratio[:, 0],
        **dict.fromkeys(("power_w", "settled_power_w"), watts),
        **dict.fromkeys(("sm_clock_hz", "settled_clock_hz", "effective_clock_hz"), hertz),
    }
    return replace(rows, number={name: values * by.get(name, 1.0) for name, values in rows.number.items()})


def compared(some: Setting, count: int, seed: int) -> dict[str, Array]:
    """Latency and power error in percent of the three ways, from ``count`` of the card's own rows."""
    own = some.own.where(drawn(some.own, count, seed))
    moved = inherit(own, some.gpu, some.parent, some.idle).bundle
    alone = fit_rows(own, some.gpu, idle_curve(some.idle, some.gpu))
    bundles = (some.parent, moved, bundle_of(alone, own, some.gpu, {}, ""))
    return {arm: errors(bundle, some.test, some.gpu) for arm, bundle in zip(ARMS, bundles, strict=True)}


def drawn(rows: Rows, count: int, seed: int) -> Mask:
    """``count`` rows at random, a third of them sustained."""
    rng = np.random.default_rng([seed, count])
    sustained: npt.NDArray[np.int64] = rng.permutation(np.flatnonzero(rows.is_kind("sustained")))
    bursts = rng.permutation(np.flatnonzero(rows.is_kind("burst")))
    some = sustained[: round(SUSTAINED * count)]
    mask = np.zeros(len(rows), dtype=bool)
    mask[some] = True
    mask[bursts[: count - len(some)]] = True
    return mask


def errors(bundle: Bundle, rows: Rows, gpu: Gpu) -> Array:
    """Mean absolute error in percent: latency of bursts, power of sustained rows."""
    predicted = predict_with(bundle, rows, gpu)
    power_w, _, latency_s = settled(rows)
    burst = rows.is_kind("burst")
    time, power = predicted[burst, 0] / latency_s[burst], predicted[~burst, 1] / power_w[~burst]
    return np.array([100.0 * np.mean(np.abs(ratio - 1.0)) for ratio in (time, power)])


def _rows(gpu: str, card: str, found: Mapping[tuple[int, str], list[Array]]) -> list[Row]:
    out = []
    for i, quantity in enumerate(("latency", "power")):
        for (count, arm), each in found.items():
            if arm == ARMS[0]:
                continue
            values, forecast = np.array(each)[:, i], np.array(found[count, ARMS[0]])[:, i]
            worse = int((values > forecast + 0.1).sum())
            more: dict[str, Any] = {
                "draws": [round(v, 1) for v in values.tolist()],
                "worse_than_forecast": f"{worse} of {len(values)}",
            }
            where = f"{gpu} few rows, {quantity}, {card} pretended"
            out.append(
                row(where, f"{count} rows, {arm}", count, float(values.mean()), float(forecast.mean()), **more)
            )
    return out
