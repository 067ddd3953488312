"""Fit a kernel database (``lab fit kernels``): held-out predictions, intervals, the spread of
cards, and a bundle.

How far cards of a kind differ is estimated from rows of one kernel that were measured more than
once. A kernel i on card c, in logs, is y_ic = κ_i + card_c + (card x kernel)_ic + noise.
Differences of the same kernel between two cards have the mean of the cards' difference and a
variance of 2·(σ_card x kernel² + σ_noise²); repeats in one run give σ_noise. Variances are
estimated by moments from all pairs of cards [Searle1992, 4.3], spreads from 90th percentiles, since
they widen 90 % intervals. Power is compared where the power limit does not hold it.

Cards that measured different kernels are compared through the model: both ran rows of the same
random plan, so the difference of their median held-out residuals is that of the cards. It may widen
the published spread, not narrow it, since card x kernel cannot be told from the error of the model.
"""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import (
    PLANNED,
    KernelRows,
    parse_operators,
    settled_figures,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.core import files
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import (
    CHAINS_FILE,
    database_folder,
    read_table,
    write_table,
)
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels, reference_chip
from wattcast.kernels.kernel_table import USUAL_CONDITION, IssueSegment
from wattcast.lab.fit import few_rows_fit
from wattcast.lab.fit.engine_fit import (
    extend_bundle,
    load_fitting_steps,
    replace_family,
)
from wattcast.lab.fit.held_out import (
    HeldOutRows,
    fit_interval_ends,
    fit_nearness,
    fit_widening,
    predict_held_out,
)
from wattcast.lab.fit.kernel_fit import (
    build_bundle,
    fit_idle_curve,
    fit_kernel_rows,
)
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle import bundle_for, support_widening
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.bundle.calibrated import save_bundle
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    CardSpread,
    NearnessLine,
    Widening,
)
from wattcast.predictor.cold_cache import ColdCacheDelay, cold_cache_terms

LEAST_LAYERS = 20  # to say how far workloads of several kernels may be from their sum
LEAST_COMMON = 20  # rows that two cards must share
KIND_OF_QUANTITY = {"latency": "burst", "power": "sustained"}
ALL_FAMILIES = "all"


@dataclass(frozen=True)
class MeasuredLayers:
    """Measured layers, ``(layer,)`` each; the coefficients multiply ``terms``, ``(layer, 2)``."""

    name: tuple[str, ...]
    layer_s: Array
    alone_s: Array  # sum of its operators, each run alone
    kernels: Array
    terms: Array

    def select_rows(self, rows: Mask) -> MeasuredLayers:
        """Return some of the layers."""
        names = tuple(name for name, is_chosen in zip(self.name, rows, strict=True) if is_chosen)
        return MeasuredLayers(
            names,
            self.layer_s[rows],
            self.alone_s[rows],
            self.kernels[rows],
            self.terms[rows],
        )

    @property
    def architecture(self) -> npt.NDArray[np.str_]:
        """The architecture of each layer: ``llama`` of ``stack llama-2048 decode 1 512``."""
        return np.array([name.split()[1].partition("-")[0] for name in self.name])


def collect_layers(chains: Sequence[Plain], gpu: Gpu) -> MeasuredLayers:
    """Collect the layers of a database whose operators were all measured alone."""
    whole = [
        row
        for row in chains
        if row.get("handed_on") and row.get("latency_s") and row.get("alone_s")
    ]
    good = [row for row in whole if not (row.get("error") or row.get("flags"))]
    if not good:
        raise BadInput(
            "no layer has all its operators measured by themselves. Measure them: `--steps stack`."
        )
    reference = reference_chip(gpu)
    figures = []
    for row in good:
        listed = list(row["operators"])
        distinct = list(dict.fromkeys(listed))
        calls = np.array([listed.count(text) for text in distinct], np.float64)
        ops = parse_operators([json.loads(text) for text in distinct])
        order = (IssueSegment(np.arange(len(ops)), calls, 2),)  # a layer follows another like it
        kernels = build_kernels(
            ops,
            (USUAL_CONDITION,) * len(ops),
            gpu,
            reference,
            order,
        )
        figures.append(
            (calls @ kernels.work.launches, *(cold_cache_terms(kernels, reference.l2_byte) @ calls))
        )
    table = np.array(figures)
    layer_s, alone_s = np.array(
        [(float(row["latency_s"]), float(sum(row["alone_s"]))) for row in good]
    ).T
    return MeasuredLayers(
        tuple(str(row["name"]) for row in good),
        layer_s,
        alone_s,
        table[:, 0],
        table[:, 1:],
    )


def fit_cold_cache(layers: MeasuredLayers) -> ColdCacheDelay:
    """Fit non-negative coefficients by least squares on the relative error of the layers' times."""
    from scipy.optimize import nnls

    scale = np.maximum(layers.terms.max(axis=0), 1e-30)
    value, _ = nnls(
        layers.terms / scale / layers.layer_s[:, None], 1.0 - layers.alone_s / layers.layer_s
    )
    operator_s, s_per_byte = (float(f"{x:.3g}") for x in value / scale)
    return ColdCacheDelay(operator_s, s_per_byte, len(layers.name))


def predict_layers_s(layers: MeasuredLayers, law: ColdCacheDelay) -> Array:
    """Predict the seconds of each layer: its operators alone, plus the extra time of the law."""
    return np.asarray(layers.alone_s + layers.terms @ np.array([law.operator_s, law.s_per_byte]))


def predict_held_out_layers_s(layers: MeasuredLayers) -> Array:
    """Predict the seconds of each layer from a law that saw no layer of its architecture."""
    predicted_s = np.empty(len(layers.name))
    for architecture in dict.fromkeys(layers.architecture.tolist()):
        of_architecture = layers.architecture == architecture
        predicted_s[of_architecture] = predict_layers_s(
            layers.select_rows(of_architecture),
            fit_cold_cache(layers.select_rows(~of_architecture)),
        )
    return predicted_s


def load_layers(database: str | Path, gpu: Gpu) -> MeasuredLayers | None:
    """Load the layers of a database; None where it has too few."""
    folder = Path(database) if Path(database).is_dir() else database_folder(str(database))
    if not (folder / CHAINS_FILE).is_file():
        return None
    handed_on = [row for row in read_table(folder / CHAINS_FILE) if row.get("handed_on")]
    return collect_layers(handed_on, gpu) if len(handed_on) >= LEAST_LAYERS else None


HELD_OUT_FILE = "out_of_fold.parquet"


def fit_kernel_database(
    database: str | Path,
    gpu: str,
    tell: Callable[[str], None] = lambda _: None,
    inherits: bool | None = None,
    leaves_out: bool = False,
) -> tuple[Bundle, HeldOutRows]:
    """Fit a bundle of ``gpu`` to a database, with the held-out predictions that its intervals come
    from.

    ``inherits``: whether the rows move the card's forecast (or shipped bundle) instead of being
    fitted from nothing; None: when they are few (``few_rows_fit``). ``leaves_out``: learn anew, by
    fifteen more fits, how far intervals must reach for what was never measured (``fit_widening``),
    instead of taking what ships."""
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(database)
    idle_rows = kernel_rows.load_idle_rows(database)
    if inherits is None:
        inherits = int((rows.is_kind("burst") & rows.fit).sum()) < few_rows_fit.FEW_BURSTS
    if inherits and leaves_out:
        raise BadInput(
            "--leave-out is for a fit from nothing, and these rows move the card's forecast: "
            "leave it away, or ask for --alone."
        )
    if inherits:
        with one_thread():
            bundle, held_rows = few_rows_fit.fit_few_rows(
                rows,
                chip,
                bundle_for(chip),
                idle_rows,
                tell,
            )
        return replace(bundle, cards=fit_card_spread(rows)), held_rows
    if not idle_rows:
        raise BadInput(
            f"{database}: no idle rows, so static power cannot be told from work. Run the "
            "idle step."
        )
    idle = fit_idle_curve(idle_rows, chip)
    shipped = bundles.shipped_bundle(gpu)
    bundle, held_rows = _fit_from_nothing(
        rows,
        chip,
        idle,
        shipped,
        tell,
        leaves_out,
    )
    layers = load_layers(database, chip)
    if layers is not None:
        bundle = replace(bundle, cold=fit_cold_cache(layers))
    elif shipped is not None:
        bundle = replace(bundle, cold=shipped.cold)
    return bundle, held_rows


def _fit_from_nothing(
    rows: KernelRows,
    chip: Gpu,
    idle: IdlePower,
    shipped: Bundle | None,
    tell: Callable[[str], None],
    leaves_out: bool,
) -> tuple[Bundle, HeldOutRows]:
    """Fit a bundle to rows alone, and its intervals to predictions of rows held out in five folds.

    ``shipped``, the bundle that ships for the GPU, gives what rows of kernels do not tell: the
    interval of collectives, which comes from public timings, and, unless ``leaves_out`` learns it
    anew, how far intervals reach for what was never measured.
    """
    with one_thread():
        held_rows = predict_held_out(rows, chip, idle, tell=tell)
        fit = fit_kernel_rows(rows, chip, idle)
        near = fit_nearness(held_rows)
        residuals = fit_interval_ends(held_rows, near=near)
        widening = (
            fit_widening(
                rows,
                chip,
                idle,
                residuals,
                near,
                tell,
            )
            if leaves_out
            else _take_widening(shipped, near)
        )
    if shipped is not None:
        residuals = {"collective": shipped.residuals["collective"], **residuals}
    burst = sum(kind == "burst" for kind in held_rows.kind)
    sustained = len(held_rows.kind) - burst
    note = (
        f"{len(rows)} rows; residuals from {burst} burst and {sustained} sustained rows "
        "held out in 5 folds"
    )
    bundle = build_bundle(
        fit,
        rows,
        chip,
        residuals,
        note,
    )
    spread = fit_card_spread(rows, held_rows)
    return replace(bundle, cards=spread, widening=widening), held_rows


def fit_engine_database(
    database: str | Path,
    gpu: str,
    bundle: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    family: str = "",
) -> Bundle:
    """Fit the kernels of an engine into a fitted bundle: one read from a folder, or the one that
    ships.

    With a ``family`` of kernels all others stay as they are.
    """
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(database)
    start = bundles.shipped_bundle(gpu) if bundle is None else bundles.read_bundle(bundle)
    if start is None or start.learned is None or start.clock_law is None:
        raise BadInput(
            f"{gpu}: no bundle with learned factors to add to. Fit one with `wattcast lab "
            "fit kernels`."
        )
    with one_thread():
        steps = load_fitting_steps(gpu, float(np.mean(chip.clocks.max_hz)))
        torch_rows = kernel_rows.load_kernel_rows(gpu) if database_folder(gpu).is_dir() else None
        fitted = extend_bundle(
            start,
            rows,
            chip,
            tell,
            steps,
            torch_rows,
        )
    return replace_family(start, fitted, family) if family else fitted


def _take_widening(
    shipped: Bundle | None,
    near: tuple[NearnessLine, NearnessLine],
) -> Widening:
    """Return the widening of a shipped bundle, or the default, with the nearness of the rows at
    hand.
    """
    widening = support_widening.default_widening() if shipped is None else shipped.widening
    return widening.with_nearness(near)


def write_fit(
    bundle: Bundle,
    held_rows: HeldOutRows,
    folder: Path,
) -> None:
    """Write ``bundle.json``, ``arrays.npz`` and ``out_of_fold.parquet`` to ``folder``."""
    save_bundle(bundle, folder)
    columns = vars(held_rows).items()
    rows = [
        {name: _round_value(values[i]) for name, values in columns}
        for i in range(len(held_rows.kind))
    ]
    write_table(folder / HELD_OUT_FILE, rows)


def shipped_held_out(gpu: str) -> HeldOutRows | None:
    """Return the held-out predictions that ship with a bundle, or None."""
    path = files("wattcast.predictor.bundle").joinpath(gpu, HELD_OUT_FILE)
    if not path.is_file():
        return None
    rows = read_table(Path(str(path)))
    columns: dict[str, Any] = {}
    for item in fields(HeldOutRows):
        values = [row.get(item.name) for row in rows]
        text = item.type == "tuple[str, ...]"
        number = [float("nan") if v is None else v for v in values]
        columns[item.name] = tuple(values) if text else np.array(number)
    return HeldOutRows(**columns)


def load_held_out(gpu: str) -> HeldOutRows:
    """Return the held-out predictions that ship with a GPU's bundle."""
    held_rows = shipped_held_out(gpu)
    if held_rows is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast lab validate --refit`.")
    return held_rows


def _round_value(value: Any) -> Any:
    if isinstance(value, (str, np.integer)):
        return value if isinstance(value, str) else int(value)
    return float(f"{value:.6g}") if np.isfinite(value) else None


@dataclass(frozen=True)
class CardComponents:
    """Standard deviations of logs: between cards, of kernels within a card, of repeats; and what
    they rest on.
    """

    quantity: str
    card: float
    card_by_kernel: float
    noise: float
    cards: int
    rows: int  # pairs of rows on two cards

    @property
    def apart(self) -> float:
        """Standard deviation of one kernel's log-ratio between two cards, without measurement
        noise.
        """
        return float(np.sqrt(2.0 * (self.card**2 + self.card_by_kernel**2)))


def fit_card_spread(rows: KernelRows, held_rows: HeldOutRows | None = None) -> CardSpread:
    """Fit the spread of cards to rows and their held-out predictions, together with the published
    spread.
    """
    return combine_spread(
        {quantity: compare_cards(rows, quantity, held_rows) for quantity in KIND_OF_QUANTITY}
    )


def compare_cards(
    rows: KernelRows,
    quantity: str,
    held_rows: HeldOutRows | None,
) -> CardComponents | list[CardShift]:
    """Compare cards by kernels in common, or by their shifts where they have none (an empty list:
    one card).
    """
    components = variance_components(rows, quantity)
    return components if components is not None else residual_shifts(rows, quantity, held_rows)


def combine_spread(seen_of: Mapping[str, CardComponents | list[CardShift]]) -> CardSpread:
    """Combine what was seen of each quantity with the published spread."""
    published = support_widening.published_spread()
    value = {}
    cards = 1
    sources = []
    for quantity, seen in seen_of.items():
        published_value = getattr(published, quantity)
        if isinstance(seen, CardComponents):
            # power is fitted to the mean of C cards: another differs from it by 1 + 1/C of a
            # variance, not by two
            share = (1.0 + 1.0 / seen.cards) / 2.0 if quantity == "power" else 1.0
            between = _average_variance(seen.apart**2, seen.cards - 1, published_value)
            value[quantity] = float(np.sqrt(share)) * between
            cards = max(cards, seen.cards)
            sources.append(f"{quantity} of {seen.cards} cards with {seen.rows} rows in common")
        elif seen:
            variance = float(np.mean([max(s.shift**2 - s.error**2, 0.0) for s in seen]))
            value[quantity] = max(
                _average_variance(variance, len(seen), published_value), published_value
            )
            cards = max(cards, 1 + len(seen))
            sources.append(f"{quantity} of {1 + len(seen)} cards by their residuals")
        else:
            value[quantity] = published_value
            sources.append(f"{quantity} as published")
    return CardSpread(
        value["latency"],
        value["power"],
        cards,
        f"{'; '.join(sources)}. Published: {published.source}",
    )


def _average_variance(
    variance: float,
    differences: int,
    published: float,
) -> float:
    """Average variances weighted by the differences between cards that they rest on: C cards give C
    - 1.
    """
    weight = support_widening.learned_distances().cards.counts_for
    return float(np.sqrt((weight * published**2 + differences * variance) / (weight + differences)))


@dataclass(frozen=True)
class CardShift:
    """Difference of the median log-residuals of a card and the card with most rows, and its
    standard error.
    """

    card: str
    shift: float
    error: float
    rows: int


def residual_shifts(
    rows: KernelRows,
    quantity: str,
    held_rows: HeldOutRows | None,
) -> list[CardShift]:
    """Compare every card with enough planned rows to the card with most; empty without matching
    predictions.
    """
    judged = np.flatnonzero(rows.to_judge())
    if held_rows is None or len(held_rows.kind) != len(judged):
        return []
    ratio, usable = held_rows.ratio(quantity)
    usable &= np.array([rows.chosen[i] == PLANNED for i in judged], dtype=bool)
    if quantity == "power":
        usable &= held_rows.clock_hz > TOP_CLOCK_SHARE * np.nanmax(held_rows.clock_hz)
    card = np.array([rows.uuid[i] for i in judged])
    logs = {name: np.log(ratio[usable & (card == name)]) for name in dict.fromkeys(card.tolist())}
    logs = {name: values for name, values in logs.items() if values.size >= LEAST_COMMON}
    variance = {  # of the median
        name: np.pi
        / 2.0
        * (float(np.quantile(np.abs(v - np.median(v)), 0.9)) / NORMAL_P90) ** 2
        / v.size
        for name, v in logs.items()
    }
    first = max(logs, key=lambda name: logs[name].size, default="")
    return [
        CardShift(
            card=name,
            shift=float(np.median(mine) - np.median(logs[first])),
            error=float(np.sqrt(variance[name] + variance[first])),
            rows=mine.size,
        )
        for name, mine in logs.items()
        if name != first
    ]


def variance_components(rows: KernelRows, quantity: str) -> CardComponents | None:
    """Estimate variance components of ``latency`` (bursts) or ``power`` (sustained rows); None for
    a single card.
    """
    pairs = pair_cards(rows, quantity)
    if not pairs:
        return None
    noise = _estimate_repeat_noise(rows, quantity)
    middle, count = np.array([(np.median(ratio), ratio.size) for ratio in pairs.values()]).T
    off = [np.abs(ratio - m) for ratio, m in zip(pairs.values(), middle, strict=True)]
    within = np.array([np.quantile(deviations, 0.9) for deviations in off]) / NORMAL_P90
    by_kernel = max(float(np.mean(within**2)) / 2.0 - noise**2, 0.0)
    # the median of n kernels is itself uncertain by π/2·σ²/n
    card = max(float(np.mean(middle**2 - np.pi / 2.0 * within**2 / count)) / 2.0, 0.0)
    cards = len({card for pair in pairs for card in pair})
    return CardComponents(
        quantity,
        card**0.5,
        by_kernel**0.5,
        float(noise),
        cards,
        int(count.sum()),
    )


def _estimate_repeat_noise(rows: KernelRows, quantity: str) -> float:
    """Estimate the standard deviation of one row from repeats."""
    still = repeat_log_ratios(rows, quantity)
    return float(np.quantile(np.abs(still), 0.9) / NORMAL_P90 / np.sqrt(2.0)) if still.size else 0.0


def pair_cards(rows: KernelRows, quantity: str) -> dict[tuple[str, str], Array]:
    """Return the log of second over first card, by kernel, of every two cards with enough kernels
    in common.

    Repeats of a kernel on a card are averaged first.
    """
    power_w, clock_hz, figure = settled_figures(rows)
    if quantity == "power":
        figure = np.where(clock_hz > TOP_CLOCK_SHARE * np.nanmax(clock_hz), power_w, np.nan)
    means: dict[str, dict[tuple[str, str], float]] = {}
    for key, members in _group_repeats(rows, quantity, figure).items():
        for card in dict.fromkeys(rows.uuid[i] for i in members):
            card_logs = [float(np.log(figure[i])) for i in members if rows.uuid[i] == card]
            means.setdefault(card, {})[key] = sum(card_logs) / len(card_logs)
    log_ratios = {}
    for first, second in combinations(sorted(means), 2):
        common = [key for key in means[first] if key in means[second]]
        if len(common) >= LEAST_COMMON:
            log_ratios[first, second] = np.array(
                [means[second][key] - means[first][key] for key in common]
            )
    return log_ratios


def check_left_out_cards(rows: KernelRows, quantity: str) -> dict[str, Mask]:
    """Tell for each card which kernels in common lie within 90 % of the spread that the other cards
    show.

    Differences to every other card, each against sqrt(apart² + 2·noise²): spread and repeats of
    both."""
    pairs = pair_cards(rows, quantity)
    inside = {}
    for card in dict.fromkeys(card for pair in pairs for card in pair):
        gone = np.array([c == card for c in rows.uuid])
        remaining = rows.select_rows(~gone)
        seen = variance_components(remaining, quantity)
        spread = getattr(
            combine_spread({q: seen if q == quantity and seen else [] for q in KIND_OF_QUANTITY}),
            quantity,
        )
        noise = _estimate_repeat_noise(remaining, quantity)
        within = NORMAL_P90 * float(np.sqrt(spread**2 + 2.0 * noise**2))
        apart = np.concatenate([ratio for pair, ratio in pairs.items() if card in pair])
        inside[card] = np.abs(apart) <= within
    return inside


def repeat_log_ratios(
    rows: KernelRows,
    quantity: str,
    family: str = ALL_FAMILIES,
) -> Array:
    """Return log-ratios of rows and their repeats in the same run on the same card."""
    figure = settled_figures(rows)[2 if quantity == "latency" else 0]
    families = rows.family
    log_ratios = [
        float(np.log(figure[a] / figure[b]))
        for members in _group_repeats(rows, quantity, figure).values()
        for a, b in combinations(members, 2)
        if rows.run[a] == rows.run[b] and family in (ALL_FAMILIES, families[a])
    ]
    return np.array(log_ratios)


def _group_repeats(
    rows: KernelRows,
    quantity: str,
    figure: Array,
) -> dict[tuple[str, str], Sequence[int]]:
    """Group the rows of one operator and data, of the kind that measures the quantity."""
    groups: dict[tuple[str, str], list[int]] = {}
    usable = (
        rows.is_kind(KIND_OF_QUANTITY[quantity]) & rows.fit & np.isfinite(figure) & (figure > 0)
    )
    for i in np.flatnonzero(usable).tolist():
        groups.setdefault((rows.spec[i], rows.data[i]), []).append(i)
    return {key: members for key, members in groups.items() if len(members) > 1}
