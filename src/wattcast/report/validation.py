"""Figures of the accuracy ledger, and of what the database shows by itself.

Predictions are the held-out ones that ship with a bundle. Measured against predicted, by family; error by size of
kernel (after paper 003, figures 6 and 10b); share of kernel kinds (figure 1); equal latency, different power
(figure 2); whole models, where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import api, hardware
from wattcast.arrays import Array
from wattcast.fit import kernels_data, models_data
from wattcast.fit.kernels import random
from wattcast.fit.kernels_split import HeldOut, folds_of, predict_rows
from wattcast.fit.models_data import Case
from wattcast.fitted import bundle_for, fitted
from wattcast.records import MODEL_KERNELS_FILE, database_folder, read_table
from wattcast.report.figure import caption, new_figure, save
from wattcast.validate import ablations
from wattcast.validate.cases import ARITHMETIC, Cases, Member, cases
from wattcast.validate.kinds import KINDS, Shares, of_prediction, of_profile
from wattcast.validate.ledger import held_out
from wattcast.validate.models import Compared, compare
from wattcast.validate.rows import Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _THEIRS, _BARE = "#332288", "#CC6677", "#999933"  # Tol's muted set (2021): not the colours of modules
_KIND_COLOUR = {"GEMM-like": "#332288", "reduction": "#CC6677", "elementwise": "#DDCC77"}
_DOT = "#000000"


def save_all(folder: Path, gpu: str = "h200", ending: str = "png") -> list[Path]:
    """Every figure whose data are there, as files in ``folder``."""
    held = held_out(gpu)
    makers: dict[str, Callable[[], Figure | None]] = {
        "validation-latency": lambda: latency_by_family(held, gpu),
        "validation-power": lambda: power_by_family(held, gpu),
        "validation-size": lambda: error_by_size(held, gpu),
        "validation-kinds": lambda: kind_shares(shares(gpu), gpu),
        "validation-equal-latency": lambda: equal_latency(cases(gpu, held), gpu),
        "validation-models": lambda: whole_models(gpu),
    }
    made: list[Path] = []
    for name, make in makers.items():
        figure = make()
        if figure is not None:
            made.append(folder / f"{name}.{ending}")
            save(figure, made[-1])
    return made


def latency_by_family(held: HeldOut, gpu: str) -> Figure:
    """Predicted against measured latency of held-out bursts, a panel a family."""
    at = _kind(held, "burst")
    return _by_family(
        held, at, held.predicted_latency_s * 1e6, held.latency_s * 1e6, "latency (µs)", 0.15, gpu, logarithmic=True
    )


def power_by_family(held: HeldOut, gpu: str) -> Figure:
    """The same for power of sustained rows."""
    at = _kind(held, "sustained") & np.isfinite(held.power_w)
    return _by_family(held, at, held.predicted_power_w, held.power_w, "power (W)", 0.05, gpu, logarithmic=False)


def _kind(held: HeldOut, kind: str) -> Mask:
    return np.array([k == kind and d == "random" for k, d in zip(held.kind, held.data, strict=True)])


def _by_family(
    held: HeldOut,
    at: Mask,
    predicted: Array,
    measured: Array,
    what: str,
    band: float,
    gpu: str,
    *,
    logarithmic: bool,
) -> Figure:
    families = list(dict.fromkeys(held.family))
    figure = new_figure(11.0, 5.8)
    axes = figure.subplots(2, -(-len(families) // 2)).ravel()
    for panel, family in zip(axes, families, strict=False):
        here = at & (np.array(held.family) == family)
        _panel(panel, measured[here], predicted[here], band, logarithmic)
        error = 100 * np.mean(np.abs(predicted[here] / measured[here] - 1.0))
        panel.set_title(f"{family}: {error:.1f} % of {int(here.sum())}", fontsize=9)
    for panel in axes[len(families) :]:
        panel.set_visible(False)
    figure.supxlabel("")
    axes[0].figure.supylabel(f"Predicted {what}", fontsize=9)
    figure.suptitle(f"Measured {what} across, predicted up; line: equal; band: ±{band:.0%}", fontsize=10)
    return caption(figure, _origin(gpu, "held-out predictions, five folds by shape"))


def _panel(axes: Axes, measured: Array, predicted: Array, band: float, logarithmic: bool) -> None:
    low, high = float(min(measured.min(), predicted.min())), float(max(measured.max(), predicted.max()))
    ends = np.array([low, high])
    axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=_OURS, alpha=0.15, lw=0)
    axes.plot(ends, ends, "-", color=_OURS, lw=1.0)
    axes.plot(measured, predicted, "o", ms=1.8, color=_DOT, alpha=0.5, mew=0)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def error_by_size(held: HeldOut, gpu: str) -> Figure:
    """Error by measured latency: the whole model, the ideal scaffold alone, and a FLOPs-and-bytes regression."""
    at = _kind(held, "burst")
    measured, families = held.latency_s[at], np.array(held.family)[at]
    bare, regressed = _simpler(gpu, int(at.sum()))
    named = {"Wattcast": held.predicted_latency_s[at], "ideal scaffold, nothing fitted": bare}
    named["FLOPs and bytes, by family"] = regressed
    colours = dict(zip(named, (_OURS, _BARE, _THEIRS), strict=True))
    groups: dict[str, tuple[str, ...]] = {
        "products": ("gemm",),
        "convolutions": ("conv2d",),
        "attention": ("attention",),
    }
    groups |= {"softmax and norms": ("softmax", "layernorm", "rmsnorm"), "elementwise": ("elementwise",)}
    figure = new_figure(11.0, 5.8)
    axes = figure.subplots(2, 3).ravel()
    for panel, (title, members) in zip(axes, [("all", tuple(set(families))), *groups.items()], strict=True):
        here = np.isin(families, members)
        for name, predicted in named.items():
            _binned(panel, measured[here], np.abs(predicted[here] / measured[here] - 1.0), name, colours[name])
        panel.set_title(f"{title} ({int(here.sum())})", fontsize=9)
        panel.set_ylim(0, 100)
        panel.set_xscale("log")
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7)
    for panel in axes[3:]:
        panel.set_xlabel("Measured latency (µs)", fontsize=8)
    for panel in (axes[0], axes[3]):
        panel.set_ylabel("Error (%)", fontsize=8)
    figure.suptitle("Error by size of kernel: median, and from the 25th to the 75th percentile", fontsize=10)
    return caption(figure, _origin(gpu, "held-out bursts at the top clock; after paper 003, figures 6 and 10b"))


def _simpler(gpu: str, count: int) -> tuple[Array, Array]:
    """Latency of the same rows from the ideal scaffold and from the regression."""
    rows = kernels_data.load(gpu)
    test = rows.is_kind("burst") & rows.fit & (rows.repeat == 0) & random(rows)
    assert int(test.sum()) == count, "held-out rows are those of the database"
    bundle = fitted(gpu)
    assert bundle is not None
    bare = predict_rows(ablations._uncorrected(bundle), rows.where(test), hardware.load(gpu))[:, 0]
    return bare, ablations._regressed(rows.where(test), folds_of(rows)[test])


def _binned(axes: Axes, latency_s: Array, error: Array, label: str, colour: str, bins: int = 9) -> None:
    """Median and quartiles in bins of equal count."""
    order = np.argsort(latency_s, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part) > 3]
    middle = [1e6 * float(np.median(latency_s[part])) for part in parts]
    low, median, high = (np.array([100 * np.quantile(error[p], q) for p in parts]) for q in (0.25, 0.5, 0.75))
    axes.fill_between(middle, low, high, color=colour, alpha=0.15, lw=0)
    axes.plot(middle, median, "o-", color=colour, ms=3, lw=1.2, label=label)


_SHOWN = (
    ("bert-large", {"batch": 32, "seq": 512, "attention": "eager"}),
    ("bert-large", {"batch": 32, "seq": 512}),
    ("gpt2-xl", {"batch": 8, "seq": 1024}),
    ("qwen2-1.5b", {"batch": 8, "seq": 1024, "attention": "eager"}),
    ("qwen2-1.5b", {"batch": 8, "seq": 1024}),
    ("llama3-8b", {"batch": 8, "seq": 512}),
    ("llama3-8b", {"batch": 8, "seq": 1024, "phase": "decode"}),
    ("vit-large", {"batch": 64}),
    ("resnet50", {"batch": 128}),
)


def shares(gpu: str) -> list[Shares]:
    """Kernel kinds of whole models: as the profiler saw them where it did, and as predicted."""
    path = database_folder(gpu) / MODEL_KERNELS_FILE
    profiles = {entry["id"]: entry for entry in read_table(path) if not entry["error"]} if path.exists() else {}
    if profiles:
        found = []
        for case in _spread([c for c in models_data.load(gpu) if c.row.id in profiles and c.row.graph]):
            name = f"{case.graph.name.removesuffix(f' {case.row.dtype}')}, {case.row.attention}"
            found.append(of_profile(name, profiles[case.row.id]))
            predicted = of_prediction(api.predict(case.graph, gpu, host_launch="0us"))
            found.append(Shares(name, False, predicted.share))
        return found
    predictions = [(api.predict(m, gpu, host_launch="0us", **o), o) for m, o in _SHOWN]
    return [Shares(f"{p.name}, {o.get('attention', 'flash')}", False, of_prediction(p).share) for p, o in predictions]


def _spread(cases: list[Case]) -> list[Case]:
    """As many as a page holds: the longest of each model and phase, evenly from these."""
    longest: dict[tuple[str, str], Case] = {}
    for case in sorted(cases, key=lambda case: case.row.latency_s or 0.0):
        longest[case.row.model, case.row.phase] = case
    kept = {case.row.id for case in longest.values()}
    one_each = [case for case in cases if case.row.id in kept]
    step = max(len(one_each) / _MOST_SHOWN, 1.0)
    return [one_each[int(i * step)] for i in range(min(len(one_each), _MOST_SHOWN))]


_MOST_SHOWN = 20


def kind_shares(found: list[Shares], gpu: str) -> Figure:
    """Share of the time in kernels by kind, a bar a workload; measured ones are outlined in black."""
    figure = new_figure(9.0, 1.2 + 0.28 * len(found))
    axes = figure.subplots()
    for place, entry in enumerate(found):
        left = 0.0
        for kind in KINDS:
            width = 100 * entry.share[kind]
            edge: dict[str, Any] = {"edgecolor": _DOT, "linewidth": 1.0} if entry.measured else {"alpha": 0.75}
            label = kind if place == 0 else None
            axes.barh(place, width, left=left, color=_KIND_COLOUR[kind], label=label, **edge)
            left += width
    names = [f"{entry.name}{', measured' if entry.measured else ', predicted'}" for entry in found]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("Share of the time in kernels (%)")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    seen = any(entry.measured for entry in found)
    note = "outlined: seen by the profiler, else predicted" if seen else "no profile is at hand: predicted"
    return caption(figure, _origin(gpu, f"after paper 003, figure 1; {note}"))


def equal_latency(found: Cases, gpu: str) -> Figure:
    """Pairs of rows with equal latency and different power: by idle SMs, and by what L2 keeps."""
    figure = new_figure(10.0, 1.6 + 0.5 * 2 * max(len(found.imbalance), len(found.reuse), 1))
    panels = figure.subplots(1, 2)
    _paired(panels[0], found.imbalance, "Load imbalance: one tile on the busiest SM", _tiles_text)
    _paired(panels[1], found.reuse, f"L2 reuse: arithmetic within {ARITHMETIC:.0%}", _memory_text)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2, loc="outside upper right"
    )
    return caption(figure, _origin(gpu, "sustained rows at the top clock, not capped; after paper 003, figure 2"))


def _tiles_text(member: Member) -> str:
    return f"{member.tiles:.0f} tiles, {1e6 * member.latency_s:.2f} µs"


def _memory_text(member: Member) -> str:
    return f"memory {member.memory_w:.0f} W, {1e6 * member.latency_s:.2f} µs"


def _paired(axes: Axes, pairs: tuple[tuple[Member, Member], ...], title: str, text: Callable[[Member], str]) -> None:
    members = [member for pair in pairs for member in pair]
    places = [place + 0.5 * (place // 2) for place in range(len(members))]
    axes.barh(places, [m.power_w for m in members], color="#BBBBBB", label="measured", height=0.8)
    axes.plot([m.predicted_w for m in members], places, "D", ms=5, color=_OURS, label="predicted, held out")
    axes.set_yticks(places, [f"{m.work}\n{text(m)}" for m in members], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("Power (W)")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def whole_models(gpu: str, database: str | Path | None = None) -> Figure | None:
    """Whole models: latency, power and energy, predicted against measured; None where none was measured."""
    if models_data.missing(database or gpu):
        return None
    chip = hardware.load(gpu)
    found = compare(models_data.load(database or gpu), chip, bundle_for(chip))
    figure = new_figure(11.0, 4.2)
    panels = figure.subplots(1, 3)
    energy = found.predicted_s * found.predicted_w
    for axes, name, measured, predicted, logarithmic in (
        (panels[0], "latency (ms)", 1e3 * found.latency_s, 1e3 * found.predicted_s, True),
        (panels[1], "power (W)", found.power_w, found.predicted_w, False),
        (panels[2], "energy (J)", found.energy_j, energy, True),
    ):
        _cloud(axes, found, measured, predicted, logarithmic)
        axes.set_xlabel(f"Measured {name}", fontsize=8)
        axes.set_ylabel(f"Predicted {name}", fontsize=8)
    panels[0].legend(frameon=False, fontsize=7)
    return caption(figure, _origin(gpu, "whole models, nothing fitted on them; line: equal, band: ±10 %"))


def _cloud(axes: Axes, found: Compared, measured: Array, predicted: Array, logarithmic: bool) -> None:
    low, high = float(min(measured.min(), predicted.min())), float(max(measured.max(), predicted.max()))
    ends = np.array([low, high])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=_OURS, alpha=0.15, lw=0)
    axes.plot(ends, ends, "-", color=_OURS, lw=1.0)
    for label, at, mark in (
        ("GPU-bound, capped", found.graph & found.capped, "o"),
        ("GPU-bound", found.graph & ~found.capped, "^"),
        ("launched by the host", ~found.graph, "x"),
    ):
        axes.plot(measured[at], predicted[at], mark, ms=4, color=_DOT, alpha=0.7, label=label, mew=0.8)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _origin(gpu: str, note: str) -> str:
    bundle = fitted(gpu)
    known = [bundle.provenance.source, bundle.provenance.device, bundle.provenance.date] if bundle else []
    return f"{gpu}: {note}. {', '.join(text for text in known if text)}"
