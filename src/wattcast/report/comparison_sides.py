"""Read the two runs that a user wants to compare, and show their difference as text, JSON and a
figure.

- ``llama3-8b@h200,batch=8,seq=512,clock=1500MHz`` is predicted now; ``@h100-sxm`` or ``,batch=16``
  as the second run changes only what it says.
- ``FILE.json`` is the output of ``wattcast predict --json`` (``FILE.json#2``: its second
  prediction) or of ``wattcast measure run --json``.
- ``row:ID`` or ``DATABASE#ID`` is a row of ``wattcast measure models``; ``predicted`` is that row's
  workload, predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast import __version__
from wattcast.calibrate import whole_models
from wattcast.core import BadInput, bad_value, check_names, clip_text, row_journals, row_tables
from wattcast.core.measured_rows import ModelRow
from wattcast.core.strict_files import decode_json, read_bytes, read_number
from wattcast.core.units import show
from wattcast.predictor import api
from wattcast.predictor.answer_lines import round_number
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import PredictionOut, PredictOut, take_fields
from wattcast.report import comparison
from wattcast.report.comparison import (
    PartDifference,
    RunComparison,
    RunPart,
    RunSummary,
    summarise_prediction,
)
from wattcast.report.figure_style import MODULE_COLOURS, Figure, add_caption, new_figure
from wattcast.report.prediction_figures import find_kernel_family
from wattcast.report.text_tables import new_table, print_notes
from wattcast.workload.model_options import OPTION_NAMES, ModelKeywords, parse_option

PREDICTED = "predicted"
DEFAULT_DATABASE = "h200"  # where row:ID is looked up
_POINT = ("clock", "power_limit", "host_launch", "temperature", "duration", "data")
_UNSAID = (
    *_POINT,
    "attention",
    "head",
    "skew",
    "recompute",
)  # what the title of a workload leaves out
SPEC_KEYS = (*OPTION_NAMES, *_POINT)


@dataclass(frozen=True)
class PredictionSpec:
    """A prediction to make: workload, GPU and options."""

    workload: str
    gpu: str
    options: dict[str, Any]


class RunKeywords(ModelKeywords, total=False):
    """The options of a model and the settings of a GPU, as ``compare`` takes them."""

    clock: str | None
    power_limit: str | None
    host_launch: str | None
    temperature: str | None
    duration: str | None
    data: str


def compare(
    a: str | Prediction,
    b: str | Prediction,
    *,
    gpu: str | None = None,
    iterations: int = 1,
    **options: Unpack[RunKeywords],
) -> RunComparison:
    """Split the difference between two runs into operators, modules and terms that add up to it
    exactly.

    A run is a prediction, or the text that names one (at the top of this file). ``gpu`` and
    ``options`` hold for both runs where a text does not say otherwise; ``iterations`` is how often
    a measured command ran the workload.

    >>> import wattcast
    >>> why = wattcast.compare("gpt2", ",batch=2", gpu="h200", seq=64)
    >>> why.b.latency_s > why.a.latency_s
    True
    """
    names = [side for side in (a, b) if isinstance(side, str)]
    read = iter(read_pair(names[0], names[-1], gpu, iterations, **options) if names else ())
    sides = [
        summarise_prediction(side) if isinstance(side, Prediction) else next(read)
        for side in (a, b)
    ]
    return comparison.compare_runs(*sides)


def read_pair(
    a: str, b: str, gpu: str | None = None, iterations: int = 1, **options: Unpack[RunKeywords]
) -> tuple[RunSummary, RunSummary]:
    """Read both runs; ``b`` may take what it does not say from ``a``, and one may be ``predicted``
    next to a row.
    """
    common = PredictionSpec("", gpu or "", dict(options))
    gpu = gpu or DEFAULT_DATABASE
    if PREDICTED in (a, b):
        other = b if a == PREDICTED else a
        found = _find_row(other, gpu)
        if found is None:
            raise bad_value("compare", f"a whole-model row beside {PREDICTED!r}", other)
        row = found[0]
        host = "0us" if found[0].graph else None
        predicted = api.predict(
            whole_models.build_row_graph(row), gpu, host_launch=host, force=True
        )
        sides = {
            other: read_run(other, gpu, iterations),
            PREDICTED: summarise_prediction(predicted),
        }
        return sides[a], sides[b]
    first = parse_prediction_spec(a, common) if is_prediction_spec(a, common) else None
    second = parse_prediction_spec(b, common, first) if is_prediction_spec(b, common) else None
    left, right = (
        predict_spec(spec) if spec else read_run(name, gpu, iterations)
        for spec, name in ((first, a), (second, b))
    )
    return left, right


def predict_spec(spec: PredictionSpec) -> RunSummary:
    """Predict a spec; the run's name lists the options that the workload's title leaves out."""
    side = summarise_prediction(api.predict(spec.workload, spec.gpu, **spec.options))
    said = [
        f"{name.replace('_', ' ')} {spec.options[name]}" for name in _UNSAID if name in spec.options
    ]
    return replace(side, name=", ".join([side.name, *said]))


def is_prediction_spec(text: str, common: PredictionSpec) -> bool:
    """Tell whether the text is a workload at a GPU, not a file or a row."""
    if text.startswith("row:") or Path(text.partition("#")[0]).is_file():
        return False
    return "@" in text or "," in text or bool(common.gpu and not text.endswith(".json"))


def parse_prediction_spec(
    text: str, common: PredictionSpec, before: PredictionSpec | None = None
) -> PredictionSpec:
    """Parse ``MODEL@GPU,key=value,...``: what it does not say is said by ``before`` (the first run)
    or ``common``.
    """
    head, *pairs = text.split(",")
    workload, _, gpu = head.partition("@")
    leans_on = before if before is not None and not workload else common
    gpu = gpu or (before or common).gpu
    workload = workload or leans_on.workload
    if not (workload and gpu):
        raise bad_value(
            text,
            "MODEL@GPU,key=value,... such as llama3-8b@h200,batch=8, or --gpu",
            head or "nothing before ','",
        )
    options = dict(leans_on.options)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise bad_value(text, "key=value after each comma", pair)
        check_names(f"option in {text}", name, SPEC_KEYS)
        options[name] = (
            parse_option(name, value.strip(), text) if name in OPTION_NAMES else value.strip()
        )
    return PredictionSpec(workload, gpu, options)


def read_run(name: str, gpu: str, iterations: int) -> RunSummary:
    """Read a run from a file or a database row."""
    if (found_row := _find_row(name, gpu)) is not None:
        return summarise_row(found_row[0], _find_profile(*found_row))
    path, _, which = name.partition("#")
    if not Path(path).is_file():
        raise BadInput(
            f"{name}: neither MODEL@GPU,key=value,... nor a model beside --gpu nor row:ID nor a file that is there. "
            "Save a prediction with `wattcast predict ... --json > FILE.json`."
        )
    plain: Any = decode_json(read_bytes(Path(path)), object, path)
    if isinstance(plain, dict) and "predictions" in plain:
        out: PredictOut = decode_json(read_bytes(Path(path)), PredictOut, path)
        if which and not (which.isdigit() and 1 <= int(which) <= len(out.predictions)):
            raise bad_value(f"{path}#{which}", f"a number from 1 to {len(out.predictions)}", which)
        if not out.predictions:
            raise bad_value(path, "at least one prediction", "none")
        prediction = out.predictions[int(which or 1) - 1]
        check_prediction(prediction, path)
        return comparison.summarise_output(prediction)
    if isinstance(plain, dict) and {"duration_s", "power_w"} <= set(
        plain
    ):  # a command that ran the workload often
        if iterations < 1:
            raise bad_value("--iterations", "a whole number of at least 1", iterations)
        latency_s = read_number(plain["duration_s"], f"{path}: duration_s") / iterations
        power_w = read_number(plain["power_w"], f"{path}: power_w")
        if not (0.0 < latency_s <= LONGEST_S and 0.0 < power_w <= MOST_W):
            wanted = f"a duration up to {LONGEST_S:g} s and a power up to {MOST_W:g} W, above zero"
            raise bad_value(path, wanted, f"{latency_s} s, {power_w} W")
        clock = plain.get("sm_clock_hz")
        clock_hz = read_number(clock, f"{path}: sm_clock_hz", 0.0) if clock else None
        flags = tuple(
            f"{path}: {clip_text(flag)}"
            for flag in _take_list(plain.get("flags"), f"{path}: flags")
        )
        return RunSummary(
            f"{path}, measured", True, latency_s, power_w, clock_hz, None, (), {}, flags
        )
    found = (
        f"keys {', '.join(list(plain)[:6])}" if isinstance(plain, dict) else type(plain).__name__
    )
    raise bad_value(
        path, "the output of `predict --json` or of `measure run --json` with a power", found
    )


LONGEST_S = 1e9  # of one run: thirty years
MOST_W = 1e7  # of one GPU


def check_prediction(p: PredictionOut, where: str) -> None:
    """Refuse a prediction that no `predict --json` wrote: figures that are negative, endless or do
    not add up.
    """
    most_of = {
        "latency_s": LONGEST_S,
        "power_w": MOST_W,
        "clock_hz": 1e12,
        "effective_clock_hz": 1e12,
    }
    for name, most in most_of.items():
        value = getattr(p, name)
        if not 0.0 < value <= most:
            raise bad_value(f"{where}: {name}", f"above zero, at most {most:g}", value)
    energy_j = p.power_w * p.latency_s
    if not 0.99 * energy_j <= p.energy_j <= 1.01 * energy_j:
        raise bad_value(f"{where}: energy_j", f"power times latency, {energy_j:g} J", p.energy_j)
    for op in p.ops:
        label = f"{where}: {clip_text(op.operator)}"
        if not (
            0.0 <= op.latency_s <= LONGEST_S
            and 0.0 <= op.energy_j <= LONGEST_S * MOST_W
            and op.count >= 1
        ):
            wanted = "a time, an energy of zero or more, and a count above zero"
            raise bad_value(label, wanted, f"{op.latency_s} s, {op.energy_j} J, {op.count} calls")
    modules = [*p.modules, *(module for op in p.ops for module in op.modules)]
    for module in modules:
        if not 0.0 <= module.power_w <= MOST_W:
            raise bad_value(
                f"{where}: {clip_text(module.name)}", "watts of zero or more", module.power_w
            )


def _take_list(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_value(where, "a list", type(value).__name__)
    return value


def summarise_row(row: ModelRow, profile: dict[str, Any] | None) -> RunSummary:
    """Summarise a measured whole model, with its kernels by family where the profiler saw them."""
    if not (row.latency_s and row.power_w):
        raise BadInput(
            f"{row.id}: no latency or no power was measured ({row.error or 'no reason given'})."
        )
    parts = group_kernels(profile, row) if profile else ()
    notes = [f"{row.id}: {flag}" for flag in row.flags]
    if parts:
        notes.append(
            "times of kernel families come from one profiled iteration, scaled to the time in kernels"
        )
    name = f"{whole_models.build_row_graph(row).name}, measured"
    return RunSummary(
        name,
        True,
        row.latency_s,
        row.power_w,
        row.sm_clock_hz,
        row.effective_clock_hz,
        parts,
        {},
        tuple(notes),
    )


def group_kernels(profile: dict[str, Any], row: ModelRow) -> tuple[RunPart, ...]:
    """Add up the kernels of a profiled iteration by family.

    In a CUDA graph the device never waits, so the times of families are scaled to the whole
    latency. In an eager row they stay as they are, and the rest of the latency is gaps."""
    taken: dict[str, list[float]] = {}
    for place, kernel_s in zip(profile["order"], profile["kernel_s"], strict=True):
        taken.setdefault(find_kernel_family(profile["names"][place])["family"], []).append(kernel_s)
    total = sum(map(sum, taken.values()))
    latency_s = float(row.latency_s or 0.0)
    scale = latency_s / total if row.graph or total > latency_s else 1.0
    return tuple(
        RunPart(f, (f,), (f,), (), f, float(len(each)), scale * sum(each))
        for f, each in taken.items()
    )


def _find_row(name: str, gpu: str) -> tuple[ModelRow, str] | None:
    """Find the whole-model row that ``name`` means, and its database; None where it means something
    else.
    """
    database = gpu
    row_id = name.removeprefix("row:")
    if not name.startswith("row:"):
        path, sharp, row_id = name.partition("#")
        held = Path(path)
        if not (sharp and (held.is_dir() or held.suffix in (".parquet", ".jsonl"))):
            return None
        database = str(held if held.suffix != ".jsonl" else held.parent)
    rows = {case.row.id: case.row for case in whole_models.load_models(database)}
    check_names(f"row of {database}", row_id, rows, f"It has {len(rows)} rows.")
    return rows[row_id], database


def _find_profile(row: ModelRow, database: str) -> dict[str, Any] | None:
    """Return the kernels of one profiled iteration of a row; None where the profiler saw none."""
    folder = Path(database)
    if not folder.is_dir():
        folder = folder.parent if folder.is_file() else row_tables.database_folder(database)
    found: Iterable[dict[str, Any]] = ()
    if (folder / row_tables.MODEL_KERNELS_FILE).exists():
        found = row_tables.read_table(folder / row_tables.MODEL_KERNELS_FILE)
    elif not (folder / row_tables.MODELS_FILE).exists():
        lines = (
            entry
            for path in sorted(folder.rglob("*.jsonl"))
            for entry in row_journals.read_lines(path)
        )
        found = (entry for entry in lines if entry.get("record") == "model_kernels")
    return next(
        (entry for entry in found if entry["id"] == row.id and not entry.get("error")), None
    )


MOST_LISTED = 12
_QUANTITIES = (
    ("latency", "latency_s", "s"),
    ("power", "total_power_w", "W"),
    ("energy", "total_energy_j", "J"),
)
# what a user decides by comes first, then what it is made of, then one GPU of several
_ANSWERS = (
    ("tokens/s", "tokens_per_s", ""),
    ("energy per token", "energy_j_per_token", "J"),
    ("items/s", "items_per_s", ""),
    ("energy per item", "energy_j_per_item", "J"),
)
_TOTALS = (("total power", "total_power_w", "W"), ("total energy", "total_energy_j", "J"))
_ONE_GPU = (("power of one GPU", "power_w", "W"), ("energy of one GPU", "energy_j", "J"))
_CLOCKS = (("clock", "clock_hz", "Hz"), ("effective clock", "effective_hz", "Hz"))


def print_comparison(console: Console, found: RunComparison) -> None:
    """Print the conclusion, then totals, terms, operators and modules, the largest contribution
    first.
    """
    console.print(f"A: {escape(found.a.name)}\nB: {escape(found.b.name)}")
    console.print(f"B against A: {write_sentence(found)}", style="bold")
    console.print(_table_totals(found))
    terms = [(getattr(found, column), unit) for _, column, unit in _QUANTITIES]
    titles = [name for name, _, _ in _name_quantities(found)]
    causes = new_table("caused by", *titles)
    for name in dict.fromkeys(name for of, _ in terms for name in of):
        causes.add_row(
            name, *(_format_signed(of[name], unit) if name in of else "" for of, unit in terms)
        )
    causes.add_row(
        "together", *(_format_signed(sum(of.values()), unit) for of, unit in terms), style="bold"
    )
    console.print(causes)
    if found.operators:
        rows = new_table("operator", "calls", *titles)
        columns = [column for _, column, _ in _QUANTITIES]
        sizes = {name: getattr(found.a, name) for name in columns}
        ranked = sorted(
            found.operators, key=lambda pair: -max(abs(pair.total(c) / sizes[c]) for c in columns)
        )
        for pair in ranked[:MOST_LISTED]:
            counts = [f"{part.calls:g}" if part else "0" for part in (pair.a, pair.b)]
            rows.add_row(
                escape(pair.name), " -> ".join(dict.fromkeys(counts)), *_format_sums([pair])
            )
        if rest := ranked[MOST_LISTED:]:
            rows.add_row(f"... {len(rest)} more", "", *_format_sums(rest))
        gaps = (
            _format_signed(of[comparison.GAPS], unit) if comparison.GAPS in of else ""
            for of, unit in terms
        )
        rows.add_row(comparison.GAPS, "", *gaps)
        console.print(rows)
    if found.module_w:
        names = sorted(found.module_w, key=lambda name: -abs(found.module_w[name]))
        cells = (
            (n, _format_signed(found.module_w[n], "W"), _format_signed(found.module_j[n], "J"))
            for n in names
        )
        console.print(new_table("module", *titles[1:], rows=cells))
    print_notes(console, found.notes, "")
    console.print(f"Rule: {found.rule}.", style="dim")


def _table_totals(found: RunComparison) -> Table:
    """Return both runs: tokens and joules per token, all GPUs, the time, and one GPU where there
    are several.
    """
    a = found.a
    b = found.b
    rows = new_table("", "A", "B", "B - A", "")
    one_gpu = _ONE_GPU if has_several_gpus(found) else ()
    if one_gpu:
        change = f"{b.gpu_count - a.gpu_count:+d}", f"{b.gpu_count / a.gpu_count - 1:+.1%}"
        rows.add_row("GPUs", str(a.gpu_count), str(b.gpu_count), *change)
    for name, column, unit in (
        *_ANSWERS,
        *_name_quantities(found)[1:],
        _QUANTITIES[0],
        *one_gpu,
        *_CLOCKS,
    ):
        left = getattr(a, column)
        right = getattr(b, column)
        if left and right:
            shown = [
                show(value, unit) if unit else round_number(value, 4) for value in (left, right)
            ]
            gained = _format_signed(right - left, unit) if unit else f"{right - left:+,.4g}"
            rows.add_row(name, *shown, gained, f"{right / left - 1:+.1%}")
    return rows


def has_several_gpus(found: RunComparison) -> bool:
    """Tell whether a side of a comparison has more than one GPU."""
    return found.a.gpu_count > 1 or found.b.gpu_count > 1


def _name_quantities(found: RunComparison) -> tuple[tuple[str, str, str], ...]:
    """Return time, power and energy with their names: totals are called so where a side has several
    GPUs.
    """
    return (_QUANTITIES[0], *_TOTALS) if has_several_gpus(found) else _QUANTITIES


def _write_answers(found: RunComparison) -> str:
    """Say how speed and energy per token or item change, which decide; empty where nothing is
    counted.
    """
    parts = []
    for name, column, _ in _ANSWERS:
        a = getattr(found.a, column)
        b = getattr(found.b, column)
        if a and b and a != b:
            parts.append(f"{name} {b / a - 1:+.1%}")
    return ", ".join(parts)


def write_sentence(found: RunComparison) -> str:
    """Say in one line how speed and energy per token change, and what contributed most to time,
    power and energy.

    Power and energy are those of all GPUs.
    """
    answers = _write_answers(found)
    parts = [answers] if answers else []
    for name, column, unit in _name_quantities(found):
        a = getattr(found.a, column)
        b = getattr(found.b, column)
        terms = getattr(found, column)
        if not terms or b == a:
            continue
        largest = max(terms, key=lambda term: abs(terms[term]))
        whole = _format_signed(b - a, unit)
        most = _format_signed(terms[largest], unit)
        parts.append(f"{name} {whole} ({b / a - 1:+.1%}), most by {largest} {most}")
    return "; ".join(parts) + "." if parts else "Both sides are equal."


def _format_sums(pairs: Sequence[PartDifference]) -> list[str]:
    shown = _QUANTITIES if any(pair.total_energy_j for pair in pairs) else _QUANTITIES[:1]
    return [
        _format_signed(sum(pair.total(column) for pair in pairs), unit) for _, column, unit in shown
    ]


_NOTHING = {"s": 1e-12, "J": 1e-9, "W": 1e-6}  # rounding, not a contribution


def _format_signed(value: float, unit: str) -> str:
    value = 0.0 if abs(value) < _NOTHING.get(unit, 0.0) else value
    return f"{'+' if value > 0 else ''}{show(value, unit, 3)}"


def comparison_to_plain(found: RunComparison) -> dict[str, Any]:
    """Return SI numbers for JSON; each list of contributions adds up to its difference B - A.

    ``total_power_w`` and ``total_energy_j`` are of all GPUs, ``power_w`` and ``energy_j`` of one.
    """
    return {
        "wattcast": __version__,
        "rule": found.rule,
        "a": _side_to_plain(found.a),
        "b": _side_to_plain(found.b),
        "difference": _subtract_sides(found),
        "terms": {column: getattr(found, column) for _, column, _ in _QUANTITIES},
        "operators": [
            {
                **take_fields(pair, "name", "family"),
                "calls": [part.calls if part else 0.0 for part in (pair.a, pair.b)],
                "seconds": [part.seconds if part else 0.0 for part in (pair.a, pair.b)],
                "latency_s": pair.total("latency_s"),
                "total_energy_j": pair.total("total_energy_j") if pair.total_energy_j else None,
                "total_power_w": pair.total("total_power_w") if pair.total_power_w else None,
                "terms": take_fields(pair, "latency_s", "total_energy_j", "total_power_w"),
            }
            for pair in found.operators
        ],
        "idle_gaps": {"latency_s": found.b.gap_s - found.a.gap_s} if found.operators else None,
        "modules": [
            {"name": n, "total_power_w": found.module_w[n], "total_energy_j": found.module_j[n]}
            for n in found.module_w
        ],
        "notes": list(dict.fromkeys(found.notes)),
    }


_COUNTED = tuple(column for _, column, _ in _ANSWERS)


def _subtract_sides(found: RunComparison) -> dict[str, float]:
    """Return B - A of all that both sides know."""
    difference = {}
    for column in (
        "latency_s",
        *_COUNTED,
        "total_power_w",
        "total_energy_j",
        "power_w",
        "energy_j",
    ):
        a = getattr(found.a, column)
        b = getattr(found.b, column)
        if a is not None and b is not None:
            difference[column] = b - a
    return difference


def _side_to_plain(side: RunSummary) -> dict[str, Any]:
    return {
        **take_fields(
            side, "name", "measured", "gpu_count", "tokens", "items", "latency_s", *_COUNTED
        ),
        **take_fields(side, "total_power_w", "total_energy_j", "power_w", "energy_j", "clock_hz"),
        "effective_clock_hz": side.effective_hz,
        "idle_gaps_s": side.gap_s if side.parts else None,
    }


# Tol's muted set (2021): terms must not look like modules
_TERM = {comparison.WORK: "#332288", comparison.CLOCK: "#CC6677", comparison.CALLS: "#117733"}
_TERM |= {comparison.ONLY: "#DDCC77", comparison.GAPS: "#88CCEE"}
_OTHER = "#AA4499"
MOST_BARS = 10


def draw_difference(found: RunComparison) -> Figure:
    """Draw milliseconds by operator, stacked by term, and watts by module (by term where no module
    is known).
    """
    figure = new_figure(11.0, 5.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    ranked = sorted(found.operators, key=lambda pair: -abs(pair.total("latency_s")))
    rows = [(pair.name, pair.latency_s) for pair in ranked[:MOST_BARS]]
    if rest := ranked[MOST_BARS:]:
        rows.append(
            (f"{len(rest)} more operators", comparison.sum_terms([pair.latency_s for pair in rest]))
        )
    if found.operators:
        rows.append((comparison.GAPS, {comparison.GAPS: found.b.gap_s - found.a.gap_s}))
    else:
        rows = [(term, {term: value}) for term, value in found.latency_s.items()]
    seen: set[str] = (
        set()
    )  # positive contributions go to the right, negative ones to the left, a dot is their sum
    for place, (_, terms) in enumerate(rows):
        ends = [0.0, 0.0]
        for term, value in terms.items():
            side = int(value >= 0)
            label = term if term not in seen and value else None
            colour = _TERM.get(term, _OTHER)
            left.barh(place, 1e3 * value, left=1e3 * ends[side], color=colour, label=label)
            ends[side] += value
            seen |= {term} if value else set()
        left.plot(1e3 * sum(terms.values()), place, "o", ms=4, color="#000000", zorder=5)
    left.set_yticks(range(len(rows)), [name for name, _ in rows])
    left.invert_yaxis()
    left.axvline(0.0, color="#000000", lw=0.6)
    if seen:
        left.legend(frameon=False, loc="best")
    left.set_xlabel("Time, B - A (ms)")
    values = found.module_w or found.total_power_w
    names = sorted(values, key=lambda name: -abs(values[name]))
    colours = [MODULE_COLOURS.get(name, _TERM.get(name, _OTHER)) for name in names]
    right.barh(range(len(names)), [values[name] for name in names], color=colours)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.axvline(0.0, color="#000000", lw=0.6)
    right.set_xlabel(
        "Mean power of all GPUs, B - A (W)" if has_several_gpus(found) else "Mean power, B - A (W)"
    )
    a = found.a
    b = found.b
    change = f"{b.latency_s / a.latency_s - 1:+.1%} time, {b.total_power_w / a.total_power_w - 1:+.1%} power"
    change += f", {b.total_energy_j / a.total_energy_j - 1:+.1%} energy"
    if has_several_gpus(found):
        change += f" of all GPUs ({a.gpu_count} and {b.gpu_count})"
    answers = _write_answers(found)
    change = f"{answers}; {change}" if answers else change
    figure.suptitle(f"{a.name}  →  {b.name}\n{change}", fontsize=10)
    return add_caption(figure, f"Contributions to B - A. {found.rule}.")
