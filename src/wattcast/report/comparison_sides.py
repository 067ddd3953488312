"""Read the two runs that a user wants to compare.

- ``llama3-8b@h200,batch=8,seq=512,clock=1500MHz`` is predicted now; ``@h100-sxm`` or ``,batch=16``
  as the second run changes only what it says.
- ``FILE.json`` is the output of ``wattcast predict --json`` (``FILE.json#2``: its second
  prediction) or of ``wattcast measure run --json``.
- ``row:ID`` or ``DATABASE#ID`` is a row of ``wattcast measure models``; ``predicted`` is that row's
  workload, predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from wattcast.calibrate import whole_models
from wattcast.core import (
    BadInput,
    bad_value,
    check_names,
    clip_text,
    row_journals,
    row_tables,
)
from wattcast.core.measured_rows import ModelRow
from wattcast.core.strict_files import (
    decode_json,
    read_bytes,
    read_number,
)
from wattcast.options.keywords import CompareKeywords
from wattcast.options.setting_options import COMPARE
from wattcast.predictor import api
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import (
    OperatorOut,
    PredictionOut,
    PredictOut,
)
from wattcast.report import comparison
from wattcast.report.comparison import (
    RunComparison,
    RunPart,
    RunSummary,
    summarise_prediction,
)
from wattcast.report.prediction_figures import find_kernel_family
from wattcast.workload.model_options import OPTION_NAMES, parse_option

PREDICTED = "predicted"
DEFAULT_DATABASE = "h200"  # where row:ID is looked up
LONGEST_S = 1e9  # of one run: thirty years
MOST_W = 1e7  # of one GPU
MOST_GPUS = 1_000_000
MOST_TOKENS = 10**15  # of one iteration, on all GPUs
MOST_CALLS = 10**15  # of one operator: calls of a microsecond for thirty years
MOST_HZ = 1e12

_POINT = ("clock", "power_limit", "host_launch", "temperature", "duration", "data")
# Options that the title of a workload leaves out.
_UNTITLED = (*_POINT, "attention", "head", "skew", "recompute")
SPEC_KEYS = (*OPTION_NAMES, *_POINT)


@dataclass(frozen=True)
class PredictionSpec:
    """A prediction to make: workload, GPU and options."""

    workload: str
    gpu: str
    options: dict[str, Any]


@COMPARE.sign
def compare(
    a: str | Prediction,
    b: str | Prediction,
    *,
    gpu: str | None = None,
    iterations: int = 1,
    **options: Unpack[CompareKeywords],
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
    if isinstance(a, str) and isinstance(b, str):
        side_a, side_b = read_pair(
            a,
            b,
            gpu,
            iterations,
            **options,
        )
    else:
        side_a = _summarise_side(a, gpu, iterations, options)
        side_b = _summarise_side(b, gpu, iterations, options)
    return comparison.compare_runs(side_a, side_b)


def _summarise_side(
    side: str | Prediction,
    gpu: str | None,
    iterations: int,
    options: CompareKeywords,
) -> RunSummary:
    """Summarise one side whose partner is a prediction."""
    if isinstance(side, Prediction):
        return summarise_prediction(side)
    return read_pair(
        side,
        side,
        gpu,
        iterations,
        **options,
    )[0]


def read_pair(
    a: str,
    b: str,
    gpu: str | None = None,
    iterations: int = 1,
    **options: Unpack[CompareKeywords],
) -> tuple[RunSummary, RunSummary]:
    """Read both runs.

    What ``b`` does not say is taken from ``a``, and one may be ``predicted`` next to a row.
    """
    common = PredictionSpec("", gpu or "", dict(options))
    gpu = gpu or DEFAULT_DATABASE
    if a == PREDICTED:
        return _predict_row(b, gpu), read_run(b, gpu, iterations)
    if b == PREDICTED:
        predicted = _predict_row(a, gpu)
        return read_run(a, gpu, iterations), predicted
    first = parse_prediction_spec(a, common) if is_prediction_spec(a, common) else None
    second = parse_prediction_spec(b, common, first) if is_prediction_spec(b, common) else None
    side_a = predict_spec(first) if first else read_run(a, gpu, iterations)
    side_b = predict_spec(second) if second else read_run(b, gpu, iterations)
    return side_a, side_b


# Predictions


def predict_spec(spec: PredictionSpec) -> RunSummary:
    """Predict a spec; the run's name lists the options that the workload's title leaves out."""
    side = summarise_prediction(api.predict(spec.workload, spec.gpu, **spec.options))
    options = [
        f"{name.replace('_', ' ')} {spec.options[name]}"
        for name in _UNTITLED
        if name in spec.options
    ]
    return replace(side, name=", ".join([side.name, *options]))


def is_prediction_spec(text: str, common: PredictionSpec) -> bool:
    """Tell whether the text is a workload at a GPU, not a file or a row."""
    if text.startswith("row:") or Path(text.partition("#")[0]).is_file():
        return False
    return "@" in text or "," in text or bool(common.gpu and not text.endswith(".json"))


def parse_prediction_spec(
    text: str,
    common: PredictionSpec,
    before: PredictionSpec | None = None,
) -> PredictionSpec:
    """Parse ``MODEL@GPU,key=value,...``.

    What the text does not say is taken from ``before`` (the first run) or ``common``.
    """
    head, *pairs = text.split(",")
    workload, _, gpu = head.partition("@")
    if "=" in gpu:  # @tp=8: the GPU of the other run, and an option
        pairs = [gpu, *pairs]
        gpu = ""
    basis = before if before is not None and not workload else common
    gpu = gpu or (before or common).gpu
    workload = workload or basis.workload
    if not (workload and gpu):
        expected = "MODEL@GPU,key=value,... such as llama3-8b@h200,batch=8, or --gpu"
        raise bad_value(text, expected, head or "nothing before ','")
    options = dict(basis.options)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise bad_value(text, "key=value after each comma", pair)
        check_names(f"option in {text}", name, SPEC_KEYS)
        options[name] = value.strip()
        if name in OPTION_NAMES:
            options[name] = parse_option(name, value.strip(), text)
    return PredictionSpec(workload, gpu, options)


def _predict_row(name: str, gpu: str) -> RunSummary:
    """Predict the workload of a measured row."""
    match = _find_row(name, gpu)
    if match is None:
        raise bad_value("compare", f"a whole-model row beside {PREDICTED!r}", name)
    row, _ = match
    graph = whole_models.build_row_graph(row)
    host_launch = "0us" if row.graph else None
    return summarise_prediction(api.predict(graph, gpu, host_launch=host_launch, force=True))


# Files


def read_run(
    name: str,
    gpu: str,
    iterations: int,
) -> RunSummary:
    """Read a run from a file or a database row."""
    match = _find_row(name, gpu)
    if match is not None:
        row, database = match
        return summarise_row(row, _find_profile(row, database))
    path, _, number = name.partition("#")
    if not Path(path).is_file():
        raise BadInput(
            f"{name}: neither MODEL@GPU,key=value,... nor a model beside --gpu nor row:ID "
            "nor a file that is there. "
            "Save a prediction with `wattcast predict ... --json > FILE.json`."
        )
    plain: Any = decode_json(read_bytes(Path(path)), object, path)
    keys = set(plain) if isinstance(plain, dict) else set()
    if "predictions" in keys:
        return _read_prediction(path, number)
    if {"duration_s", "power_w"} <= keys:
        return _summarise_command(plain, path, iterations)
    content = type(plain).__name__
    if isinstance(plain, dict):
        content = f"keys {', '.join(list(plain)[:6])}"
    expected = "the output of `predict --json` or of `measure run --json` with a power"
    raise bad_value(path, expected, content)


def _read_prediction(path: str, number: str) -> RunSummary:
    """Read one prediction of the output of ``predict --json``, the first where none is named."""
    out: PredictOut = decode_json(read_bytes(Path(path)), PredictOut, path)
    count = len(out.predictions)
    if number and not (number.isdigit() and 1 <= int(number) <= count):
        raise bad_value(f"{path}#{number}", f"a number from 1 to {count}", number)
    if not count:
        raise bad_value(path, "at least one prediction", "none")
    prediction = out.predictions[int(number or 1) - 1]
    check_prediction(prediction, path)
    return comparison.summarise_output(prediction)


def _summarise_command(
    plain: dict[str, Any],
    path: str,
    iterations: int,
) -> RunSummary:
    """Summarise a measured command that ran the workload ``iterations`` times."""
    if iterations < 1:
        raise bad_value("--iterations", "a whole number of at least 1", iterations)
    latency_s = read_number(plain["duration_s"], f"{path}: duration_s") / iterations
    power_w = read_number(plain["power_w"], f"{path}: power_w")
    if not (0.0 < latency_s <= LONGEST_S and 0.0 < power_w <= MOST_W):
        expected = f"a duration up to {LONGEST_S:g} s and a power up to {MOST_W:g} W, above zero"
        raise bad_value(path, expected, f"{latency_s} s, {power_w} W")
    clock = plain.get("sm_clock_hz")
    flags = _check_list(plain.get("flags"), f"{path}: flags")
    return RunSummary(
        name=f"{path}, measured",
        measured=True,
        latency_s=latency_s,
        power_w=power_w,
        clock_hz=read_number(clock, f"{path}: sm_clock_hz", 0.0) if clock else None,
        effective_hz=None,
        parts=(),
        module_j={},
        notes=tuple(f"{path}: {clip_text(flag)}" for flag in flags),
    )


def _check_list(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_value(where, "a list", type(value).__name__)
    return value


def check_prediction(p: PredictionOut, where: str) -> None:
    """Refuse a prediction that no `predict --json` wrote.

    Its figures are negative, endless or do not add up.
    """
    limits = {
        "latency_s": LONGEST_S,
        "power_w": MOST_W,
        "clock_hz": MOST_HZ,
        "effective_clock_hz": MOST_HZ,
    }
    for name, most in limits.items():
        value = getattr(p, name)
        if not 0.0 < value <= most:
            raise bad_value(f"{where}: {name}", f"above zero, at most {most:g}", value)
    counts = {
        "gpu_count": (p.gpu_count, MOST_GPUS),
        "tokens": (p.tokens, MOST_TOKENS),
        "items": (p.items, MOST_TOKENS),
    }
    for name, (count, most_count) in counts.items():
        if count is not None and not 1 <= count <= most_count:
            raise bad_value(f"{where}: {name}", f"a whole number from 1 to {most_count:g}", count)
    energy_j = p.power_w * p.latency_s
    if not 0.99 * energy_j <= p.energy_j <= 1.01 * energy_j:
        raise bad_value(f"{where}: energy_j", f"power times latency, {energy_j:g} J", p.energy_j)
    for module in p.modules:
        _check_watts(module.name, module.power_w, where)
    for op in p.ops:
        _check_operator(op, where)


def _check_operator(op: OperatorOut, where: str) -> None:
    is_time = 0.0 <= op.latency_s <= LONGEST_S
    is_energy = 0.0 <= op.energy_j <= LONGEST_S * MOST_W
    if not (is_time and is_energy and 1 <= op.count <= MOST_CALLS):
        expected = f"a time, an energy of zero or more, and 1 to {MOST_CALLS:g} calls"
        numbers = f"{op.latency_s} s, {op.energy_j} J, {op.count} calls"
        raise bad_value(f"{where}: {clip_text(op.operator)}", expected, numbers)
    for module in op.modules:
        _check_watts(module.name, module.power_w, where)


def _check_watts(
    name: str,
    power_w: float,
    where: str,
) -> None:
    if not 0.0 <= power_w <= MOST_W:
        raise bad_value(f"{where}: {clip_text(name)}", "watts of zero or more", power_w)


# Rows of a database


def summarise_row(row: ModelRow, profile: dict[str, Any] | None) -> RunSummary:
    """Summarise a measured whole model, with its kernels by family where the profiler saw them."""
    if not (row.latency_s and row.power_w):
        reason = row.error or "no reason given"
        raise BadInput(f"{row.id}: no latency or no power was measured ({reason}).")
    parts = group_kernels(profile, row) if profile else ()
    notes = [f"{row.id}: {flag}" for flag in row.flags]
    if parts:
        notes.append(
            "times of kernel families come from one profiled iteration, scaled to the time "
            "in kernels"
        )
    return RunSummary(
        name=f"{whole_models.build_row_graph(row).name}, measured",
        measured=True,
        latency_s=row.latency_s,
        power_w=row.power_w,
        clock_hz=row.sm_clock_hz,
        effective_hz=row.effective_clock_hz,
        parts=parts,
        module_j={},
        notes=tuple(notes),
    )


def group_kernels(profile: dict[str, Any], row: ModelRow) -> tuple[RunPart, ...]:
    """Add up the kernels of a profiled iteration by family.

    In a CUDA graph the device never waits, so the times of families are scaled to the whole
    latency. In an eager row they stay as they are, and the rest of the latency is gaps.
    """
    times_s: dict[str, list[float]] = {}
    for place, kernel_s in zip(profile["order"], profile["kernel_s"], strict=True):
        family = find_kernel_family(profile["names"][place])["family"]
        times_s.setdefault(family, []).append(kernel_s)
    total_s = sum(map(sum, times_s.values()))
    latency_s = float(row.latency_s or 0.0)
    scale = latency_s / total_s if row.graph or total_s > latency_s else 1.0
    parts = []
    for family, kernels_s in times_s.items():
        calls = float(len(kernels_s))
        seconds = scale * sum(kernels_s)
        parts.append(
            RunPart(
                family,
                (family,),
                (family,),
                (),
                family,
                calls,
                seconds,
            )
        )
    return tuple(parts)


def _find_row(name: str, gpu: str) -> tuple[ModelRow, str] | None:
    """Find the whole-model row that ``name`` means, and its database; None if it means no row."""
    database = gpu
    row_id = name.removeprefix("row:")
    if not name.startswith("row:"):
        path, sharp, row_id = name.partition("#")
        source = Path(path)
        if not (sharp and (source.is_dir() or source.suffix in (".parquet", ".jsonl"))):
            return None
        database = str(source if source.suffix != ".jsonl" else source.parent)
    rows = {case.row.id: case.row for case in whole_models.load_models(database)}
    check_names(f"row of {database}", row_id, rows, f"It has {len(rows)} rows.")
    return rows[row_id], database


def _find_profile(row: ModelRow, database: str) -> dict[str, Any] | None:
    """Return the kernels of one profiled iteration of a row; None where the profiler saw none."""
    folder = Path(database)
    if not folder.is_dir():
        folder = folder.parent if folder.is_file() else row_tables.database_folder(database)
    for entry in _read_profiles(folder):
        if entry["id"] == row.id and not entry.get("error"):
            return entry
    return None


def _read_profiles(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the profiled iterations of a database's table, or of a campaign's journals."""
    if (folder / row_tables.MODEL_KERNELS_FILE).exists():
        yield from row_tables.read_table(folder / row_tables.MODEL_KERNELS_FILE)
    elif not (folder / row_tables.MODELS_FILE).exists():
        for path in sorted(folder.rglob("*.jsonl")):
            for entry in row_journals.read_lines(path):
                if entry.get("record") == "model_kernels":
                    yield entry
