"""Ledger rows of the counter model, and the same kernels through three power models side by side.

The shipped counter model is trained on microbenchmarks only. Its rows test it on other work:
multimedia workloads, savings between variants, energies of single kernels, and the operators of the
kernel database (docs/method/counters.md).

Side by side with the measured power of a kernel stand three models:

- **forecast** knows the operator's shapes alone: time, counts and clock are predicted by a fit
  without that shape.
- **counters** is the counter model that ships, fitted to microbenchmarks: counted events over the
  measured time.
- **components** are the energies of AccelWattch's counters (``gpuwattch.measured_energies``), on
  the same counts.

The kernels are operators that the components were not fitted to. Each model's watts are grouped by
where they are spent. The memory rail is measured too, so it can tell which model has device memory
right."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.kernel_rows import parse_operators, read_condition, shape_name
from wattcast.calibrate.scoring import LedgerRow, make_ledger_row, mean_percent_error, score_row
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import ROWS_FILE, database_folder, read_table
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import OperatingPoint
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.lab.counter_models import profiler_counters
from wattcast.lab.counter_models.profiler_counters import events_of_launch
from wattcast.lab.counter_models.two_rails import RailsFit, shipped_fit
from wattcast.lab.gpuwattch import measured_energies
from wattcast.power.activity import Activity, ActivitySource, known_events
from wattcast.power.power_model import load_saved_model
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_kernels, detail_at_clock

# a forecast counts the cycles of busy SMs, the others instructions and threads
SM = "instructions, arithmetic"
MODELS = ("forecast", "counters", "components")
PLACES = ("base", SM, "tensor", "L1, shared", "L2, network", "device memory")
KERNELS = 40
_OF_A_FAMILY = 5


@dataclass(frozen=True)
class KernelViews:
    """One measured kernel as three models see it, in watts."""

    name: str
    family: str
    measured_w: float
    memory_rail_w: float  # of the measured power, the memory's
    capped: bool  # at the power limit, which a forecast knows
    model_w: Mapping[str, float]
    place_w: Mapping[str, Mapping[str, float]]  # model -> place -> watts

    @property
    def nearest(self) -> str:
        """The model whose total is nearest to the measurement."""
        return min(MODELS, key=lambda model: abs(self.model_w[model] - self.measured_w))

    @property
    def dispute(self) -> tuple[str, float]:
        """The place where the models differ most, and by how many watts."""
        spread = {}
        for place in PLACES:
            watts = [self.place_w[model].get(place, 0.0) for model in MODELS]
            spread[place] = max(watts) - min(watts)
        place = max(spread, key=lambda name: spread[name])
        return place, spread[place]


def compare_power_models(gpu: str = "h200", count: int = KERNELS) -> list[KernelViews]:
    """Return ``count`` counted operators that no component was fitted to, each through the three
    models.
    """
    folder = database_folder(gpu)
    chip = find_gpu(gpu)
    bundle = shipped_bundle(gpu)
    assert bundle is not None
    forecast_w = _held_out_watts(
        folder.parent.parent / "predictor" / "bundle" / gpu / "out_of_fold.parquet"
    )
    entries = measured_energies.counted_rows(folder, gpu)
    chosen = _choose_rows([row for row, _ in entries], forecast_w, count)
    launches = measured_energies.read_operators(folder, gpu).select(
        np.isin(np.arange(len(entries)), chosen)
    )
    sm_count = float(measured_energies.measured_chip(gpu).design.sm_count)
    activity = measured_energies.launches_to_activity(launches, sm_count)
    power = measured_energies.measured_model(gpu)[2].model.power(activity)
    place_of = _read_places("component")
    parts = {
        "counters": _counter_parts([entries[i] for i in chosen], launches, gpu),
        "components": [_group_watts(power.parts, watts, place_of, SM) for watts in power.part_w],
    }
    views = []
    for k, i in enumerate(chosen):
        row = entries[i][0]
        (op,) = parse_operators([row["operator"]])
        segment = IssueSegment(np.array([0]), np.array([1.0]), 1)
        kernels = build_kernels((op,), (read_condition(row),), chip, bundle.reference, (segment,))
        timeline = analyse_kernels(kernels, chip, bundle)
        detail = detail_at_clock(
            timeline, run_governed(timeline, chip, OperatingPoint(), bundle)[0].at, bundle
        )
        watts = (detail.kernel_part_w * detail.kernel_s[..., np.newaxis]).sum(
            axis=-2
        ) / detail.kernel_s.sum()
        places = _group_watts(bundle.power.parts, watts.reshape(-1), _read_places("module"))
        total_w = forecast_w[_row_key(row)]
        scale = total_w / sum(
            places.values()
        )  # parts are of the shipped fit, the total of one without this shape
        place_w = {"forecast": {place: scale * value for place, value in places.items()}}
        place_w |= {model: parts[model][k] for model in parts}
        model_w = {model: sum(place_w[model].values()) for model in MODELS}
        rail_w = float(row["memory_power_w"])
        capped = "sw_power_cap" in (row["throttle"] or [])
        name = re.sub(
            r" \w+=(None|False|forward|contiguous|0\.0|1(?= ))(?= |$)", "", shape_name(op)
        )
        views.append(
            KernelViews(name, row["family"], row["power_w"], rail_w, capped, model_w, place_w)
        )
    return views


def summarise_views(views: Sequence[KernelViews]) -> dict[str, Any]:
    """Return each model's error, how often it is nearest, where models differ, and what the memory
    rail supports.
    """
    measured = np.array([view.measured_w for view in views])
    rail_w = np.array([view.memory_rail_w for view in views])
    free = np.array([not view.capped for view in views])
    summary: dict[str, Any] = {"kernels": len(views), "capped": int((~free).sum())}
    summary |= {"models": {}, "disputes": {}, "families": {}}
    for model in MODELS:
        watts = np.array([view.model_w[model] for view in views])
        memory_w = np.array([view.place_w[model].get("device memory", 0.0) for view in views])
        slope, rest_w = np.polyfit(memory_w, rail_w, 1)
        off = watts / measured - 1
        summary["models"][model] = {
            "mape": float(100 * np.mean(np.abs(off))),
            "below_limit": float(100 * np.mean(np.abs(off)[free])),
            "bias": float(100 * np.mean(off)),
            "nearest": sum(view.nearest == model for view in views),
            "memory_correlation": float(np.corrcoef(memory_w, rail_w)[0, 1]),
            "memory_slope": float(slope),
            "memory_rest_w": float(rest_w),
        }
    for view in views:
        place, spread_w = view.dispute
        summary["disputes"].setdefault(place, []).append(spread_w)
    for family in dict.fromkeys(view.family for view in views):
        family_views = [view for view in views if view.family == family]
        errors = {
            m: float(100 * np.mean([abs(v.model_w[m] / v.measured_w - 1) for v in family_views]))
            for m in MODELS
        }
        summary["families"][family] = {"kernels": len(family_views), **errors}
    return summary


def format_views(views: Sequence[KernelViews]) -> str:
    """Return the page's tables in Markdown."""
    summary = summarise_views(views)
    free = summary["kernels"] - summary["capped"]
    head = f"| model | error % | of the {free} below the limit | bias % | nearest | memory rail: r | slope |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for model, of in summary["models"].items():
        figures = (
            f"{of['mape']:.1f} | {of['below_limit']:.1f} | {of['bias']:+.1f} | {of['nearest']}"
        )
        lines.append(
            f"| {model} | {figures} | {of['memory_correlation']:.2f} | {of['memory_slope']:.2f} |"
        )
    lines += [
        "",
        "| family | kernels | forecast % | counters % | components % |",
        "|---|---|---|---|---|",
    ]
    for family, of in summary["families"].items():
        lines.append(
            f"| {family} | {of['kernels']} | "
            + " | ".join(f"{of[model]:.1f}" for model in MODELS)
            + " |"
        )
    lines += ["", "| models differ most in | kernels | median W |", "|---|---|---|"]
    for place, watts in sorted(summary["disputes"].items(), key=lambda item: -len(item[1])):
        lines.append(f"| {place} | {len(watts)} | {np.median(watts):.0f} |")
    head = "| kernel | measured W | forecast | counters | components | nearest | models differ most in |"
    lines += ["", head, "|---|---|---|---|---|---|---|"]
    for view in views:
        watts_of = " | ".join(f"{view.model_w[model]:.0f}" for model in MODELS)
        place = view.dispute[0]
        shown = ", ".join(f"{view.place_w[model].get(place, 0.0):.0f}" for model in MODELS)
        lines.append(
            f"| {view.name} | {view.measured_w:.0f} | {watts_of} | {view.nearest} | {place}: {shown} W |"
        )
    return "\n".join(lines) + "\n"


def _row_key(row: Plain) -> str:
    return f"{row['latency_s']:.5e}"


def _held_out_watts(path: Path) -> dict[str, float]:
    """Return the held-out power of each sustained row of random data, by its latency, where no
    other has the same.
    """
    rows = [
        row
        for row in read_table(path)
        if row["kind"] == "sustained" and row["predicted_power_w"] is not None
    ]
    seen = Counter(map(_row_key, rows))
    alone = (row for row in rows if row["data"] == "random" and seen[_row_key(row)] == 1)
    return {_row_key(row): row["predicted_power_w"] for row in alone}


def _choose_rows(
    rows: Sequence[Plain], counted_latency: Mapping[str, float], count: int
) -> list[int]:
    """Choose rows of operators never used: a few of each family by the order of their hash, then
    the rest alike.
    """
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        if (
            measured_energies.is_held_out(row["spec"])
            and _row_key(row) in counted_latency
            and row["memory_power_w"]
        ):
            first.setdefault(row["spec"], i)
    order = [first[spec] for spec in sorted(first)]
    rank: dict[str, int] = {}
    places = []
    for i in order:
        family = rows[i]["family"]
        rank[family] = rank.get(family, 0) + 1
        places.append((rank[family] > _OF_A_FAMILY, i))
    return sorted(i for _, i in sorted(places, key=lambda place: place[0])[:count])


def _read_places(of: str) -> dict[str, str]:
    """Return where modules, events or components spend their power, by name."""
    rows = read_shipped_table("wattcast.lab.validate", "power_places.csv")
    return {row["name"]: row["place"] for row in rows if row["of"] == of}


def _group_watts(
    parts: Sequence[str], watts: Array, place_of: Mapping[str, str], default: str = "base"
) -> dict[str, float]:
    place_w = dict.fromkeys(PLACES, 0.0)
    for part, value in zip(parts, watts.tolist(), strict=True):
        place_w[place_of.get(part, default)] += value
    return place_w


def _counter_parts(
    entries: Sequence[tuple[Plain, list[dict[str, float]]]],
    launches: measured_energies.CountedLaunches,
    gpu: str,
) -> list[dict[str, float]]:
    """Return the watts of the counter model that ships, on the metrics of each operator's kernels."""
    model = load_saved_model(Path(gpu)).model
    modules = _read_places("module")
    place_of = {name: modules.get(event.module, "base") for name, event in known_events().items()}
    place_of |= _read_places("event")
    chip = find_gpu(gpu)
    operator_parts = []
    for (row, kernels), seconds in zip(entries, launches.duration_s, strict=True):
        events = _sum_events(kernels)
        events["core_cycle"] = seconds * row["sm_clock_hz"]
        at = OperatingPoint(clock_hz=row["sm_clock_hz"], memory_clock_hz=chip.memory.clock_hz)
        counts = np.array([list(events.values())])
        activity = Activity(np.array([seconds]), counts, tuple(events), at, ActivitySource.PROFILED)
        power = model.power(activity)
        operator_parts.append(_group_watts(power.parts, power.part_w[0], place_of))
    return operator_parts


AT_RATE = "_at_rate"
IDLE_ROW = "multimedia_idle"  # the card with a context open, just before the multimedia rows
PUBLISHED_ERROR = "about 1 (Tegra K1, Stokke 2016)"
DCT_SAVINGS = (  # what changes, from, to
    ("fp64 to fp32, cached", "dct_fp64_cached", "dct_fp32_cached"),
    ("fp64 to fp32, past L1", "dct_fp64_uncached", "dct_fp32_uncached"),
    ("caching in L1, fp32", "dct_fp32_uncached", "dct_fp32_cached"),
    ("caching in L1, fp64", "dct_fp64_uncached", "dct_fp64_cached"),
    ("both", "dct_fp64_uncached", "dct_fp32_cached"),
)


@dataclass(frozen=True)
class PredictedPair:
    """One quantity, measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def off_percent(self) -> float:
        """Error of the prediction in percent."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def make_counter_model_rows(gpu: str) -> list[LedgerRow]:
    """Return the ledger rows of every test of the counter model; floors predict the mean power of
    training.
    """
    fit = shipped_fit(gpu)
    card = gpu.upper()
    trained_w = fit.table.power_w[fit.train]

    def score(
        where: str, quantity: str, estimate: Array, true: Array, *goals: Any, **more: Any
    ) -> LedgerRow:
        floor = np.full(true.size, trained_w.mean())
        return score_row(f"{card} {where}", quantity, estimate, true, floor, *goals, **more)

    media = multimedia_power(fit)
    worst = max(media, key=lambda p: abs(p.off_percent))
    media_predicted, media_measured = (
        np.array([getattr(p, name) for p in media]) for name in ("predicted", "measured")
    )
    at_rate = np.array([p.name.endswith(AT_RATE) for p in media])
    kinds = {
        "back_to_back": _round_percent(
            mean_percent_error(media_predicted[~at_rate], media_measured[~at_rate])
        ),
        "at_a_frame_rate": _round_percent(
            mean_percent_error(media_predicted[at_rate], media_measured[at_rate])
        ),
        "worst": f"{worst.name} {worst.off_percent:+.1f} %",
    }
    where = "multimedia, trained on microbenchmarks only"
    goals = (PUBLISHED_ERROR, 3.0, 2.0)
    rows = [score(where, "power", media_predicted, media_measured, *goals, **kinds)]
    shape: LedgerRow = {"leaning": fit.leaning, "left_out": len(fit.table.left_out)}
    held_w = fit.held_out_w[fit.train]
    rows.append(
        score("microbenchmarks", "power, leave one benchmark out", held_w, trained_w, **shape)
    )
    for p in dct_savings(fit):
        watts: LedgerRow = {
            "measured_w": _round_percent(p.measured),
            "predicted_w": _round_percent(p.predicted),
        }
        where = f"{card} DCT at a fixed frame rate"
        off = abs(p.off_percent)
        rows.append(
            make_ledger_row(where, f"saving, {p.name}", 1, off, must=30.0, aim=10.0, **watts)
        )
    for p in kernel_energies_above_idle(fit):
        measured_mj = _round_percent(1e3 * p.measured)
        predicted_mj = _round_percent(1e3 * p.predicted)
        joules: LedgerRow = {"measured_mj": measured_mj, "predicted_mj": predicted_mj}
        where = f"{card} kernel beside moving frames"
        rows.append(make_ledger_row(where, f"energy of {p.name}", 1, abs(p.off_percent), **joules))
    # under the profiler operands come from DRAM; repeated runs of an operator that fits L2 find
    # them in L2
    operators, predicted_w = predict_database_operators(fit, gpu)
    l2_byte = hardware.load_gpu(gpu).l2.capacity_byte
    footprint_byte = [r["footprint_byte"] or 0.0 for r in operators]
    large = np.array(footprint_byte) > (np.inf if l2_byte is None else float(np.mean(l2_byte)))
    measured_w, card_of, family_of = (
        np.array([r[name] for r in operators]) for name in ("power_w", "card_serial", "family")
    )
    sets: dict[str, Mask] = {"power": np.ones_like(large), "power, operands larger than L2": large}
    for quantity, in_set in sets.items():
        measured = measured_w[in_set]
        predicted = predicted_w[in_set]
        cards = card_of[in_set]
        factor = {
            one: float(np.median((measured / predicted)[cards == one])) for one in np.unique(cards)
        }
        corrected = predicted * np.array([factor[one] for one in cards])
        families: LedgerRow = {}
        for family in np.unique(family_of[in_set]):
            mine = family_of[in_set] == family
            families[str(family)] = _round_percent(
                mean_percent_error(predicted[mine], measured[mine])
            )
        cards_apart: LedgerRow = {
            "one_factor_a_card": _round_percent(mean_percent_error(corrected, measured)),
            "factors": ", ".join(f"{value:.2f}" for value in factor.values()),
        }
        where = "counted operators, other cards, trained on microbenchmarks only"
        rows.append(score(where, quantity, predicted, measured, **cards_apart, **families))
    return rows


def _round_percent(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _tested_watts(fit: RailsFit) -> dict[str, tuple[float, float]]:
    """Return measured and predicted watts of the rows never trained on, by name."""
    table = fit.table
    return {
        table.benchmark_names[table.benchmark[i]]: (
            float(table.power_w[i]),
            float(fit.predicted_w[i]),
        )
        for i in np.flatnonzero(fit.test)
    }


def multimedia_power(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts of every multimedia row without transfers."""
    return [
        PredictedPair(name, *watts)
        for name, watts in _tested_watts(fit).items()
        if not profiler_counters.moves_frames(name)
    ]


def dct_savings(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts saved at a fixed frame rate by a cheaper DCT."""
    watts_of = _tested_watts(fit)
    rows = []
    for what, before, after in DCT_SAVINGS:
        measured_w, predicted_w = (
            watts_of[before + AT_RATE][i] - watts_of[after + AT_RATE][i] for i in (0, 1)
        )
        rows.append(PredictedPair(what, measured_w, predicted_w))
    return rows


def kernel_energies_above_idle(fit: RailsFit) -> list[PredictedPair]:
    """Return the joules above idle that each kernel adds to moving its frames.

    Measured: energy of a pass with the kernel, less one without, less idle power times the longer
    duration. Predicted: the events of the kernel's own counters times their costs."""
    table = fit.table
    at = {table.benchmark_names[b]: i for i, b in enumerate(table.benchmark)}
    bare = at[profiler_counters.MOVE_FRAMES]
    idle_w = float(table.power_w[at[IDLE_ROW]])
    if table.duration_s is None:
        raise bad_value(table.name, "durations", "none")
    rows = []
    for name, i in at.items():
        if not name.endswith(profiler_counters.MOVED_SUFFIX):
            continue
        pass_s = table.duration_s[i]
        bare_s = table.duration_s[bare]
        measured_j = (
            table.power_w[i] * pass_s - table.power_w[bare] * bare_s - idle_w * (pass_s - bare_s)
        )
        predicted_j = (fit.predicted_w[i] - fit.predicted_w[bare]) * pass_s
        rows.append(
            PredictedPair(
                name.removesuffix(profiler_counters.MOVED_SUFFIX),
                float(measured_j),
                float(predicted_j),
            )
        )
    return rows


def predict_database_operators(fit: RailsFit, gpu: str) -> tuple[list[Plain], Array]:
    """Return the sustained rows of counted operators on random data, and the watts that their
    counters give.

    The database counts fewer metrics: warps are taken as full, and shared-memory conflicts and
    tensor products of integers or fp64 as absent."""
    folder = database_folder(gpu)
    sm_count = float(hardware.load_gpu(gpu).sm_count)
    counted = profiler_counters.read_operator_metrics(folder, sm_count)
    events = {spec: _sum_events(kernels) for spec, kernels in counted.items()}
    rows = [
        r
        for r in read_table(folder / ROWS_FILE)
        if r["kind"] == "sustained" and r["spec"] in events
    ]
    rows = [r for r in rows if r["data"] == "random" and r["power_w"]]
    names = fit.model.required_events
    value = np.array([[events[r["spec"]].get(name, 0.0) for name in names] for r in rows])
    clock_hz = np.array([r["sm_clock_hz"] for r in rows], dtype=float)
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=float(fit.table.memory_clock_hz[0]))
    activity = Activity(
        np.array([r["latency_s"] for r in rows]), value, names, at, ActivitySource.PROFILED
    )
    return rows, fit.model.power(activity).total_w


def _sum_events(kernels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the events of an operator, from the metrics of its kernels."""
    total: dict[str, float] = defaultdict(float)
    for name, count in (
        event for metrics in kernels for event in events_of_launch(metrics).items()
    ):
        total[name] += count
    return total
