"""Measure what a few rows of a card are worth: the forecast, the forecast moved by them, and a fit
from nothing.

Run: ``python -m wattcast.lab.validate.long_checks.few_rows`` (minutes; ``wattcast lab validate``
then lists the rows).

No other card's kernels were measured, so one is pretended. The parent is fitted on three of five
folds of the database; rows of a fourth fold are the card's own; errors are of the fifth, which
neither has seen. Three pretended cards: *a twin*, whose rows are as measured, so that the forecast
needs no change; *another chip*, whose rows are distorted in ways the forecast does not know: each
phase of time, each family, each module's energy and idle power by factors drawn at random (seed =
draw), about as far as forecasts are found off (groups of kernels are not distorted); and *a chip
known by its catalogue entry*, as measured, whose forecast is the starting rule and inherits no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.forecast_shift import (
    MOVED_PHASES,
    IdleRows,
    move_corrections,
    move_forecast,
)
from wattcast.calibrate.kernel_rows import (
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_ledger_row,
)
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import (
    FitStatus,
    Provenance,
    decode_yaml,
)
from wattcast.hardware import Gpu
from wattcast.kernels import reference_chip
from wattcast.kernels.lowering import CUDA_EVENT, TENSOR_EVENT
from wattcast.lab.fit.kernel_fit import (
    build_bundle,
    fit_idle_curve,
    fit_kernel_rows,
    starting_rule,
)
from wattcast.power.module_power import ModulePower
from wattcast.power.power_model import IdlePower, VoltageCurve
from wattcast.predictor.bundle.bundle_file import (
    FAMILIES,
    Bundle,
    ClockLawFile,
    shipped_bundle,
)
from wattcast.predictor.bundle.forecast import VoltageRule

COUNTS = (50, 100, 200)
DRAWS = 3
CARDS = ("a twin", "another chip", "a chip known by its catalogue entry")
SUSTAINED = 1 / 3  # of the rows
# log-spreads of the distortion
_PHASE = 0.15
_FAMILY = 0.08
_ENERGY = 0.15
_MODULE = 0.10
_IDLE = 0.08
ARMS = ("forecast", "forecast moved", "fit from nothing")


@dataclass(frozen=True)
class Setting:
    """A parent, and the rows of the pretended card: its own to fit, and others to test."""

    gpu: Gpu
    parent: Bundle
    card_rows: KernelRows
    test: KernelRows
    idle: IdleRows


def few_rows(
    gpu: str,
    card: str,
    tell: Tell,
) -> list[LedgerRow]:
    """Errors of the three ways of one card, by number of rows, mean over draws; the floor is the
    forecast's.
    """
    errors_of_arms: dict[tuple[int, str], list[Array]] = {}
    with one_thread():
        base = setting(gpu)
        for draw in range(DRAWS):
            some = pretended(base, card, draw)
            for count in COUNTS:
                tell(f"few rows: {card}, draw {draw + 1} of {DRAWS}, {count} rows")
                for arm, error in compared(some, count, draw).items():
                    errors_of_arms.setdefault((count, arm), []).append(error)
    return _rows(gpu, card, errors_of_arms)


def setting(gpu: str) -> Setting:
    """The parent from folds 0 to 2, the card's own rows from fold 3, the test from fold 4."""
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    idle = kernel_rows.load_idle_rows(gpu)
    shipped = shipped_bundle(gpu)
    if shipped is None:
        raise BadInput(
            f"no bundle ships for {gpu}: its intervals are needed. Run `wattcast lab fit kernels`."
        )
    fold = assign_folds(rows)
    usable = rows.to_judge() & on_random_data(rows)
    past = rows.select_rows(fold < 3)
    parent = build_bundle(
        fit_kernel_rows(past, chip, fit_idle_curve(idle, chip)),
        past,
        chip,
        shipped.residuals,
        "",
    )
    return Setting(
        chip,
        parent,
        rows.select_rows(usable & (fold == 3)),
        rows.select_rows(usable & (fold == 4)),
        idle,
    )


def pretended(
    base: Setting,
    card: str,
    draw: int,
) -> Setting:
    """The setting of a card."""
    if card == CARDS[1]:
        return distorted(base, draw)
    return base if card == CARDS[0] else replace(base, parent=starting_bundle(base.gpu))


class StartingPower(msgspec.Struct, forbid_unknown_fields=True):
    """``starting_power.yaml``: a power model from a catalogue entry alone."""

    full_rate_share: dict[str, float]
    idle_share_at_top_clock: float
    idle_share_at_lowest_clock: float
    idle_per_c: float
    idle_reference_c: float
    voltage: VoltageRule
    toggling: dict[str, float]
    effective_clock: dict[str, ClockLawFile]


def starting_bundle(gpu: Gpu) -> Bundle:
    """Make a bundle of ``gpu`` from its catalogue entry alone."""
    path = Path(__file__).with_name("starting_power.yaml")
    power = decode_yaml(path.read_bytes(), StartingPower, path.name)
    rule = starting_rule()
    limit_w, low_hz, top_hz = (
        float(x) for x in (gpu.power.limit_w, gpu.clocks.lowest_hz, gpu.clocks.max_hz)
    )
    shares = np.array([power.idle_share_at_lowest_clock, power.idle_share_at_top_clock])
    idle = IdlePower(
        np.array([low_hz, top_hz]), shares * limit_w, power.idle_reference_c, power.idle_per_c
    )
    if (published := gpu.power.idle_w) is not None:
        idle = replace(idle, clock_hz=published.clock_hz, power_w=published.value)
    voltage = VoltageCurve(
        np.array(power.voltage.clock_share) * top_hz, np.array(power.voltage.relative)
    )
    if (volts := gpu.power.voltage_v) is not None:
        rising = np.maximum.accumulate(volts.value)
        voltage = VoltageCurve(volts.clock_hz, rising / rising[-1])
    law = power.effective_clock.get(gpu.architecture)
    return Bundle(
        gpu=gpu.name,
        status=FitStatus.FORECAST,
        provenance=Provenance("starting rule"),
        corrections=rule.read_corrections(),
        launch=rule.launch.to_costs("launch"),
        power=ModulePower(_starting_energies(gpu, idle, power), idle, voltage),
        clock_law=None if law is None else law.to_law("effective_clock"),
        residuals=dict.fromkeys(FAMILIES, rule.residual),
        toggling=power.toggling,
        reference=reference_chip(gpu),
    )


def _starting_energies(
    gpu: Gpu,
    idle: IdlePower,
    rule: StartingPower,
) -> dict[str, float]:
    """Joules per event: the module's share of the power headroom over its full rate at the top
    clock.
    """
    limit_w = float(gpu.power.limit_w)
    top_hz = float(gpu.clocks.max_hz)
    dram = float(gpu.memory.byte_per_s)
    headroom_w = max(limit_w - float(idle.power_at(top_hz, idle.reference_c)), 0.3 * limit_w)
    chip_hz = float(gpu.sm_count) * top_hz
    pipes = gpu.pipes
    rate = {
        TENSOR_EVENT[d]: ("tensor", float(r) * chip_hz)
        for d, r in pipes.tensor_flop_per_cycle.items()
    }
    rate |= {
        CUDA_EVENT[d]: ("cuda", float(r) * chip_hz) for d, r in pipes.cuda_flop_per_cycle.items()
    }
    if pipes.sfu_op_per_cycle is not None:
        rate["sfu_op"] = ("sfu", float(pipes.sfu_op_per_cycle) * chip_hz)
    # Where the L2's rate is not published, twice the DRAM's stands for it, as on an H200.
    l2 = float(gpu.l2.byte_per_cycle) * top_hz if gpu.l2.byte_per_cycle is not None else 2.0 * dram
    rate |= {
        "l2_byte": ("l2", l2),
        "dram_read_byte": ("dram", dram),
        "dram_write_byte": ("dram", dram),
    }
    if gpu.links.nvlink_byte_per_s is not None:
        rate["link_byte"] = ("link", float(gpu.links.nvlink_byte_per_s))
    return {
        event: rule.full_rate_share[module] * headroom_w / full
        for event, (module, full) in rate.items()
    }


def distorted(base: Setting, seed: int) -> Setting:
    """The same as if the card were another: rows scaled by a distorted parent over the parent."""
    rng = np.random.default_rng([seed, 17])
    power = base.parent.power
    families = sorted({name.partition(".")[0] for name in base.parent.corrections})
    family_shifts = np.repeat(rng.normal(0.0, _FAMILY, len(families)), len(MOVED_PHASES))
    theta = np.concatenate([rng.normal(0.0, _PHASE, len(MOVED_PHASES)), family_shifts])
    own_shift = rng.normal(0.0, _MODULE, len(power.scalable_parts))
    idle = float(np.exp(rng.normal(0.0, _IDLE)))
    module_factor = np.exp(rng.normal(0.0, _ENERGY) + own_shift).tolist()
    truth = replace(
        base.parent,
        corrections=move_corrections(base.parent.corrections, theta, families, []),
        power=power.scale_energy(
            dict(zip(power.scalable_parts, module_factor, strict=True)), idle_factor=idle
        ),
    )
    card_rows, test = (_scaled(rows, base, truth) for rows in (base.card_rows, base.test))
    return replace(
        base,
        card_rows=card_rows,
        test=test,
        idle=[(hz, idle * w, c) for hz, w, c in base.idle],
    )


def _scaled(
    rows: KernelRows,
    base: Setting,
    truth: Bundle,
) -> KernelRows:
    ratio = predict_with_bundle(truth, rows, base.gpu) / predict_with_bundle(
        base.parent, rows, base.gpu
    )
    sustained = rows.is_kind("sustained")
    watts = np.where(sustained, ratio[:, 1], 1.0)
    hertz = np.where(sustained, ratio[:, 2], 1.0)
    by: Mapping[str, Array] = {
        "latency_s": ratio[:, 0],
        **dict.fromkeys(("power_w", "settled_power_w"), watts),
        **dict.fromkeys(("sm_clock_hz", "settled_clock_hz", "effective_clock_hz"), hertz),
    }
    return replace(
        rows, number={name: values * by.get(name, 1.0) for name, values in rows.number.items()}
    )


def compared(
    some: Setting,
    count: int,
    seed: int,
) -> dict[str, Array]:
    """Latency and power error in percent of the three ways, from ``count`` of the card's own
    rows.
    """
    card_rows = some.card_rows.select_rows(drawn(some.card_rows, count, seed))
    moved = move_forecast(card_rows, some.gpu, some.parent, some.idle).bundle
    alone = fit_kernel_rows(card_rows, some.gpu, fit_idle_curve(some.idle, some.gpu))
    bundles = (
        some.parent,
        moved,
        build_bundle(
            alone,
            card_rows,
            some.gpu,
            {},
            "",
        ),
    )
    return {
        arm: errors(bundle, some.test, some.gpu) for arm, bundle in zip(ARMS, bundles, strict=True)
    }


def drawn(
    rows: KernelRows,
    count: int,
    seed: int,
) -> Mask:
    """``count`` rows at random, a third of them sustained."""
    rng = np.random.default_rng([seed, count])
    sustained: npt.NDArray[np.int64] = rng.permutation(np.flatnonzero(rows.is_kind("sustained")))
    bursts = rng.permutation(np.flatnonzero(rows.is_kind("burst")))
    some = sustained[: round(SUSTAINED * count)]
    mask = np.zeros(len(rows), dtype=bool)
    mask[some] = True
    mask[bursts[: count - len(some)]] = True
    return mask


def errors(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
) -> Array:
    """Mean absolute error in percent: latency of bursts, power of sustained rows."""
    predicted = predict_with_bundle(bundle, rows, gpu)
    power_w, _, latency_s = settled_figures(rows)
    burst = rows.is_kind("burst")
    time = predicted[burst, 0] / latency_s[burst]
    power = predicted[~burst, 1] / power_w[~burst]
    return np.array([100.0 * np.mean(np.abs(ratio - 1.0)) for ratio in (time, power)])


def _rows(
    gpu: str,
    card: str,
    errors_of_arms: Mapping[tuple[int, str], list[Array]],
) -> list[LedgerRow]:
    out = []
    for i, quantity in enumerate(("latency", "power")):
        for (count, arm), draw_errors in errors_of_arms.items():
            if arm == ARMS[0]:
                continue
            values = np.array(draw_errors)[:, i]
            forecast = np.array(errors_of_arms[count, ARMS[0]])[:, i]
            worse = int((values > forecast + 0.1).sum())
            more: dict[str, Any] = {
                "draws": [round(v, 1) for v in values.tolist()],
                "worse_than_forecast": f"{worse} of {len(values)}",
            }
            where = f"{gpu} few rows, {quantity}, {card} pretended"
            out.append(
                make_ledger_row(
                    where,
                    f"{count} rows, {arm}",
                    count,
                    float(values.mean()),
                    float(forecast.mean()),
                    **more,
                )
            )
    return out


def few_rows_of_all_cards(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Return the rows of every pretended card."""
    return [row for card in CARDS for row in few_rows(gpu, card, tell)]


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("few-rows", few_rows_of_all_cards)
