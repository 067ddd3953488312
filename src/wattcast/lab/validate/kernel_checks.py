"""Ledger rows of kernels: latency, power and clock, intervals, kernel choice, counters, layers,
engine kernels.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate.kernel_rows import (
    KernelRows,
    load_kernel_rows,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_prediction import (
    INTERVAL_LEVEL,
    conformal_ends,
    predict_with_bundle,
)
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_absent_row,
    make_ledger_row,
    mean_percent_error,
    score_row,
)
from wattcast.calibrate.whole_models import ModelCase
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import WattcastError
from wattcast.core.row_tables import (
    COUNTERS_FILE,
    database_folder,
    read_table,
)
from wattcast.hardware import Gpu
from wattcast.kernels import (
    build_kernels,
    lower_graph,
    reference_chip,
)
from wattcast.kernels.kernel_table import COUNTED_ROTATION
from wattcast.lab.fit import database_fit, held_out
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.bundle.support_widening import nearness_scale
from wattcast.predictor.kernel_phases import count_events


def kernel_rows(held_rows: held_out.HeldOutRows, gpu: str) -> list[LedgerRow]:
    """Return errors overall and by family, with capped and uncapped rows apart."""
    where = f"{gpu} kernels, held-out shapes"
    family = np.array(held_rows.family)
    burst = held_rows.is_random("burst")
    sustained = held_rows.is_random("sustained")
    top_hz = float(np.mean(hardware.load_gpu(gpu).clocks.max_hz))
    capped = held_rows.clock_hz < TOP_CLOCK_SHARE * top_hz
    free = sustained & ~capped
    at_limit = sustained & capped
    names = list(dict.fromkeys(held_rows.family))
    floors = {  # a plain roofline, the mean of the family, and always the top clock
        "latency_s": held_rows.roofline_s,
        "power_w": _family_mean(held_rows),
        "clock_hz": np.full(len(held_rows.kind), top_hz),
    }

    def score(
        column: str,
        quantity: str,
        rows: Mask,
        *goals: Any,
    ) -> LedgerRow:
        predicted = getattr(held_rows, f"predicted_{column}")[rows]
        measured = getattr(held_rows, column)[rows]
        more: dict[str, Any] = {}
        if column == "latency_s":
            error = 100 * np.abs(predicted / measured - 1)
            more["median"] = round(float(np.median(error)), 2) if rows.any() else None
        return score_row(
            where,
            quantity,
            predicted,
            measured,
            floors[column][rows],
            *goals,
            **more,
        )

    latency, power, clock = (partial(score, column) for column in floors)
    other_data = (np.array(held_rows.kind) == "sustained") & ~sustained
    return [
        latency(
            "latency",
            burst,
            "4-20 at a locked clock",
            9.0,
            5.5,
        ),
        *(latency(f"latency, {name}", burst & (family == name), None, 15.0) for name in names),
        latency("latency, sustained, not capped", free),
        latency("latency, sustained, capped", at_limit),
        power(
            "power",
            sustained,
            "3-4 at a locked clock",
            5.0,
            3.2,
        ),
        power("power, not capped", free),
        power("power, capped", at_limit),
        *(power(f"power, {name}", sustained & (family == name)) for name in names),
        clock(
            "clock as NVML reports it",
            sustained,
            "nobody",
            2.5,
            1.3,
        ),
        clock(
            "clock, capped",
            at_limit,
            "nobody",
            5.0,
            3.0,
        ),
        power("power, zeros, ones and rectified data", other_data),
    ]


def interval_rows(held_rows: held_out.HeldOutRows, gpu: str) -> list[LedgerRow]:
    """Return the share of held-out rows inside intervals whose ends come from the other folds, and
    their width.
    """
    where = f"{gpu} kernels, intervals of {INTERVAL_LEVEL:.0%}"
    family = np.array(held_rows.family)
    rows = []
    judged = {}

    def score_coverage(
        name: str,
        at: Mask,
        inside: Mask,
        width: Array,
    ) -> LedgerRow:
        shares = {
            "coverage": inside[at].mean(),
            "width": width[at].mean(),
            "median_width": np.median(width[at]),
        }
        more: dict[str, Any] = {key: round(100 * float(share), 1) for key, share in shares.items()}
        return make_ledger_row(
            where,
            name,
            int(at.sum()),
            None,
            **more,
            wanted=[85.0, 95.0],
        )

    for quantity, near in (("latency", held_rows.near), ("power", held_rows.near_power)):
        ratio, measured = held_rows.ratio(quantity)
        judged[quantity] = (
            near,
            measured,
            *_find_covered(
                quantity,
                ratio,
                held_rows.fold,
                family,
                near,
                measured,
            ),
        )
    for name in dict.fromkeys(held_rows.family):
        for quantity, (_, measured, inside, width) in judged.items():
            rows.append(
                score_coverage(f"{quantity}, {name}", measured & (family == name), inside, width)
            )
    labels = (
        "farthest quarter from other rows",
        "second quarter",
        "third quarter",
        "nearest quarter",
    )
    for quantity, (near, measured, inside, width) in judged.items():
        with_distance = measured & np.isfinite(
            near
        )  # none where the distance to the nearest other row was not kept
        quarter = (
            np.searchsorted(np.quantile(near[with_distance], [0.25, 0.5, 0.75]), near)
            if with_distance.any()
            else None
        )
        for i, label in enumerate(labels if quarter is not None else ()):
            rows.append(
                score_coverage(
                    f"{quantity}, {label}", with_distance & (quarter == i), inside, width
                )
            )
    return rows


def _find_covered(
    quantity: str,
    ratio: Array,
    fold: npt.NDArray[np.int64],
    family: npt.NDArray[np.str_],
    near: Array,
    measured: Mask,
) -> tuple[Mask, Array]:
    """Return which rows lie inside ends from the other folds' rows, and the width of each
    interval.
    """
    inside = np.zeros(len(ratio), dtype=bool)
    width = np.full(len(ratio), np.nan)
    for k in np.unique(fold[measured]):
        training = measured & (fold != k)
        line = held_out.fit_nearness_line(np.log(ratio[training]), family[training], near[training])
        typical = held_out.scale_ratios(ratio[training], near[training], line)
        for name in np.unique(family[measured & (fold == k)]):
            here = measured & (fold == k) & (family == name)
            if quantity == "latency":
                low, high = conformal_ends(typical[family[training] == name])
            else:
                low, high = held_out.power_ends(typical, family[training], str(name))
            scale = nearness_scale(near[here], line)
            inside[here] = (ratio[here] >= low**scale) & (ratio[here] <= high**scale)
            width[here] = high**scale - low**scale
    return inside, width


def _family_mean(held_rows: held_out.HeldOutRows) -> Array:
    """Return the mean power of each row's family over the other folds, which is the floor."""
    family = np.array(held_rows.family)
    mean_w = np.full(len(held_rows.kind), np.nan)
    measured = np.isfinite(held_rows.power_w) & (np.array(held_rows.data) == "random")
    for name, fold in set(zip(held_rows.family, held_rows.fold.tolist(), strict=True)):
        of_family = family == name
        here = held_rows.fold == fold
        if (measured & of_family & ~here).any():
            mean_w[of_family & here] = held_rows.power_w[measured & of_family & ~here].mean()
    return mean_w


def choice_rows(held_rows: held_out.HeldOutRows, gpu: str) -> list[LedgerRow]:
    """Return how often the fitted kernel choice is the library's, and the latency error with the
    kernel that ran.
    """
    where = f"{gpu} kernel choice"
    family = np.array(held_rows.family)
    burst = held_rows.is_random("burst")
    choices = []
    oracles = []
    for name in ("gemm", "conv2d"):
        of_family = burst & (family == name)
        choices.append(_score_choice(held_rows, of_family, where, name))
        oracles.append(_score_oracle(held_rows, of_family, where, name))
    return choices + oracles


class _NamedKernel(NamedTuple):
    """A kernel of a product, as its name in words says."""

    kind: str
    tile_n: int
    tile_m: int
    splits_k: bool


def _parse_kernel(text: str) -> _NamedKernel:
    """Read ``KIND NxM`` or ``KIND NxM split``."""
    kind, tile, *split = text.split()
    tile_n, tile_m = tile.split("x")
    return _NamedKernel(kind, int(tile_n), int(tile_m), bool(split))


def _score_choice(
    held_rows: held_out.HeldOutRows,
    rows: Mask,
    where: str,
    name: str,
) -> LedgerRow:
    """Return how often the kernel that was chosen is, in part or in whole, the one that ran."""
    same_kind = []
    same_tile = []
    near_area = []
    same_split = []
    distinct = set()
    for row in np.flatnonzero(rows).tolist():
        if not (held_rows.ran[row] and held_rows.chosen[row]):
            continue
        ran = _parse_kernel(held_rows.ran[row])
        chosen = _parse_kernel(held_rows.chosen[row])
        area_ratio = chosen.tile_n * chosen.tile_m / (ran.tile_n * ran.tile_m)
        distinct.add(ran)
        same_kind.append(ran.kind == chosen.kind)
        same_tile.append(ran[:3] == chosen[:3])
        near_area.append(abs(np.log2(area_ratio)) <= 1.0)
        same_split.append(ran.splits_k == chosen.splits_k)
    agreement: dict[str, Any] = {
        "kind": _percent(same_kind),
        "tile_exact": _percent(same_tile),
        "area_within_a_factor_of_two": _percent(near_area),
        "split_of_k": _percent(same_split),
        "distinct_kernels": len(distinct),
    }
    return make_ledger_row(
        where,
        f"kernel of {name}",
        len(same_kind),
        None,
        **agreement,
    )


def _percent(flags: list[bool]) -> float:
    """Return the share of flags that are set, in percent."""
    return round(float(100 * np.mean(flags)), 1) if flags else 0.0


def _score_oracle(
    held_rows: held_out.HeldOutRows,
    rows: Mask,
    where: str,
    name: str,
) -> LedgerRow:
    """Return the error of latency with the kernel that ran, beside that with the chosen one."""
    judged = rows & np.isfinite(held_rows.oracle_latency_s)
    measured_s = held_rows.latency_s[judged]
    without = mean_percent_error(held_rows.predicted_latency_s[judged], measured_s) or 0.0
    return score_row(
        where,
        f"latency of {name}, kernel that ran (oracle)",
        held_rows.oracle_latency_s[judged],
        measured_s,
        without_oracle=round(without, 1),
    )


_BANK_BYTE = 4.0  # a bank of shared memory and L1 is 4 bytes wide
_LEAST_BYTE = 1e5  # less than this is noise of the profiler and of what L2 happened to hold


def counter_rows(gpu: str) -> list[LedgerRow]:
    """Return the median ratio of predicted to counted bytes at each level of memory, and their
    correlation.
    """
    measured = _sum_counted_bytes(gpu)
    rows = load_kernel_rows(gpu)
    chip = hardware.load_gpu(gpu)
    first = {spec: i for i, spec in reversed(list(enumerate(rows.spec)))}
    specs = [spec for spec in measured if spec in first]
    ops = tuple(rows.ops[first[spec]] for spec in specs)
    conditions = [replace(rows.conditions[first[spec]], rotated=COUNTED_ROTATION) for spec in specs]
    kernels = build_kernels(
        ops,
        conditions,
        chip,
        bundle_for(chip).reference,
        (),
    )
    events, value = count_events(kernels)
    column = dict(zip(events, value.T, strict=True))
    predicted = {
        "DRAM": column["dram_read_byte"] + column["dram_write_byte"],
        "L2": column["l2_byte"],
        "shared": column["shared_byte"],
    }
    ledger_rows = []
    for level, predicted_byte in predicted.items():
        counted_byte = np.array([measured[spec][level] for spec in specs])
        ledger_rows.append(_compare_bytes(gpu, level, counted_byte, predicted_byte))
    return ledger_rows


def _sum_counted_bytes(gpu: str) -> dict[str, dict[str, float]]:
    """Return the bytes that the profiler counted at each level, by operator, over its kernels."""
    measured: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in read_table(database_folder(gpu) / COUNTERS_FILE):
        level_byte = measured[kernel["spec"]]
        level_byte["DRAM"] += kernel["dram__bytes_read_sum"] + kernel["dram__bytes_write_sum"]
        # what crosses between SMs and L2; the L2's own count also has what its two halves send one
        # another
        level_byte["L2"] += (
            kernel["l1tex__m_xbar2l1tex_read_bytes_sum"]
            + kernel["l1tex__m_l1tex2xbar_write_bytes_sum"]
        )
        level_byte["shared"] += _BANK_BYTE * (
            kernel["l1tex__data_bank_reads_sum"] + kernel["l1tex__data_bank_writes_sum"]
        )
    return measured


def _compare_bytes(
    gpu: str,
    level: str,
    counted: Array,
    predicted: Array,
) -> LedgerRow:
    enough = (counted > _LEAST_BYTE) & (predicted > _LEAST_BYTE)
    ratio = predicted[enough] / counted[enough]
    correlation = float("nan")
    if enough.sum() > 2:
        logs = np.log(predicted[enough]), np.log(counted[enough])
        correlation = float(np.corrcoef(*logs)[0, 1])
    more: dict[str, Any] = {
        "median_ratio": round(float(np.median(ratio)), 3),
        "r_of_logs": round(correlation, 4),
        "wanted": [0.95, 1.05],
        "left_out": int((~enough).sum()),
    }
    error = float(100 * np.mean(np.abs(ratio - 1)))
    return make_ledger_row(
        f"{gpu} counters",
        f"{level} bytes",
        int(enough.sum()),
        error,
        **more,
    )


def layer_rows(gpu: str) -> list[LedgerRow]:
    """Return the error of layers' times from a law that saw no such architecture; floor: the
    operators' sum.
    """
    layers = database_fit.load_layers(gpu, hardware.load_gpu(gpu))
    if layers is None:
        return []
    law = database_fit.fit_cold_cache(layers)
    return [
        score_row(
            f"{gpu} layers of operators that hand on results",
            "latency, architecture unseen",
            database_fit.predict_held_out_layers_s(layers),
            layers.layer_s,
            layers.alone_s,
            floor_is="sum of the operators alone",
            cold_operator_us=round(1e6 * law.operator_s, 2),
            cold_us_per_MB=round(1e12 * law.s_per_byte, 3),
        )
    ]


def card_rows(gpu: str, held_rows: held_out.HeldOutRows) -> list[LedgerRow]:
    """Return the spread between cards: what the database shows, what is taken, and whether it holds
    elsewhere.
    """
    rows = load_kernel_rows(gpu)
    where = f"{gpu} cards of the kind"
    kinds = database_fit.KIND_OF_QUANTITY
    spread_of = {
        quantity: database_fit.compare_cards(rows, quantity, held_rows) for quantity in kinds
    }
    spread = database_fit.combine_spread(spread_of)
    spreads = []
    for quantity, seen in spread_of.items():
        entries: dict[str, Any] = {"taken": f"{100 * getattr(spread, quantity):.2f} %"}
        if isinstance(seen, database_fit.CardComponents):
            count = seen.rows
            entries |= {
                "cards": seen.cards,
                "common_to_a_card": f"{100 * seen.card:.2f} %",
                "card_by_kernel": f"{100 * seen.card_by_kernel:.2f} %",
                "repeats": f"{100 * seen.noise:.2f} %",
            }
        else:
            count = sum(s.rows for s in seen)
            for i, s in enumerate(seen, start=2):
                entries[f"card_{i}_against_1"] = (
                    f"{100 * s.shift:+.2f} ± {100 * s.error:.2f} % by {s.rows} rows"
                )
            entries["from"] = spread.source
        spreads.append(
            make_ledger_row(
                where,
                f"{quantity}, deviation of another card",
                count,
                None,
                **entries,
            )
        )
    for quantity in (
        kinds
    ):  # the share of kernels in common that lie within the spread that the other cards show
        if left_out := database_fit.check_left_out_cards(rows, quantity):
            inside = np.concatenate(list(left_out.values()))
            more: dict[str, Any] = {
                "wanted": [85.0, 95.0],
                "coverage": round(100 * float(inside.mean()), 1),
            }
            more |= {
                f"card_{name_of(card)}": round(100 * float(one.mean()), 1)
                for card, one in left_out.items()
            }
            name = f"{quantity}, kernels in common, inside the spread that the other cards show"
            spreads.append(
                make_ledger_row(
                    where,
                    name,
                    int(inside.size),
                    None,
                    **more,
                )
            )
    return spreads


def name_of(card: str) -> str:
    """Return a short name of a card: the first digits of its identity."""
    return card.removeprefix("GPU-").partition("-")[0] or "unnamed"


def five_number_floor(cases: list[ModelCase], gpu: Gpu) -> tuple[Array, Array]:
    """Return latency and power of each case from a fit that never saw its model family."""
    latency_s = np.array([float(case.row.latency_s or np.nan) for case in cases])
    power_w = np.array([float(case.row.power_w or np.nan) for case in cases])
    family = np.array([model_family(case.row.model) for case in cases])
    compute_s = _ideal_compute_s(cases, gpu)
    byte = np.array([case.graph.byte for case in cases])
    memory_s = byte / float(np.mean(gpu.memory.byte_per_s))
    operators = np.array([float(case.operators) for case in cases])
    limit_w = float(np.mean(gpu.power.limit_w))
    time = np.column_stack([np.maximum(compute_s, memory_s), operators])

    def busy_shares(duration_s: Array) -> Array:
        return np.column_stack([np.ones(len(cases)), compute_s / duration_s, memory_s / duration_s])

    floor_s = np.full(len(cases), np.nan)
    floor_w = np.full(len(cases), np.nan)
    for name in dict.fromkeys(family.tolist()):
        here = family == name
        training = ~here
        if not training.any():
            continue
        seconds = np.maximum(time @ solve_relative(time[training], latency_s[training]), 1e-9)
        watts = solve_relative(busy_shares(latency_s)[training], power_w[training])
        floor_s[here] = seconds[here]
        floor_w[here] = np.minimum(busy_shares(seconds) @ watts, limit_w)[here]
    return floor_s, floor_w


def _ideal_compute_s(cases: list[ModelCase], gpu: Gpu) -> Array:
    """Return the seconds that each case's operations take at the peak of their pipes."""
    sm_cycle_per_s = float(np.mean(gpu.sm_count)) * float(np.mean(gpu.clocks.max_hz))
    reference = reference_chip(gpu)
    seconds = []
    for case in cases:
        kernels = lower_graph(case.graph, gpu, reference)
        flop_per_s = np.asarray(kernels.pipe_per_cycle) * sm_cycle_per_s
        seconds.append((kernels.flop / flop_per_s) @ kernels.calls)
    return np.array(seconds)


def model_family(model: str) -> str:
    """Return the family of a catalogue model: its name up to the first size."""
    families = ("gpt2", "bert", "qwen", "llama", "vit", "resnet")
    return next((name for name in families if model.startswith(name)), model)


def solve_relative(terms: Array, target: Array) -> Array:
    """Solve non-negative least squares of terms/target against one."""
    from scipy.optimize import nnls

    return np.asarray(nnls(terms / target[:, None], np.ones(len(target)))[0])


_ENGINE_GOALS = {"latency": (8.0, 4.0), "power": (5.0, 3.0)}
_FORMAT_MUST = 10.0  # percent, of fp8 and of experts


def engine_kernel_rows(gpu: str) -> list[LedgerRow]:
    """Return errors of the engine's kernels on rows held out of the fit, overall, by operator and
    for fp8.
    """
    where = f"{gpu} engine kernels, held out"
    bundle = shipped_bundle(gpu)
    try:
        rows = load_kernel_rows(f"{gpu}/engine")
    except WattcastError as error:  # no such database
        return [make_absent_row(where, "latency", str(error), *_ENGINE_GOALS["latency"])]
    assert bundle is not None, "a GPU of the ledger has a bundle"
    assert rows.held_out is not None, "engine rows say which are held out"
    judged = rows.select_rows(rows.held_out & on_random_data(rows) & rows.fit)
    measured_w, _, measured_s = settled_figures(judged)
    predicted_s, predicted_w = predict_with_bundle(bundle, judged, hardware.load_gpu(gpu)).T[:2]
    burst = judged.is_kind("burst")
    return [
        *_score_engine_kernels(
            where,
            "latency",
            judged,
            burst,
            predicted_s,
            measured_s,
        ),
        *_score_engine_kernels(
            where,
            "power",
            judged,
            ~burst,
            predicted_w,
            measured_w,
        ),
    ]


def _score_engine_kernels(
    where: str,
    quantity: str,
    rows: KernelRows,
    of_kind: Mask,
    predicted: Array,
    measured: Array,
) -> list[LedgerRow]:
    """Score one quantity overall, for fp8, and by operator."""
    measurable = of_kind & np.isfinite(measured)
    operator = np.array([str(op.kind) for op in rows.ops])
    form = np.array([str(op.math_dtype) for op in rows.ops])

    def score(
        name: str,
        at: Mask,
        must: float | None = None,
        aim: float | None = None,
    ) -> LedgerRow:
        median = None
        if at.any():
            error = np.abs(predicted[at] / measured[at] - 1.0)
            median = round(100.0 * float(np.median(error)), 1)
        return score_row(
            where,
            name,
            predicted[at],
            measured[at],
            must=must,
            aim=aim,
            median=median,
        )

    ledger_rows = [
        score(quantity, measurable, *_ENGINE_GOALS[quantity]),
        score(f"{quantity}, fp8", measurable & (form == "fp8"), _FORMAT_MUST),
    ]
    for name in sorted(set(operator.tolist())):
        must = _FORMAT_MUST if name == "engine_experts" else None
        ledger_rows.append(score(f"{quantity}, {name}", measurable & (operator == name), must))
    return ledger_rows
