"""Predict how a workload behaves over a card's core clocks, as a plant to control and to choose a
clock beforehand.

``build_predicted_plant`` gives any catalogue GPU and any workload to the controller.
``choose_forecast_settings`` picks the clock that an objective asks for before anything has run. For
that choice two things are added that the predictor does not take for granted
(``estimate_card_behaviour``):

- The DRAM part of time follows the core clock below the knee of
  ``predictor.timeline.slow_memory_path``, a GTX Titan X's; paper 004 describes the same of the HD
  7970 (section 3.5, figure 9).
- A card does not hold its power limit to the watt: four cards under limits (Zeus, training epochs)
  held 0.92 to 0.98 of them in the mean, an H200 690 to 700 W of 700. As in the validation with
  Zeus' rows, 0.98 is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.control.controller_coefficients import ESTIMATES
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    PlantTables,
    Settings,
    list_sm_counts,
    move_knob,
)
from wattcast.control.savings import student_t
from wattcast.control.search_problem import (
    BOUND_PENALTY,
    ControllerTuning,
    Objective,
)
from wattcast.core.arrays import Array
from wattcast.core.errors import (
    BadInput,
    UnknownName,
    bad_value,
)
from wattcast.hardware import Gpu
from wattcast.predictor import api
from wattcast.predictor.kernel_coefficients import MEMORY_KNEE
from wattcast.workload.graph import Graph

POINTS = 64  # clocks at which the curves are sampled, for the governor's clock between two levels
ITERATIONS = 100
NO_LIMIT_W = 1e6
FEWEST_FORECASTS = 5  # of other families, that a bound can be calibrated on
ONE_SIDED_Z = 1.644854  # 95 % quantile of the normal distribution
LEVELS = 24  # of the core clock, where the catalogue's steps are finer
ERROR_POINTS = 71  # at which errors of forecasts are compared
_NAMED = re.compile(
    r"(?P<family>[a-z0-9]+)model_(?P<model>[\w.-]+?)_p(?P<dtype>bf16|fp16|fp32)"
    r"_b(?P<batch>\d+)_s(?P<seq>\d+)"
    r"_mode(?P<phase>prefill|decode)(?:_attn(?P<attention>eager|flash))?"
)


@dataclass(frozen=True)
class ClockCurves:
    """Hold predicted time and mean power of a workload over the core clock, as if there were no
    power limit.
    """

    clock_hz: Array  # (clock,), as are the other arrays
    time_s: Array
    power_w: Array
    idle_w: Array
    limit_w: float
    status: str = ""  # of the coefficients behind them


def build_predicted_plant(
    workloads: Mapping[str, str | Path | Graph],
    gpu: Gpu,
    options: Mapping[str, object] | None = None,
    iterations: int = ITERATIONS,
    roles: Sequence[KnobRole] = (KnobRole.CORE_CLOCK,),
) -> PlantTables:
    """Make a plant of a catalogue GPU: every workload is an application, run over and over.

    Its knobs are those of ``roles``: core clock, memory clock, number of SMs; others stay at their
    highest. Bandwidth follows the memory clock. Work on fewer SMs is predicted as on a card that
    has no more; idle power stays that of the card."""
    axes = _list_axes(gpu, roles)
    knobs = [Knob(role, levels) for role, levels in axes.items() if len(levels) > 1]
    lattice = Lattice(tuple(knobs))
    cards = _list_cards(gpu, axes)
    core_hz = np.asarray(axes[KnobRole.CORE_CLOCK])
    more: dict[str, Any] = {**(options or {}), "clock": core_hz}
    predictions = [_predict_on_cards(workload, cards, more) for workload in workloads.values()]
    shape = (
        len(workloads),
        len(axes[KnobRole.COMPUTE_UNITS]),
        len(axes[KnobRole.MEMORY_CLOCK]),
        len(core_hz),
    )

    def tabulate(name: str) -> Array:
        """Return a quantity as a flat table, in which the last knob varies fastest."""
        rows = [[getattr(prediction, name) for prediction in row] for row in predictions]
        by_memory_then_core = np.stack(rows).reshape(shape)
        return by_memory_then_core.swapaxes(2, 3).reshape(len(workloads), -1)

    idle = gpu.power.idle_w
    lowest_hz = float(np.min(gpu.clocks.min_hz or gpu.clocks.max_hz))
    orders = {}
    for phase, name in enumerate(workloads):
        orders[name] = np.full(iterations, phase, dtype=np.int64)
    return PlantTables(
        name=gpu.name,
        lattice=lattice,
        default=lattice.top,
        kernels=tuple(workloads),
        time_s=tabulate("latency_s"),
        power_w=tabulate("power_w"),
        applications=orders,
        idle_w=None if idle is None else float(np.min(idle.value_at(lowest_hz))),
        limit_w=float(np.max(gpu.power.limit_w)),
        clock_hz=tabulate("clock_hz"),
        source=f"predicted by Wattcast ({predictions[0][0].status} coefficients)",
    )


def _predict_on_cards(
    workload: str | Path | Graph,
    cards: Sequence[Gpu],
    options: Mapping[str, Any],
) -> list[Any]:
    return [api.predict(workload, card, **options) for card in cards]


def _list_axes(gpu: Gpu, roles: Sequence[KnobRole]) -> dict[KnobRole, tuple[float, ...]]:
    """Return the levels of each knob; one level for a knob that is not turned."""
    sm_count = int(np.max(gpu.sm_count))
    core_hz = list_core_clocks(gpu)
    axes: dict[KnobRole, tuple[float, ...]] = {
        KnobRole.COMPUTE_UNITS: (float(sm_count),),
        KnobRole.CORE_CLOCK: core_hz[-1:],
        KnobRole.MEMORY_CLOCK: (1.0,),
    }
    if KnobRole.COMPUTE_UNITS in roles:
        axes[KnobRole.COMPUTE_UNITS] = list_sm_counts(sm_count)
    if KnobRole.CORE_CLOCK in roles:
        axes[KnobRole.CORE_CLOCK] = core_hz
    if KnobRole.MEMORY_CLOCK in roles:
        memory_hz = tuple(sorted(gpu.clocks.memory_hz or ()))
        if len(memory_hz) < 2:
            form = f"core or sms, as the catalogue lists no two memory clocks of {gpu.name}"
            raise bad_value("--knobs", form, "memory")
        axes[KnobRole.MEMORY_CLOCK] = memory_hz
    return axes


def _list_cards(gpu: Gpu, axes: Mapping[KnobRole, tuple[float, ...]]) -> list[Gpu]:
    """Return the card with each number of SMs, and each memory clock for each of them."""
    memory_hz = axes[KnobRole.MEMORY_CLOCK]
    cards = []
    for sm_count in axes[KnobRole.COMPUTE_UNITS]:
        for clock_hz in memory_hz:
            byte_per_s = gpu.memory.byte_per_s * clock_hz / memory_hz[-1]
            memory = replace(gpu.memory, byte_per_s=byte_per_s)
            cards.append(replace(gpu, sm_count=sm_count, memory=memory))
    return cards


def list_core_clocks(gpu: Gpu, levels: int = LEVELS) -> tuple[float, ...]:
    """List core clocks of a catalogue GPU, on its own steps where they are published."""
    high_hz = float(np.max(gpu.clocks.max_hz))
    low_hz = max(float(np.min(gpu.clocks.lowest_hz)), ESTIMATES.lowest_share * high_hz)
    clocks_hz = gpu.clocks.snap_to_steps(np.linspace(low_hz, high_hz, levels))
    return tuple(np.unique(clocks_hz).tolist())


def forecast_workload(
    workload: str | Path | Graph,
    gpu: Gpu,
    clocks_hz: Sequence[float],
    options: Mapping[str, object] | None = None,
) -> ClockCurves:
    """Predict one workload over the range of a card's clocks."""
    grid = np.linspace(clocks_hz[0], clocks_hz[-1], POINTS)
    idle = gpu.power.idle_w
    more: dict[str, Any] = dict(options or {})
    free = api.predict(
        workload,
        gpu,
        clock=grid,
        power_limit=NO_LIMIT_W,
        force=True,
        **more,
    )
    idle_w = np.zeros(grid.shape)
    if idle is not None:
        idle_w = np.minimum(idle.value_at(grid), free.power_w)
    return ClockCurves(
        clock_hz=grid,
        time_s=np.asarray(free.latency_s),
        power_w=np.asarray(free.power_w),
        idle_w=idle_w,
        limit_w=float(np.min(gpu.power.limit_w)),
        status=str(free.status),
    )


def forecast_applications(
    tables: PlantTables,
    gpu: Gpu,
    folder: Path | None = None,
) -> tuple[dict[str, ClockCurves], dict[str, str]]:
    """Predict the applications of a replayed table; return also why others cannot be predicted.

    An application's operators are read from ``folder`` (``NAME.json``, with or without the
    attention's tag) where they are there. Otherwise its name is taken apart and the model's own
    template is used."""
    _, clocks = _find_core_clocks(tables)
    forecasts: dict[str, ClockCurves] = {}
    missing: dict[str, str] = {}
    for name in tables.applications:
        try:
            workload, options = find_named_workload(name, folder)
            forecasts[name] = forecast_workload(workload, gpu, clocks.tolist(), options)
        except (BadInput, UnknownName) as error:
            missing[name] = str(error)
    return forecasts, missing


def _find_core_clocks(tables: PlantTables) -> tuple[int, Array]:
    """Return the position of the core clock among the knobs, and its levels in Hz."""
    which = tables.lattice.find_knob(KnobRole.CORE_CLOCK)
    if which is None:
        raise bad_value(tables.name, "a table over core clocks", "none")
    return which, np.asarray(tables.lattice.knobs[which].levels)


def find_named_workload(name: str, folder: Path | None) -> tuple[str | Path, dict[str, object]]:
    """Find the workload behind a run's name: its operator list, or a model and options."""
    for stem in (name, re.sub(r"_attn(eager|flash)$", "", name)):
        path = None if folder is None else folder / f"{stem}.json"
        if path is not None and path.is_file():
            return path, {}
    match = _NAMED.fullmatch(name)
    if match is None:
        expected = (
            "its operator list in --workloads, or a name such as "
            "gpt2model_gpt2_pbf16_b8_s128_modeprefill"
        )
        raise bad_value("application", expected, name)
    model = re.sub(r"(?<=\d)p(?=\d)", ".", match["model"])  # opt-1p3b
    return f"bert-{model}" if match["family"] == "bert" else model, {
        "batch": int(match["batch"]),
        "seq": int(match["seq"]),
        "dtype": match["dtype"],
        "phase": match["phase"],
        "attention": match["attention"] or "eager",
        "head": "none",
    }


@dataclass(frozen=True)
class SlowdownErrors:
    """Hold by how much forecasts missed the slowdown of applications, in logs, over the share of
    the top clock.
    """

    clock_share: Array  # (clock,), ascending
    by_application: Mapping[str, Array]  # measured less forecast, (clock,)

    def margins(
        self,
        application: str,
        clock_share: Array,
    ) -> Array | None:
        """Return what to add to a forecast so that it is exceeded with a chance of 5 %,
        ``(clock,)``.

        With mean m and deviation s of the errors of n applications of other families (the text
        before the first "_"), the margin is m + t·s·√(1 + 1/n), t being Student's 95 % quantile.
        None where fewer than five are known."""
        family = application.split("_")[0]
        rows = [
            np.interp(clock_share, self.clock_share, row)
            for name, row in self.by_application.items()
            if name.split("_")[0] != family
        ]
        count = len(rows)
        if count < FEWEST_FORECASTS:
            return None
        errors = np.stack(rows)
        quantile = student_t(count - 1, ONE_SIDED_Z)
        spread = quantile * errors.std(axis=0, ddof=1) * np.sqrt(1 + 1 / count)
        return np.asarray(np.where(clock_share < 1.0, errors.mean(axis=0) + spread, 0.0))


def measure_slowdown_errors(
    plants: Sequence[PlantTables], forecasts: Mapping[str, ClockCurves]
) -> SlowdownErrors:
    """Compare forecast and measured slowdowns of all applications that have both."""
    shares = np.linspace(ESTIMATES.lowest_share, 1.0, ERROR_POINTS)
    errors: dict[str, Array] = {}
    for tables in plants:
        core, levels_hz = _find_core_clocks(tables)
        settings = [move_knob(tables.default, core, level) for level in range(len(levels_hz))]
        along = [tables.lattice.flat_index(setting) for setting in settings]
        default = tables.default[core]
        for name in tables.applications:
            if name not in forecasts:
                continue
            forecast_s, _ = estimate_card_behaviour(forecasts[name], levels_hz)
            measured_s = tables.time_s[tables.order(name)[0], along]
            measured = np.log(measured_s / measured_s[default])
            forecast = np.log(forecast_s / forecast_s[default])
            level_shares = levels_hz / levels_hz[default]
            errors[name] = np.interp(shares, level_shares, measured - forecast)
    return SlowdownErrors(shares, errors)


def choose_forecast_settings(
    tables: PlantTables,
    forecasts: Mapping[str, ClockCurves],
    objective: Objective,
    errors: SlowdownErrors | None = None,
) -> dict[str, Settings]:
    """Choose the settings of each application from its forecast.

    With ``errors``, a bound on the slowdown is kept with a chance of 95 %, by how forecasts of
    other applications missed; without, it is kept by the forecast at its word."""
    core, levels_hz = _find_core_clocks(tables)
    default = tables.default[core]
    worth = ControllerTuning().worth
    chosen = {}
    for name, curves in forecasts.items():
        if name not in tables.applications:
            continue
        margins = None
        if errors is not None:
            margins = errors.margins(name, levels_hz / levels_hz[default])
        level = choose_clock_level(
            curves,
            levels_hz,
            objective,
            default,
            worth,
            margins,
        )
        chosen[name] = move_knob(tables.default, core, level)
    return chosen


def choose_clock_level(
    curves: ClockCurves,
    levels_hz: Array,
    objective: Objective,
    default: int,
    worth: float,
    margins: Array | None = None,
) -> int:
    """Choose the level with the best score; of those within ``worth`` of it the lowest.

    ``margins`` are added to the logarithm of the slowdown before it is compared with its bound.
    """
    time_s, power_w = estimate_card_behaviour(curves, levels_hz)
    if margins is None or objective.slowdown is None:
        score = objective.log_scores(time_s, power_w, time_s[default])
    else:
        score = replace(objective, slowdown=None).log_scores(time_s, power_w, time_s[default])
        over = np.log(time_s / time_s[default]) + margins - np.log1p(objective.slowdown)
        score = score + np.where(over > 0.0, BOUND_PENALTY * (1.0 + over), 0.0)
    return int(np.nonzero(score <= score.min() + worth)[0][0])


def estimate_card_behaviour(curves: ClockCurves, levels_hz: Array) -> tuple[Array, Array]:
    """Return time and power at each level with the path to DRAM and the power limit, ``(level,)``.

    With t_core and t_rest the parts of time at the top clock f_top that follow the core clock and
    that do not, time at f is t_core·f_top/f + t_rest·max(1, 0.86·f_top/f). Work that takes longer
    draws less: the energy above idle power is spread over its time. A level whose power exceeds
    0.98 of the limit runs at the highest clock that does not."""
    core_s, other_s = split_core_time(curves)
    stretch = curves.clock_hz[-1] / curves.clock_hz
    by_law_s = core_s * stretch + other_s * np.maximum(1.0, MEMORY_KNEE * stretch)
    slowdown = by_law_s / (core_s * stretch + other_s)
    time_s = curves.time_s * slowdown
    power_w = curves.idle_w + (curves.power_w - curves.idle_w) / slowdown

    # The clock that the power limit allows.
    limit_w = ESTIMATES.held_share * curves.limit_w
    allowed_hz = float(curves.clock_hz[-1])
    over = np.nonzero(power_w > limit_w)[0]
    if over.size:
        first = int(over[0])
        around = slice(max(first - 1, 0), first + 1)  # the two points that the limit lies between
        allowed_hz = float(np.interp(limit_w, power_w[around], curves.clock_hz[around]))
    clock_hz = np.minimum(levels_hz, allowed_hz)
    level_s = np.interp(clock_hz, curves.clock_hz, time_s)
    return level_s, np.interp(clock_hz, curves.clock_hz, power_w)


def split_core_time(curves: ClockCurves) -> tuple[float, float]:
    """Split the time at the highest clock into a part that follows the core clock and one that does
    not.

    Fits t(f) = a·f_top/f + b by least squares of relative errors; neither part is negative.
    """
    stretch = curves.clock_hz[-1] / curves.clock_hz
    columns = np.stack([stretch, np.ones_like(stretch)], axis=-1) / curves.time_s[:, np.newaxis]
    a, b = np.linalg.lstsq(columns, np.ones_like(stretch), rcond=None)[0]
    if a >= 0 and b >= 0:
        return float(a), float(b)
    top = float(curves.time_s[-1])
    return (top, 0.0) if b < 0 else (0.0, top)
