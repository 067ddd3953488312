"""Read the two runs that a user wants to compare, from what the user calls them.

- ``llama3-8b@h200,batch=8,seq=512,clock=1500MHz`` is predicted now; ``@h100-sxm`` or ``,batch=16`` as the second
  run changes only what it says.
- ``FILE.json`` is the output of ``wattcast predict --json`` (``FILE.json#2``: its second prediction) or of
  ``wattcast measure run --json``.
- ``row:ID`` or ``DATABASE#ID`` is a row of ``wattcast measure models``; ``predicted`` is that row's workload,
  predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import msgspec

from wattcast.core.errors import BadInput, bad_value, unknown_name
from wattcast.core.measured_rows import (
    MODEL_KERNELS_FILE,
    MODELS_FILE,
    ModelRow,
    database_folder,
    read_lines,
    read_table,
)
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.fit import whole_models
from wattcast.predictor import api
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import OperatorOut, PredictionOut, PredictOut
from wattcast.report.comparison import RunComparison, RunPart, RunSummary, compare_runs, summarise_prediction
from wattcast.report.prediction_figures import kernel_family
from wattcast.workload.model_options import ModelKeywords

PREDICTED = "predicted"
DEFAULT_DATABASE = "h200"  # where row:ID is looked up
_NUMBERS = ("batch", "seq", "tokens", "tp", "pp", "dp", "ep", "cp", "image")
_WORDS = ("phase", "dtype", "attention", "head", "stack")
_POINT = ("clock", "power_limit", "host_launch", "temperature", "duration", "data")
SPEC_KEYS = (*_NUMBERS, *_WORDS, "skew", "recompute", *_POINT)


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
    """Split the difference between two runs into operators, modules and terms that add up to it exactly.

    A run is a prediction, or the text that names one (at the top of this file). ``gpu`` and ``options`` hold for both
    runs where a text does not say otherwise; ``iterations`` is how often a measured command ran the workload.

    >>> import wattcast
    >>> why = wattcast.compare("gpt2", ",batch=2", gpu="h200", seq=64)
    >>> why.b.latency_s > why.a.latency_s
    True
    """
    if isinstance(a, str) and isinstance(b, str):
        return compare_runs(*read_pair(a, b, gpu, iterations, **options))
    left, right = (
        summarise_prediction(side)
        if isinstance(side, Prediction)
        else read_pair(side, side, gpu, iterations, **options)[0]
        for side in (a, b)
    )
    return compare_runs(left, right)


def read_pair(
    a: str, b: str, gpu: str | None = None, iterations: int = 1, **options: Unpack[RunKeywords]
) -> tuple[RunSummary, RunSummary]:
    """Read both runs; ``b`` may take what it does not say from ``a``, and one may be ``predicted`` next to a row."""
    common = PredictionSpec("", gpu or "", dict(options))
    gpu = gpu or DEFAULT_DATABASE
    if PREDICTED in (a, b):
        other = b if a == PREDICTED else a
        row = _row_of(other, gpu)
        if row is None:
            raise bad_value("compare", f"a whole-model row beside {PREDICTED!r}", other)
        sides = {other: read_run(other, gpu, iterations), PREDICTED: predict_row(row, gpu)}
        return sides[a], sides[b]
    first = parse_prediction_spec(a, common) if is_prediction_spec(a, common) else None
    second = parse_prediction_spec(b, common, first) if is_prediction_spec(b, common) else None
    left, right = (
        predict_spec(spec) if spec else read_run(name, gpu, iterations) for spec, name in ((first, a), (second, b))
    )
    return left, right


_UNSAID = (*_POINT, "attention", "head", "skew", "recompute")  # what the title of a workload leaves out


def predict_spec(spec: PredictionSpec) -> RunSummary:
    """Predict a spec; the run's name lists the options that the workload's title leaves out."""
    side = summarise_prediction(api.predict(spec.workload, spec.gpu, **spec.options))
    said = [f"{name.replace('_', ' ')} {spec.options[name]}" for name in _UNSAID if name in spec.options]
    return replace(side, name=", ".join([side.name, *said]))


def is_prediction_spec(text: str, common: PredictionSpec) -> bool:
    """Tell whether the text is a workload at a GPU, not a file or a row."""
    if text.startswith("row:") or Path(text.partition("#")[0]).is_file():
        return False
    return "@" in text or "," in text or bool(common.gpu and not text.endswith(".json"))


def parse_prediction_spec(text: str, common: PredictionSpec, before: PredictionSpec | None = None) -> PredictionSpec:
    """Parse ``MODEL@GPU,key=value,...``: what it does not say is said by ``before`` (the first run) or ``common``."""
    head, *pairs = text.split(",")
    workload, _, gpu = head.partition("@")
    leans_on = before if before is not None and not workload else common
    gpu = gpu or (before or common).gpu
    workload = workload or leans_on.workload
    if not (workload and gpu):
        raise bad_value(
            text, "MODEL@GPU,key=value,... such as llama3-8b@h200,batch=8, or --gpu", head or "nothing before ','"
        )
    options = dict(leans_on.options)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise bad_value(text, "key=value after each comma", pair)
        if name not in SPEC_KEYS:
            raise unknown_name(f"option in {text}", name, SPEC_KEYS, f"Known: {', '.join(SPEC_KEYS)}.")
        options[name] = _value(name, value.strip(), text)
    return PredictionSpec(workload, gpu, options)


def _value(name: str, text: str, where: str) -> Any:
    if name in _NUMBERS:
        if not text.isdigit():
            raise bad_value(f"{where}: {name}", "a whole number", text)
        return int(text)
    if name == "recompute":
        return text.lower() in ("yes", "true", "1")
    if name == "skew":
        try:
            return float(text)
        except ValueError:
            raise bad_value(f"{where}: skew", "a number from 0 to 1", text) from None
    return text


def read_run(name: str, gpu: str, iterations: int) -> RunSummary:
    """Read a run from a file or a database row."""
    row = _row_of(name, gpu)
    if row is not None:
        return summarise_row(row, _profile_of(name, row, gpu))
    path, _, which = name.partition("#")
    if not Path(path).is_file():
        raise BadInput(
            f"{name}: neither MODEL@GPU,key=value,... nor a model beside --gpu nor row:ID nor a file that is there. "
            "Save a prediction with `wattcast predict ... --json > FILE.json`."
        )
    plain: Any = decode_json(read_bytes(Path(path)), object, path)
    if isinstance(plain, dict) and "predictions" in plain:
        return _saved(path, which)
    if isinstance(plain, dict) and {"duration_s", "power_w"} <= set(plain):
        return _run(path, plain, iterations)
    raise bad_value(path, "the output of `predict --json` or of `measure run --json` with a power", _kind(plain))


def _kind(plain: object) -> str:
    return f"keys {', '.join(list(plain)[:6])}" if isinstance(plain, dict) else type(plain).__name__


def _saved(path: str, which: str) -> RunSummary:
    out: PredictOut = decode_json(read_bytes(Path(path)), PredictOut, path)
    if which and not (which.isdigit() and 1 <= int(which) <= len(out.predictions)):
        raise bad_value(f"{path}#{which}", f"a number from 1 to {len(out.predictions)}", which)
    if not out.predictions:
        raise bad_value(path, "at least one prediction", "none")
    p: PredictionOut = out.predictions[int(which or 1) - 1]
    return RunSummary(
        f"{p.name} on {p.gpu}",
        False,
        p.latency_s,
        p.power_w,
        p.clock_hz,
        p.effective_clock_hz,
        tuple(_part(op) for op in p.ops),
        {module.name: module.power_w * p.latency_s for module in p.modules},
        () if p.support.inside else (f"far from what was measured: {p.support.reason}",),
    )


_FAMILY = {"linear": "gemm", "bmm": "gemm", "conv2d": "conv2d", "attention": "attention"}
_ROWS = ("softmax", "layernorm", "rmsnorm")


def _part(op: OperatorOut) -> RunPart:
    family = _FAMILY.get(op.name, op.name if op.name in _ROWS else "elementwise")
    modules = {module.name: module.power_w * op.latency_s for module in op.modules}
    key = (op.name, msgspec.json.encode(op.shape, order="sorted").decode())
    words = tuple(f"{k}={v}" for k, v in op.shape.items() if type(v) is not int)
    return RunPart(
        op.operator, key, (op.name, op.label), words, family, float(op.count), op.latency_s, op.energy_j, modules
    )


def _run(path: str, plain: dict[str, Any], iterations: int) -> RunSummary:
    """Read ``measure run --json``: totals of a command that ran the workload ``iterations`` times."""
    if iterations < 1:
        raise bad_value("--iterations", "a whole number of at least 1", iterations)
    latency_s, power_w = float(plain["duration_s"]) / iterations, float(plain["power_w"])
    if not (latency_s > 0 and power_w > 0):
        raise bad_value(path, "a duration and a power above zero", f"{latency_s} s, {power_w} W")
    clock = plain.get("sm_clock_hz")
    flags = tuple(f"{path}: {flag}" for flag in plain.get("flags", ()))
    name = f"{path}, measured"
    return RunSummary(name, True, latency_s, power_w, float(clock) if clock else None, None, (), {}, flags)


def summarise_row(row: ModelRow, profile: dict[str, Any] | None) -> RunSummary:
    """Summarise a measured whole model, with its kernels by family where the profiler saw them."""
    if not (row.latency_s and row.power_w):
        raise BadInput(f"{row.id}: no latency or no power was measured ({row.error or 'no reason given'}).")
    parts = group_kernels(profile, row) if profile else ()
    notes = [f"{row.id}: {flag}" for flag in row.flags]
    if parts:
        notes.append("times of kernel families come from one profiled iteration, scaled to the time in kernels")
    name = f"{whole_models.build_row_graph(row).name}, measured"
    return RunSummary(
        name, True, row.latency_s, row.power_w, row.sm_clock_hz, row.effective_clock_hz, parts, {}, tuple(notes)
    )


def group_kernels(profile: dict[str, Any], row: ModelRow) -> tuple[RunPart, ...]:
    """Add up the kernels of a profiled iteration by family.

    In a CUDA graph the device never waits, so the times of families are scaled to the whole latency. In an eager row
    they stay as they are, and the rest of the latency is gaps.
    """
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for place, taken in zip(profile["order"], profile["kernel_s"], strict=True):
        family = kernel_family(profile["names"][place])
        seconds[family] = seconds.get(family, 0.0) + taken
        calls[family] = calls.get(family, 0) + 1
    total, latency_s = sum(seconds.values()), float(row.latency_s or 0.0)
    scale = latency_s / total if row.graph or total > latency_s else 1.0
    return tuple(RunPart(f, (f,), (f,), (), f, float(calls[f]), scale * s) for f, s in seconds.items())


def predict_row(row: ModelRow, gpu: str) -> RunSummary:
    """Predict a row's own workload as it was run."""
    host = "0us" if row.graph else None
    return summarise_prediction(api.predict(whole_models.build_row_graph(row), gpu, host_launch=host, force=True))


def _row_of(name: str, gpu: str) -> ModelRow | None:
    """Find the whole-model row that ``name`` means; None where it means something else."""
    database, row_id = _place(name, gpu)
    if database is None:
        return None
    rows = {case.row.id: case.row for case in whole_models.load_models(database)}
    if row_id not in rows:
        raise unknown_name(f"row of {database}", row_id, rows, f"It has {len(rows)} rows.")
    return rows[row_id]


def _place(name: str, gpu: str) -> tuple[str | None, str]:
    if name.startswith("row:"):
        return gpu, name.removeprefix("row:")
    path, sharp, row_id = name.partition("#")
    held = Path(path)
    table = held.is_dir() or held.suffix in (".parquet", ".jsonl")
    return (str(held if held.suffix != ".jsonl" else held.parent), row_id) if sharp and table else (None, "")


def _profile_of(name: str, row: ModelRow, gpu: str) -> dict[str, Any] | None:
    database, _ = _place(name, gpu)
    folder = Path(database or "")
    folder = folder if folder.is_dir() else folder.parent if folder.is_file() else database_folder(str(database))
    if (folder / MODEL_KERNELS_FILE).exists():
        found = read_table(folder / MODEL_KERNELS_FILE)
    elif (folder / MODELS_FILE).exists():
        return None
    else:
        lines = (entry for path in sorted(folder.rglob("*.jsonl")) for entry in read_lines(path))
        found = [entry for entry in lines if entry.get("record") == "model_kernels"]
    return next((entry for entry in found if entry["id"] == row.id and not entry.get("error")), None)
