"""Explore GPUs, options, settings and designs from Python, with the names and units of the command
line.

    import wattcast

    exploration = wattcast.explore(
        "llama3-8b", "h200,l40s", ["dtype=bf16,fp8", "batch=1,8,32"], phase="decode", seq=1024
    )
    exploration.rows[0]["energy_j_per_token"]

    sweep = wattcast.explore.explore_designs(
        "llama3-8b", "h200", ["sm_count=64:192:4", "clock=1GHz,1.5GHz"], seq=64
    )
    sweep.summary.front["latency_s"]

Columns are in SI units and named with their unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import (
    Any,
    Unpack,
    get_type_hints,
)

from wattcast import hardware
from wattcast.core import (
    BadInput,
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import table_rows
from wattcast.core.errors import MissingSpecification, WattcastError
from wattcast.core.user_results import UserResult
from wattcast.explore.search_space import (
    parse_constraints,
    parse_space,
    parse_values,
)
from wattcast.explore.study import Study, tabulate_points
from wattcast.explore.sweep import (
    ReportProgress,
    Runner,
    SweepResult,
    run_sweep,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.gpu import DEFAULT_TEMPERATURE_C
from wattcast.options.exploring_options import (
    EXPLORE,
    EXPLORE_DESIGNS,
    STUDY,
    BestBound,
    DesignOutput,
    DesignSample,
)
from wattcast.options.keywords import (
    ExploreDesignsKeywords,
    ExploreKeywords,
    StudyKeywords,
)
from wattcast.options.setting_options import PriceOptions, SettingOptions
from wattcast.options.verb_options import ParsedOptions
from wattcast.predictor.api import find_bundle, find_gpu
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.predictor.prices import Prices, read_prices
from wattcast.predictor.support_distances import SupportWord
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import OPTION_NAMES, ModelOptions
from wattcast.workload.readers import load_workload
from wattcast.workload.readers.load_workload import Workload


@EXPLORE_DESIGNS.sign
def explore_designs(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    *,
    runner: Runner | None = None,
    progress: ReportProgress | None = None,
    **options: Unpack[ExploreDesignsKeywords],
) -> SweepResult:
    """Evaluate every point of a space of chips and settings, and return the Pareto front.

    All points are written to ``out``. ``vary`` and ``where`` are written as on the command line
    (``explore/search_space.py``); other options are those of ``ModelOptions``.
    """
    chosen = EXPLORE_DESIGNS.parse(options)
    output = chosen[DesignOutput]
    study = _build_study(workload, gpu, vary, chosen)
    out = None if output.out is None else Path(output.out)
    return run_sweep(
        study,
        out,
        tuple(output.front),
        runner,
        progress,
        output.yes,
    )


def build_study(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    **options: Unpack[StudyKeywords],
) -> Study:
    """Build the study that these words describe."""
    return _build_study(workload, gpu, vary, STUDY.parse(options))


def _build_study(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    chosen: ParsedOptions,
) -> Study:
    chip = find_gpu(gpu)
    points = chosen[DesignSample]
    settings = chosen[SettingOptions]
    space = parse_space(list(vary), chip, points.sample, points.seed)
    varied = {axis.field.name for axis in space.axes}
    words = _write_settings(settings)
    for name, text in words.items():
        if text is not None and name in varied:
            raise bad_value(name, "one value, or --vary", "both")
    clock_hz = None
    if words["clock"] is not None:
        # parsed as a space of one value, which checks that the card can be set to it
        axis = parse_space([f"clock={words['clock']}"], chip).axes[0]
        clock_hz = float(axis.values[0])
    at = OperatingPoint(clock_hz=clock_hz, power_limit_w=settings.power_limit_w)
    graph = load_workload.load_workload(workload, chosen[ModelOptions])
    bundle = find_bundle(settings.bundle, chip)
    constraints = parse_constraints(points.where, chip, space.columns)
    study = Study(
        graph,
        chip,
        bundle,
        space,
        at,
        constraints,
    )
    return study if points.hold is None else _hold_budget(study, points.hold)


def _hold_budget(study: Study, budget: str) -> Study:
    """Return the study with a budget of the base that every design keeps."""
    check_names("hold", budget, ("area", "power"))
    columns = study.space.columns
    if budget == "area":
        if "sm_count" in columns:
            raise bad_value("hold", "area without --vary sm_count, which gives way", "both")
        return replace(study, holds_area=True)
    if "asked_power_limit_w" in columns:
        raise bad_value("hold", "power without --vary power_limit, which it sets", "both")
    base = predict_graph(study.graph, study.gpu, study.settings, study.bundle)
    settings = replace(
        study.settings, power_limit_w=float(base.power_w) / study.bundle.governor_share
    )
    return replace(study, settings=settings)


def _write_settings(settings: SettingOptions) -> dict[str, str | None]:
    """Return the clock and the power limit as the words of an axis; None where they are not set."""
    clock = None if settings.clock_hz is None else f"{settings.clock_hz!r}Hz"
    limit = None if settings.power_limit_w is None else f"{settings.power_limit_w!r}W"
    return {"clock": clock, "power_limit": limit}


# Points, from the best on, among which one that is not far from what was measured is sought.
_MOST_JUDGED = 200
MOST_POINTS = 20_000  # combinations of a sweep; `explore designs` takes millions
SETTING_COLUMNS = {
    "clock": "asked_clock_hz",
    "power_limit": "asked_power_limit_w",
    "temperature": "temperature_c",
}
_SETTING_AXES = tuple(SETTING_COLUMNS.values())
_PREDICTED_COLUMNS = ("latency_s", "power_w", "energy_j", "clock_hz", "capped", "limit_met")


class ExploreObjective(StrEnum):
    """Name what the best point has least of; energy and cost per token, picture or run."""

    ENERGY = "energy"
    ED = "ed"  # energy x delay
    ED2 = "ed2"  # energy x delay²
    LATENCY = "latency"
    COST = "cost"


OBJECTIVE_COLUMNS = {
    ExploreObjective.ENERGY: "energy_j_per_unit",
    ExploreObjective.ED: "energy_delay_js",
    ExploreObjective.ED2: "energy_delay2_js2",
    ExploreObjective.LATENCY: "latency_s",
    ExploreObjective.COST: "cost_per_unit",
}


@dataclass(frozen=True)
class Alternative:
    """Hold one way to run the workload, or why it cannot be run."""

    names: Mapping[str, Any]  # what distinguishes it: the GPU, options and settings that vary
    results: Mapping[str, Any]  # columns; empty where it cannot be run
    reason: str = ""
    notes: tuple[str, ...] = ()
    chip: Gpu | None = None
    # Says how far clock and limit are from what was measured; empty: they are not far.
    describe_risk: Callable[[], str] = field(default=str, compare=False)

    @property
    def row(self) -> dict[str, Any]:
        """Return names and results as one row, for tables and JSON."""
        gpu = {} if self.chip is None else {"gpu": self.chip.name}
        return {
            **gpu,
            **self.names,
            **self.results,
            "reason": self.reason or None,
        }


@dataclass(frozen=True, repr=False)
class Exploration(UserResult):
    """Hold every combination, and the best by each objective among those within the bound.

    The best is one whose clock and power limit are not far from what was measured, if there is one.
    """

    title: str
    axes: tuple[str, ...]  # names that vary: gpu, options, settings
    points: tuple[Alternative, ...]
    best: Mapping[ExploreObjective, Alternative]
    bound: str
    prices: Prices
    bolder: Mapping[ExploreObjective, Alternative]  # better, and far from what was measured

    plain_by = "wattcast.explore.exploration_report:exploration_json"
    drawn_by = "wattcast.explore.exploration_figures:draw_exploration"
    rows_in = "points"

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        best = self.best.get(ExploreObjective.ENERGY)
        least = "" if best is None else f"; least energy: {_name_point(best)}"
        return f"{self.title}: {len(self.points)} points over {', '.join(self.axes)}{least}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return one row per point."""
        return [point.row for point in self.points]


def _name_point(point: Alternative) -> str:
    """Return what distinguishes a point, in words."""
    return ", ".join(f"{name} {value}" for name, value in point.names.items())


@EXPLORE.sign
def explore(
    workload: Workload,
    gpu: str | Path | Gpu | Sequence[str | Path | Gpu],
    vary: Sequence[str] = (),
    **options: Unpack[ExploreKeywords],
) -> Exploration:
    """Predict every combination of GPUs, options and settings.

    ``gpu`` is one GPU, several (``"h200,l4"`` or a list) or ``all``. Each of ``vary`` is an option
    of a model (``dtype=bf16,fp8``, ``batch=1,2,4``, ``batch=8:64:8``), or ``clock``,
    ``power_limit`` or ``temperature`` with units (``clock=600MHz:1980MHz:15MHz``; ``clock=all``
    takes every clock of the card). The best point is sought among those that fit, at most
    ``slowdown`` (``5%``) slower than the fastest, or within ``latency``. ED = E·t and ED² = E·t²
    [Gonzalez1996; Martin2001]. Speed-up and energy ratio are against the first point that runs.

    >>> import wattcast
    >>> vary = ["dtype=fp32,bf16", "clock=1GHz,1.5GHz"]
    >>> points = wattcast.explore("gpt2", "h200", vary, seq=128).points
    >>> [(point.names["dtype"], point.names["asked_clock_hz"] / 1e9) for point in points]
    [('fp32', 1.0), ('fp32', 1.5), ('bf16', 1.0), ('bf16', 1.5)]
    """
    chosen = EXPLORE.parse(options)
    settings = chosen[SettingOptions]
    model_words = chosen.select_keywords(ModelOptions)
    prices = read_prices(chosen[PriceOptions])
    chips = _find_gpus(gpu)
    grid = _parse_grid(vary, _write_settings(settings), chips)
    if load_workload.find_model(workload) is None and grid.options:
        raise bad_value("workload", "a model, whose options can vary", "a list of operators")
    tried = _predict_grid(
        workload,
        model_words,
        chips,
        grid,
        prices,
        settings.bundle,
    )
    points = _compare_points(tried)
    if grid.axes == ("gpu",):
        points.sort(key=_rank_gpu)
    within, bound = _select_within(points, chosen[BestBound])
    best, bolder = _choose_best(within)
    where = f"{len(chips)} GPUs" if len(chips) > 1 else chips[0].name
    name = workload.name if isinstance(workload, (Graph, Path)) else str(workload)[:80]
    return Exploration(
        f"{name} on {where}",
        grid.axes,
        tuple(points),
        best,
        bound,
        prices,
        bolder,
    )


def _find_gpus(gpu: str | Path | Gpu | Sequence[str | Path | Gpu]) -> list[Gpu]:
    if isinstance(gpu, (Path, Gpu)):
        chips = [find_gpu(gpu)]
    elif gpu == "all":
        chips = [find_gpu(name) for name in hardware.gpu_names()]
    elif isinstance(gpu, str):
        chips = [find_gpu(name.strip()) for name in gpu.split(",")]
    else:
        chips = [find_gpu(name) for name in gpu]
    names = [chip.name for chip in chips]
    for name in names:
        if names.count(name) > 1:
            raise bad_value("gpu", "each GPU once", f"{name} twice")
    return chips


@dataclass(frozen=True)
class _Grid:
    """What varies: options of the model with their values, and settings with their texts."""

    options: dict[str, list[Any]]
    settings: dict[str, str]
    axes: tuple[str, ...]  # columns that vary

    def label(
        self,
        chip: Gpu,
        names: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what distinguishes a combination of options on a GPU."""
        return {"gpu": chip.name, **names} if "gpu" in self.axes else dict(names)


def _parse_grid(
    vary: Sequence[str],
    fixed: Mapping[str, str | None],
    chips: Sequence[Gpu],
) -> _Grid:
    """Read what varies, and settings that are ``fixed`` at one value."""
    options, settings = _parse_axes(vary)
    columns = [SETTING_COLUMNS[name] for name in settings]
    axes = (*options, *columns)
    if len(chips) > 1:
        axes = ("gpu", *axes)
    if not axes:
        expected = "several GPUs, or an option to vary, such as dtype=bf16,fp8"
        raise bad_value("vary", expected, "none")
    for name, value in fixed.items():
        if value is None:
            continue
        if name in settings:
            raise bad_value(name, "one value, or vary", "both")
        settings[name] = value
    count = len(chips) * math.prod(len(values) for values in options.values())
    if count > MOST_POINTS:
        expected = f"at most {MOST_POINTS:,} combinations"
        raise bad_value("vary", expected, f"{count:,}", "Name fewer values.")
    return _Grid(options, settings, axes)


def _predict_grid(
    workload: Workload,
    model_words: Mapping[str, Any],
    chips: Sequence[Gpu],
    grid: _Grid,
    prices: Prices,
    bundle: Bundle | str | Path | None,
) -> list[Alternative]:
    """Predict every combination of options on every GPU, the points of one GPU together."""
    by_chip: dict[str, list[Alternative]] = {chip.name: [] for chip in chips}
    for values in itertools.product(*grid.options.values()):
        names = dict(zip(grid.options, values, strict=True))
        try:
            model_options = ModelOptions.from_names(**{**model_words, **names})
            graph = load_workload.load_workload(workload, model_options)
        except WattcastError as error:
            for chip in chips:
                refusal = Alternative(grid.label(chip, names), {}, str(error), chip=chip)
                by_chip[chip.name].append(refusal)
            continue
        for chip in chips:
            label = grid.label(chip, names)
            by_chip[chip.name] += _try_settings(
                graph,
                label,
                chip,
                grid,
                prices,
                bundle,
            )
    return list(itertools.chain(*by_chip.values()))


def _compare_points(tried: Sequence[Alternative]) -> list[Alternative]:
    """Compare the points that run with the fastest and with the first; raise where none runs."""
    ran = [point.results for point in tried if point.results]
    if not ran:
        reasons: dict[str, None] = {}
        for point in tried:
            reason = f"{point.names.get('gpu', '')}: {point.reason}".removeprefix(": ")
            reasons[reason] = None
        few = "; ".join(list(reasons)[:3])
        raise BadInput(f"none of the {len(tried)} combinations can be run: {few}")
    fastest_s = min(results["latency_s"] for results in ran)
    return [_compare_with(point, ran[0], fastest_s) if point.results else point for point in tried]


_Choices = dict[ExploreObjective, Alternative]


def _choose_best(points: Sequence[Alternative]) -> tuple[_Choices, _Choices]:
    """Return the best point by each objective, and better ones that are far from measurements."""
    best = {}
    bolder = {}
    for objective, column in OBJECTIVE_COLUMNS.items():
        ranked = [point for point in points if point.results[column] is not None]
        if not ranked:
            continue
        ranked.sort(key=lambda point: point.results[column])
        near = (point for point in ranked[:_MOST_JUDGED] if not point.describe_risk())
        best[objective] = next(near, ranked[0])
        if best[objective] is not ranked[0]:
            bolder[objective] = ranked[0]
    return best, bolder


def _rank_gpu(point: Alternative) -> tuple[bool, bool, float]:
    """Order GPUs by energy.

    Those with too little memory come after those that fit, those that cannot run it at the end.
    """
    results = point.results
    energy_j = float(results.get("energy_j_per_unit", 0.0))
    return not results, results.get("fits") is False, energy_j


def _try_settings(
    graph: Graph,
    names: Mapping[str, Any],
    gpu: Gpu,
    grid: _Grid,
    prices: Prices,
    bundle: Bundle | str | Path | None,
) -> list[Alternative]:
    """Predict one workload at all settings of a GPU.

    What cannot be run is a result, not a failure of the sweep.
    """
    try:
        # without settings the card's own limit is the one point
        settings = grid.settings or {"power_limit": f"{float(gpu.power.limit_w)!r}W"}
        words = []
        for name, text in settings.items():
            words.append(f"{name}={_all_clocks(gpu) if text == 'all' else text}")
        space = parse_space(words, gpu)
        if space.size > MOST_POINTS:
            expected = f"at most {MOST_POINTS:,} settings"
            raise bad_value("vary", expected, f"{space.size:,}", "Take larger steps.")
        fitted = find_bundle(bundle, gpu)
        columns = tabulate_points(Study(graph, gpu, fitted, space), 0, space.size)
    except WattcastError as error:
        return [Alternative(names, {}, str(error), chip=gpu)]

    notes = (*graph.assumptions, *fitted.assumptions)
    points = []
    for row in table_rows(columns):
        results = _describe_point(graph, gpu, row, prices)
        results["coefficients"] = str(fitted.status)
        varied = {column: row[column] for column in grid.axes if column in _SETTING_AXES}
        risk = cache(
            partial(
                describe_point_risk,
                graph,
                gpu,
                _read_settings(row),
                fitted,
            )
        )
        points.append(
            Alternative(
                {**names, **varied},
                results,
                notes=notes,
                chip=gpu,
                describe_risk=risk,
            )
        )
    return points


def _describe_point(
    graph: Graph,
    gpu: Gpu,
    row: Mapping[str, Any],
    prices: Prices,
) -> dict[str, Any]:
    """Return the columns of one point: of one GPU, of all, and per token, picture or run."""
    gpus = graph.gpu_count
    unit, units_a_run = graph.unit
    latency_s = row["latency_s"]
    total_j = row["energy_j"] * gpus
    unit_j = total_j / units_a_run
    cost = prices.cost(gpu.name, unit_j, latency_s * gpus / units_a_run)
    carbon_g = prices.carbon_g(unit_j)
    return {
        "gpus": gpus,
        **{name: row[name] for name in _PREDICTED_COLUMNS},
        "total_power_w": row["power_w"] * gpus,
        "total_energy_j": total_j,
        "tokens_per_s": None if graph.tokens is None else graph.tokens / latency_s,
        "energy_j_per_token": None if graph.tokens is None else total_j / graph.tokens,
        "items_per_s": None if graph.items is None else graph.items / latency_s,
        "energy_j_per_item": None if graph.items is None else total_j / graph.items,
        "unit": unit,
        "units_per_s": units_a_run / latency_s,
        "energy_j_per_unit": unit_j,
        "units_per_j": 1.0 / unit_j,
        "energy_delay_js": unit_j * latency_s,
        "energy_delay2_js2": unit_j * latency_s**2,
        "memory_byte": graph.memory_byte,
        "fits": row.get("fits"),
        "cost_per_unit": cost,
        "carbon_g_per_unit": carbon_g,
        "cost_per_million_tokens": _per_million(cost, unit),
        "carbon_g_per_million_tokens": _per_million(carbon_g, unit),
    }


def _per_million(amount: float | None, unit: str) -> float | None:
    """Return the amount of a million tokens; None where it is unknown or no tokens are counted."""
    return None if amount is None or unit != "token" else amount * 1e6


def _read_settings(row: Mapping[str, Any]) -> OperatingPoint:
    """Return the settings of a point, those of the card where they do not vary."""
    temperature_c = row.get(SETTING_COLUMNS["temperature"])
    return OperatingPoint(
        row.get(SETTING_COLUMNS["clock"]),
        row.get(SETTING_COLUMNS["power_limit"]),
        DEFAULT_TEMPERATURE_C if temperature_c is None else temperature_c,
    )


def describe_point_risk(
    graph: Graph,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> str:
    """Say how far clock and power limit of a point are from what was measured.

    The text is empty where they are not far.
    """
    support = predict_graph(graph, gpu, at, bundle).support
    reasons = []
    for distance in support.distances:
        is_setting = distance.dimension in ("clock", "power limit")
        if is_setting and distance.word is SupportWord.FAR:
            reasons.append(distance.reason)
    return f"far from what was measured: {'; '.join(reasons)}" if reasons else ""


def _all_clocks(gpu: Gpu) -> str:
    low = gpu.clocks.min_hz
    high = gpu.clocks.max_hz
    step = gpu.clocks.step_hz
    if low is None or step is None:
        raise MissingSpecification(
            f"{gpu.name}: its lowest clock or the step between clocks is not published. "
            "Say which clocks to try: --vary clock=600MHz:1500MHz:15MHz."
        )
    return f"{float(low)!r}Hz:{float(high)!r}Hz:{float(step)!r}Hz"


def _compare_with(
    point: Alternative,
    first: Mapping[str, Any],
    fastest_s: float,
) -> Alternative:
    """Add slowdown against the fastest point, and speed-up and energy against the first that
    runs.
    """
    more = {
        "slowdown": point.results["latency_s"] / fastest_s - 1.0,
        "speedup": point.results["units_per_s"] / first["units_per_s"],
        "energy_ratio": point.results["energy_j_per_unit"] / first["energy_j_per_unit"],
    }
    return replace(point, results={**point.results, **more})


def _select_within(
    points: Sequence[Alternative], bound: BestBound
) -> tuple[list[Alternative], str]:
    """Return the points that run, fit and keep the bound, and describe the bound."""
    ran = [point for point in points if point.results and point.results["fits"] is not False]
    if bound.slowdown is not None and bound.latency_s is not None:
        raise bad_value("bound", "a slowdown or a latency", "both")
    if bound.slowdown is not None:
        within = [point for point in ran if point.results["slowdown"] <= bound.slowdown]
        return within, f"at most {bound.slowdown:.1%} slower than the fastest"
    if bound.latency_s is not None:
        within = [point for point in ran if point.results["latency_s"] <= bound.latency_s]
        longest = units.show(bound.latency_s, "s")
        if ran and not within:
            least = units.show(min(point.results["latency_s"] for point in ran), "s")
            raise BadInput(f"latency: no point meets {longest}: the least is {least}.")
        return within, f"within {longest}"
    return ran, "without a bound"


def _parse_axes(vary: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the options that vary with their values, and the settings that vary with their
    texts.
    """
    varied: dict[str, list[Any]] = {}
    set_to: dict[str, str] = {}
    options = [name for name in OPTION_NAMES if name != "recompute"]
    names = [*options, *SETTING_COLUMNS]
    for spec in vary:
        name, equals, text = spec.partition("=")
        name = name.strip().replace("-", "_")
        text = text.strip()
        if not equals or not text:
            raise bad_value("vary", "option=values, such as dtype=bf16,fp8", spec)
        more = "GPUs are named by --gpu; fields of a chip vary in `explore designs`."
        check_names("option", name, names, f"Known: {', '.join(names)}. {more}")
        if name in varied or name in set_to:
            raise bad_value("vary", "each option once", f"{name} twice")
        if name in SETTING_COLUMNS:
            set_to[name] = text
        else:
            varied[name] = _parse_option_values(name, text)
    return varied, set_to


def _parse_option_values(name: str, text: str) -> list[Any]:
    """Return the values of one option: names, numbers, or ``low:high:step``."""
    kind = str(get_type_hints(ModelOptions)[name])
    if "int" not in kind and "float" not in kind:
        return [piece.strip() for piece in text.split(",")]
    where = f"vary {name}"
    values, continuous = parse_values(text, "", where)
    if continuous or len(values) > MOST_POINTS:
        raise bad_value(where, f"low:high:step or a list, at most {MOST_POINTS:,} values", text)
    if "int" in kind and (values != values.round()).any():
        raise bad_value(where, "whole numbers", text)
    return [round(number) if "int" in kind else number for number in values.tolist()]
