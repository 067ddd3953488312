"""Draw the figures of docs/method/validation.md after paper 003: equal latency, error by size,
kinds of kernels.

Run: ``wattcast lab validate --figures docs/images`` in the repository draws them beside the
ledger's own."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Mapping,
)
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate import kernel_rows, whole_models
from wattcast.calibrate.kernel_rows import (
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.whole_models import ModelCase
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.core.row_tables import (
    MODEL_KERNELS_FILE,
    database_folder,
    read_table,
)
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_names import ParsedKernelName, parse_kernel_name
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.fit.held_out import HeldOutRows
from wattcast.lab.validate.ledger_figures import (
    DOT,
    OURS,
    describe_rows,
    draw_held_out,
    draw_whole_models,
)
from wattcast.lab.validate.long_checks.ablations import (
    ideal_scaffold,
    predict_with_fit,
    regress_by_family,
)
from wattcast.predictor import api
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.prediction import Prediction
from wattcast.report.figure_style import (
    FigureMaker,
    add_caption,
    new_axes,
    new_figure,
    save_figure,
)
from wattcast.report.prediction_figures import find_kernel_family
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR_LATENCY = 0.05  # of latency, between the members of a pair
NEAR_FLOP = 0.20  # of FLOPs, in the L2 pairs
REUSING_FAMILIES = ("gemm", "attention", "conv2d")
MORE_MEMORY_W = 20.0  # by which a kernel that reads past L2 draws more in memory
MOST_PAIRS = 3
# Tol's muted set (2021): not the colours of modules
_THEIRS = "#CC6677"
_BARE = "#999933"
_KIND_COLOUR = {
    "GEMM-like": "#332288",
    "reduction": "#CC6677",
    "elementwise": "#DDCC77",
}
_MOST_SHOWN = 20


def list_figures(held_rows: HeldOutRows, gpu: str) -> dict[str, FigureMaker]:
    """Return the figures by name."""
    return {
        "validation-size": lambda: draw_error_by_size(held_rows, gpu),
        "validation-kinds": lambda: draw_kind_shares(collect_kind_shares(gpu), gpu),
        "validation-equal-latency": lambda: draw_equal_latency(
            find_equal_latency_pairs(gpu, held_rows), gpu
        ),
    }


@dataclass(frozen=True)
class LatencyPairMember:
    """One row of a pair of equal latency."""

    work: str
    family: str
    latency_s: float
    power_w: float
    predicted_w: float
    memory_w: float
    tiles: float  # NaN: the kernel's name does not say
    flop: float
    l2_byte: float
    follows_tile: bool  # its time follows its tile


@dataclass(frozen=True)
class EqualLatencyPairs:
    """Pairs of equal latency and different power, the lower power first, the largest difference
    first.

    Load imbalance: two products whose busiest SM has one tile, with work on few SMs in one and on
    nearly all in the other. L2 reuse: two kernels of one family with the same arithmetic, of which
    one finds its operands in L2. All run at the top clock on random data (paper 003, figure 2)."""

    imbalance: tuple[tuple[LatencyPairMember, LatencyPairMember], ...]
    reuse: tuple[tuple[LatencyPairMember, LatencyPairMember], ...]


def find_equal_latency_pairs(gpu: str, held_rows: HeldOutRows) -> EqualLatencyPairs:
    """Find the pairs in a GPU's database by rule; predictions are the held-out ones."""
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    rows = rows.select_rows(rows.to_judge())
    if len(rows) != len(held_rows.work) or tuple(str(op) for op in rows.ops) != held_rows.work:
        raise BadInput(
            f"the held-out predictions of {gpu} are not of the rows in its database. Fit again."
        )
    members = _list_pair_candidates(rows, held_rows, chip)
    sms = float(np.mean(chip.sm_count))

    def is_unbalanced(lower: LatencyPairMember, higher: LatencyPairMember) -> bool:
        has_one_wave = max(lower.tiles, higher.tiles) <= sms
        is_on_few_sms = higher.tiles > 2.0 * lower.tiles
        return lower.follows_tile and higher.follows_tile and has_one_wave and is_on_few_sms

    return EqualLatencyPairs(_pairs(members, is_unbalanced), _pairs(members, _is_reused))


def _list_pair_candidates(
    rows: KernelRows,
    held_rows: HeldOutRows,
    chip: Gpu,
) -> list[LatencyPairMember]:
    """List the sustained rows on random data that ran at the top clock."""
    power_w, clock_hz, latency_s = settled_figures(rows)
    at_top = clock_hz > TOP_CLOCK_SHARE * float(np.mean(chip.clocks.max_hz))
    is_candidate = rows.is_kind("sustained") & on_random_data(rows) & at_top & np.isfinite(power_w)
    tiles = _tiles(rows)
    memory_w = rows.column("memory_power_w")
    l2_byte = _l2_byte(rows, chip)
    members = []
    for row in np.flatnonzero(is_candidate).tolist():
        op = rows.ops[row]
        name = parse_kernel_name(rows.names[row][0]) if rows.names[row] else None
        members.append(
            LatencyPairMember(
                work=str(op),
                family=rows.family[row],
                latency_s=float(latency_s[row]),
                power_w=float(power_w[row]),
                predicted_w=float(held_rows.predicted_power_w[row]),
                memory_w=float(memory_w[row]),
                tiles=float(tiles[row]),
                flop=op.flop,
                l2_byte=float(l2_byte[row]),
                follows_tile=name is not None and _follows_tile(name, op.dtype.byte),
            )
        )
    return members


def _is_reused(lower: LatencyPairMember, higher: LatencyPairMember) -> bool:
    """Whether two kernels of one family do the same arithmetic and move as much through L2, and one
    of them draws much more power in memory.
    """
    if lower.family != higher.family or lower.family not in REUSING_FAMILIES:
        return False
    if lower.flop <= 0 or abs(higher.flop / lower.flop - 1.0) >= NEAR_FLOP:
        return False
    moves_alike = 0.5 < higher.l2_byte / lower.l2_byte < 2.0
    return moves_alike and higher.memory_w > lower.memory_w + MORE_MEMORY_W


def _pairs(
    members: list[LatencyPairMember],
    is_pair: Callable[[LatencyPairMember, LatencyPairMember], bool],
) -> tuple[tuple[LatencyPairMember, LatencyPairMember], ...]:
    """Return pairs of near-equal latency that meet the rule, the largest difference first, no row
    twice.
    """
    pairs = []
    for first, second in combinations(range(len(members)), 2):
        low, high = first, second
        if members[first].power_w >= members[second].power_w:
            low, high = second, first
        lower = members[low]
        higher = members[high]
        is_near = abs(higher.latency_s / lower.latency_s - 1.0) < NEAR_LATENCY
        if is_near and is_pair(lower, higher):
            pairs.append((higher.power_w - lower.power_w, low, high))
    chosen: list[tuple[LatencyPairMember, LatencyPairMember]] = []
    used: set[int] = set()
    for _, low, high in sorted(pairs, reverse=True):
        if not {low, high} & used:
            chosen.append((members[low], members[high]))
            used |= {low, high}
    return tuple(chosen[:MOST_PAIRS])


def _follows_tile(name: ParsedKernelName, width: int) -> bool:
    """Tell whether a kernel is Hopper's library in a 16-bit format with K in one piece: its time
    follows its tile.
    """
    match name:
        case ParsedKernelName(library="cublas"):
            return bool(name.tiled and not name.split_k and width == 2)
    return False


def _tiles(rows: KernelRows) -> Array:
    """Return the tiles of each product by its kernel's name, which gives the side along outputs
    first; else NaN.
    """
    tile_counts = np.full(len(rows), np.nan)
    for i, (op, names) in enumerate(zip(rows.ops, rows.names, strict=True)):
        name = parse_kernel_name(names[0]) if names and op.kind in ("linear", "bmm") else None
        if name is not None and name.tile_m and name.tile_n:
            batch, m, n = (int(getattr(op, side, 1)) for side in ("b", "m", "n"))
            tile_counts[i] = batch * -(-n // name.tile_m) * -(-m // name.tile_n)
    return tile_counts


def _l2_byte(rows: KernelRows, gpu: Gpu) -> Array:
    return build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle_for(gpu).reference,
        (),
    ).work.l2_byte


def draw_equal_latency(pairs: EqualLatencyPairs, gpu: str) -> Figure:
    """Draw pairs of rows with equal latency and different power, by idle SMs and by L2 reuse."""
    figure = new_figure(10.0, 1.6 + 0.5 * 2 * max(len(pairs.imbalance), len(pairs.reuse), 1))
    panels = figure.subplots(1, 2)
    _paired(panels[0], pairs.imbalance, "Load imbalance: one tile on the busiest SM", _tiles_text)
    _paired(panels[1], pairs.reuse, f"L2 reuse: arithmetic within {NEAR_FLOP:.0%}", _memory_text)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        frameon=False,
        ncols=2,
        loc="outside upper right",
    )
    return add_caption(
        figure,
        describe_rows(
            gpu, "sustained rows at the top clock, not capped; after paper 003, figure 2"
        ),
    )


def _tiles_text(member: LatencyPairMember) -> str:
    return f"{member.tiles:.0f} tiles, {1e6 * member.latency_s:.2f} µs"


def _memory_text(member: LatencyPairMember) -> str:
    return f"memory {member.memory_w:.0f} W, {1e6 * member.latency_s:.2f} µs"


def _paired(
    axes: Axes,
    pairs: tuple[tuple[LatencyPairMember, LatencyPairMember], ...],
    title: str,
    text: Callable[[LatencyPairMember], str],
) -> None:
    members = [member for pair in pairs for member in pair]
    places = [place + 0.5 * (place // 2) for place in range(len(members))]
    axes.barh(
        places,
        [m.power_w for m in members],
        color="#BBBBBB",
        label="measured",
        height=0.8,
    )
    axes.plot(
        [m.predicted_w for m in members],
        places,
        "D",
        ms=5,
        color=OURS,
        label="predicted, held out",
    )
    axes.set_yticks(places, [f"{m.work}\n{text(m)}" for m in members])
    axes.invert_yaxis()
    axes.set_xlabel("Power (W)")
    axes.set_title(title)


def draw_error_by_size(held_rows: HeldOutRows, gpu: str) -> Figure:
    """Draw the error by measured latency of the model, of its ideal scaffold, and of a
    FLOPs-and-bytes regression.
    """
    at = held_rows.is_random("burst")
    measured = held_rows.latency_s[at]
    families = np.array(held_rows.family)[at]
    bare, regressed = predict_simply(gpu, int(at.sum()))
    named = {"Wattcast": held_rows.predicted_latency_s[at], "ideal scaffold, nothing fitted": bare}
    named["FLOPs and bytes, by family"] = regressed
    colours = dict(zip(named, (OURS, _BARE, _THEIRS), strict=True))
    groups: dict[str, tuple[str, ...]] = {
        "products": ("gemm",),
        "convolutions": ("conv2d",),
        "attention": ("attention",),
    }
    groups |= {
        "softmax and norms": ("softmax", "layernorm", "rmsnorm"),
        "elementwise": ("elementwise",),
    }
    figure = new_figure(11.0, 5.8)
    axes = figure.subplots(2, 3).ravel()
    for panel, (title, members) in zip(
        axes, [("all", tuple(set(families))), *groups.items()], strict=True
    ):
        here = np.isin(families, members)
        for name, predicted in named.items():
            _binned(
                panel,
                measured[here],
                np.abs(predicted[here] / measured[here] - 1.0),
                name,
                colours[name],
            )
        panel.set_title(f"{title} ({int(here.sum())})")
        panel.set_ylim(0, 100)
        panel.set_xscale("log")
    axes[0].legend(frameon=False)
    for panel in axes[3:]:
        panel.set_xlabel("Measured latency (µs)")
    for panel in (axes[0], axes[3]):
        panel.set_ylabel("Error (%)")
    figure.suptitle(
        "Error by size of kernel: median, and from the 25th to the 75th percentile", fontsize=10
    )
    return add_caption(
        figure,
        describe_rows(gpu, "held-out bursts at the top clock; after paper 003, figures 6 and 10b"),
    )


def predict_simply(gpu: str, count: int) -> tuple[Array, Array]:
    """Return the latency of the same rows from the ideal scaffold and from the regression."""
    rows = kernel_rows.load_kernel_rows(gpu)
    test = rows.to_judge() & rows.is_kind("burst") & on_random_data(rows)
    assert int(test.sum()) == count, "held-out rows are those of the database"
    bundle = shipped_bundle(gpu)
    assert bundle is not None
    bare = predict_with_fit(ideal_scaffold(bundle), rows.select_rows(test), hardware.load_gpu(gpu))[
        :, 0
    ]
    return bare, regress_by_family(rows.select_rows(test), assign_folds(rows)[test])


def _binned(
    axes: Axes,
    latency_s: Array,
    error: Array,
    label: str,
    colour: str,
    bins: int = 9,
) -> None:
    """Plot median and quartiles in bins of equal count."""
    order = np.argsort(latency_s, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part) > 3]
    middle = [1e6 * float(np.median(latency_s[part])) for part in parts]
    low, median, high = (
        np.array([100 * np.quantile(error[p], q) for p in parts]) for q in (0.25, 0.5, 0.75)
    )
    axes.fill_between(
        middle,
        low,
        high,
        color=colour,
        alpha=0.15,
        lw=0,
    )
    axes.plot(
        middle,
        median,
        "o-",
        color=colour,
        ms=3,
        lw=1.2,
        label=label,
    )


_SHOWN = (
    (
        "bert-large",
        {
            "batch": 32,
            "seq": 512,
            "attention": "eager",
        },
    ),
    ("bert-large", {"batch": 32, "seq": 512}),
    ("gpt2-xl", {"batch": 8, "seq": 1024}),
    (
        "qwen2-1.5b",
        {
            "batch": 8,
            "seq": 1024,
            "attention": "eager",
        },
    ),
    ("qwen2-1.5b", {"batch": 8, "seq": 1024}),
    ("llama3-8b", {"batch": 8, "seq": 512}),
    (
        "llama3-8b",
        {
            "batch": 8,
            "seq": 1024,
            "phase": "decode",
        },
    ),
    ("vit-large", {"batch": 64}),
    ("resnet50", {"batch": 128}),
)


def collect_kind_shares(gpu: str) -> list[KindShares]:
    """Return kernel kinds of whole models as predicted, and as the profiler saw them where it
    did.
    """
    path = database_folder(gpu) / MODEL_KERNELS_FILE
    profiles = (
        {entry["id"]: entry for entry in read_table(path) if not entry["error"]}
        if path.exists()
        else {}
    )
    if profiles:
        kind_shares = []
        for case in _spread(
            [c for c in whole_models.load_models(gpu) if c.row.id in profiles and c.row.graph]
        ):
            name = f"{case.graph.name.removesuffix(f' {case.row.dtype}')}, {case.row.attention}"
            kind_shares.append(profiled_shares(name, profiles[case.row.id]))
            predicted = predicted_shares(
                api.predict(case.graph, gpu, host_launch="0us", force=True)
            )
            kind_shares.append(KindShares(name, False, predicted.share))
        return kind_shares
    predictions = [
        (
            api.predict(
                m,
                gpu,
                host_launch="0us",
                force=True,
                stack="eager",
                **o,
            ),
            o,
        )
        for m, o in _SHOWN
    ]
    return [
        KindShares(f"{p.name}, {o.get('attention', 'flash')}", False, predicted_shares(p).share)
        for p, o in predictions
    ]


def _spread(cases: list[ModelCase]) -> list[ModelCase]:
    """Choose as many cases as a page holds, evenly from the longest of each model and phase."""
    longest: dict[tuple[str, str], ModelCase] = {}
    for case in sorted(cases, key=lambda case: case.row.latency_s or 0.0):
        longest[case.row.model, case.row.phase] = case
    longest_ids = {case.row.id for case in longest.values()}
    one_each = [case for case in cases if case.row.id in longest_ids]
    step = max(len(one_each) / _MOST_SHOWN, 1.0)
    return [one_each[int(i * step)] for i in range(min(len(one_each), _MOST_SHOWN))]


def draw_kind_shares(kind_shares: list[KindShares], gpu: str) -> Figure:
    """Draw the share of time by kernel kind, one bar per workload; measured ones are outlined in
    black.
    """
    figure, axes = new_axes(9.0, 1.2 + 0.28 * len(kind_shares))
    for place, entry in enumerate(kind_shares):
        start = 0.0
        for kind in KERNEL_KINDS:
            width = 100 * entry.share[kind]
            edge: dict[str, Any] = (
                {"edgecolor": DOT, "linewidth": 1.0} if entry.measured else {"alpha": 0.75}
            )
            label = kind if place == 0 else None
            axes.barh(
                place,
                width,
                left=start,
                color=_KIND_COLOUR[kind],
                label=label,
                **edge,
            )
            start += width
    names = [
        f"{entry.name}{', measured' if entry.measured else ', predicted'}" for entry in kind_shares
    ]
    axes.set_yticks(range(len(kind_shares)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("Share of the time in kernels (%)")
    axes.legend(
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    seen = any(entry.measured for entry in kind_shares)
    note = (
        "outlined: seen by the profiler, else predicted"
        if seen
        else "no profile is at hand: predicted"
    )
    return add_caption(figure, describe_rows(gpu, f"after paper 003, figure 1; {note}"))


KERNEL_KINDS = ("GEMM-like", "reduction", "elementwise")
_PRODUCTS = ("linear", "bmm", "conv2d", "attention")
_ROWS = ("softmax", "layernorm", "rmsnorm")
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum", "batch_norm", "norm")


@dataclass(frozen=True)
class KindShares:
    """Shares of the time in kernels by kind, of one workload."""

    name: str
    measured: bool
    share: Mapping[str, float]


def operator_kind(op: Operator) -> str:
    """Return whether an operator is GEMM-like, a reduction or elementwise."""
    if op.kind in _PRODUCTS:
        return "GEMM-like"
    reducing = op.kind in _ROWS or (isinstance(op, Elementwise) and op.function in _REDUCING)
    return "reduction" if reducing else "elementwise"


def predicted_shares(p: Prediction) -> KindShares:
    """Return the shares of the predicted time in kernels."""
    return KindShares(
        p.name, False, _shared((operator_kind(o.op), float(o.latency_s)) for o in p.ops)
    )


def profiled_shares(name: str, profile: Mapping[str, Any]) -> KindShares:
    """Return the shares of the time in kernels that the profiler saw."""
    pairs = zip(profile["order"], profile["kernel_s"], strict=True)
    return KindShares(
        name, True, _shared((find_kernel_family(profile["names"][i])["kind"], s) for i, s in pairs)
    )


def _shared(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds_of_kind = dict.fromkeys(KERNEL_KINDS, 0.0)
    for kind, seconds in times:
        seconds_of_kind[kind] += seconds
    total = sum(seconds_of_kind.values()) or 1.0
    return {kind: seconds / total for kind, seconds in seconds_of_kind.items()}


def save_ledger_figures(
    folder: Path,
    gpu: str = "h200",
    ending: str = "png",
) -> list[Path]:
    """Save every figure whose data are there into ``folder``, those after paper 003 too."""
    makers: dict[str, Callable[[], Figure | None]] = {
        "validation-latency": lambda: draw_held_out("latency", gpu),
        "validation-power": lambda: draw_held_out("power", gpu),
        **list_figures(load_held_out(gpu), gpu),
        "validation-models": lambda: draw_whole_models(gpu),
    }
    drawn = {folder / f"{name}.{ending}": make() for name, make in makers.items()}
    figures = {path: figure for path, figure in drawn.items() if figure is not None}
    for path, figure in figures.items():
        save_figure(figure, path)
    return list(figures)
