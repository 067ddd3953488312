"""Read whole-model measurements of users and of publications.

**Users' rows** are CSV or JSON, read strictly. A row names a workload (a model, or a file beside
this one), how it was run (``batch``, ``seq``, ``dtype`` ... as ``predict`` takes them), and what
was measured: ``latency``, ``energy`` or ``power``, ``clock``, ``temperature``, ``power_limit``.
Units stand in the column's name (``latency_ms``) or in the cell (``12.3 ms``); a number without
either is refused.

**Published rows** [Lee2026, artifact] were measured by clock on an A100 and others
(``workload,energy,time,avg_freq, temp``, energy in J and time in ms per iteration). They belong to
others and stay outside the project. Their models are built from our own templates, which follow
Hugging Face transformers 5, while the runs' operator lists show version 4: BERT adds a mask to its
scores though nothing is padded; OPT scales its queries and not the scores again; GPT-2 divides
scores by a tensor, which it makes in every layer, as it does the mask's value. Version 4 keeps the
first keys and values of a cache as they are, where 5 copies them. The lists leave copies, casts of
norms and embeddings out, so they do not replace the templates; a test holds the operators on scores
against them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, overload

import numpy as np

from wattcast.calibrate import calibration
from wattcast.calibrate.calibration import AnalysedModel, Calibration, MeasuredModel
from wattcast.calibrate.table_fit import TableCalibration, calibrate_tables
from wattcast.core import units
from wattcast.core.arrays import sweep_values
from wattcast.core.errors import (
    BadInput,
    WattcastError,
    bad_unit,
    bad_value,
    clip_text,
    unknown_name,
)
from wattcast.core.regular_files import is_regular
from wattcast.core.strict_files import decode_json, decode_text, parse_csv, read_bytes
from wattcast.hardware import Gpu
from wattcast.hardware.gpu import DEFAULT_TEMPERATURE_C
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.bundle.calibrated import apply_factors, save_bundle
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions, parse_option
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Layout
from wattcast.workload.readers import load_workload

DECODERS = ("gpt2", "opt-1.3b", "qwen2-1.5b")
_PACKING = "packing"  # transformers 5 looks for packed sequences where it keeps no cache
_SCORES = "attention.attention"  # what attention does between its projections


@lru_cache(maxsize=256)
def build_run_graph(model: str, batch: int, seq: int | None, dtype: str) -> Graph:
    """Build the operators of one published run: base model, eager attention, no head."""
    given: dict[str, Any] = {"batch": batch, "dtype": dtype, "attention": "eager"}
    if seq is not None:
        given |= {"seq": seq, "head": "none"}
    if model in DECODERS:
        given["phase"] = "forward"  # no copies into a cache
    graph = load_workload.load_workload(model, ModelOptions(**given))
    tokens = batch * (seq or 1)
    blocks = []
    for block in graph.blocks:
        kept = [op for op in block.ops if not op.label.endswith(_PACKING)]
        blocks.append(
            replace(
                block, ops=tuple(issued for op in kept for issued in _as_issued(op, model, tokens))
            )
        )
    return replace(graph, blocks=tuple(blocks))


def _as_issued(op: Operator, model: str, tokens: int) -> tuple[Operator, ...]:
    """Return what version 4 of transformers issues for an operator; it scales the scores of
    attention otherwise.
    """
    if not (isinstance(op, Elementwise) and op.function == "scale" and op.label.endswith(_SCORES)):
        return (op,)
    if model == "bert-large":  # adds a mask of one row per sequence
        read = (op.n + tokens) * op.dtype.byte
        return op, replace(op, function="add", layout=Layout.BROADCAST, read=read)
    if model == "gpt2":  # makes the divisor and the mask's value on the device
        number = Elementwise("fill", 1, dtype=op.dtype, label=op.label)
        return number, op, number
    return () if model == "opt-1.3b" else (op,)  # OPT has scaled its queries


PUBLISHED_HEADER = ("workload", "energy", "time", "avg_freq", "temp")
PUBLISHED_MODELS = {
    ("gpt2model", "gpt2"): "gpt2",
    ("optmodel", "opt-1p3b"): "opt-1.3b",
    ("qwen2model", "qwen2-1p5b"): "qwen2-1.5b",
    ("bertmodel", "large"): "bert-large",
    ("vitmodel", "large"): "vit-large",
    ("mobilevitmodel", "small"): "mobilevit-s",
    ("resnet101", ""): "resnet101",
}
_LIKE = "gpt2model_gpt2_pbf16_b8_s128_modeprefill_freq900_iter4001.csv"
PUBLISHED_NAME = re.compile(
    r"(?P<kind>[a-z0-9]+)_(?P<config>[\w.-]*?)_p(?P<dtype>bf16|fp32)_b(?P<batch>\d+)(?:_s(?P<seq>\d+)_modeprefill)?"
    r"(?:_attneager)?_freq(?P<clock>\d+)_iter\d+\.csv"
)


def parse_published_run(line: Mapping[str, str]) -> MeasuredModel:
    """Parse a row of the published form; its clock is the mean that really ran."""
    match = PUBLISHED_NAME.fullmatch(line["workload"])
    if match is None or (match["kind"], match["config"]) not in PUBLISHED_MODELS:
        raise BadInput(
            f"a run named {clip_text(line['workload'])} is not understood: wanted a name such as {_LIKE}."
        )
    try:
        time_ms, energy_j, mhz, celsius = (
            float(line[k]) for k in ("time", "energy", "avg_freq", "temp")
        )
    except ValueError:
        raise BadInput(
            f"{line['workload']}: time, energy, avg_freq and temp have to be numbers."
        ) from None
    if not (time_ms > 0 and energy_j > 0 and mhz > 0):
        raise BadInput(f"{line['workload']}: time, energy and avg_freq have to be above zero.")
    model = PUBLISHED_MODELS[match["kind"], match["config"]]
    dtype = match["dtype"]
    latency_s = time_ms / 1e3
    graph = build_run_graph(
        model, int(match["batch"]), int(match["seq"]) if match["seq"] else None, dtype
    )
    name = f"{model} {dtype} b{match['batch']}" + (f" s{match['seq']}" if match["seq"] else "")
    return MeasuredModel(name, graph, latency_s, energy_j / latency_s, mhz * 1e6, celsius)


MAX_FILE_BYTE = 16 << 20
MOST_ROWS = 10_000
QUANTITIES = {
    "latency": "s",
    "energy": "J",
    "power": "W",
    "clock": "Hz",
    "temperature": "C",
    "power_limit": "W",
}
_SUFFIX = {unit.lower(): unit for unit in "s ms us J mJ kJ W kW mW Hz MHz GHz C".split()}
FAR_FACTOR = 20.0  # measured over forecast beyond this factor: a unit was mixed up
CONTRADICTION_FACTOR = 1.5  # two rows of one thing further apart than this cannot both be right
NOTED_FACTOR = 1.15  # further apart than this, and they are noted


@overload
def calibrate(
    rows: str | Path,
    gpu: str | Path | Gpu,
    *,
    out: str | Path | None = None,
    factors: Mapping[str, float] | None = None,
) -> Calibration: ...


@overload
def calibrate(
    *,
    gpu: str | Path | Gpu,
    table: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
) -> TableCalibration: ...


def calibrate(
    rows: str | Path | None = None,
    gpu: str | Path | Gpu = "",
    *,
    table: str | Path | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    factors: Mapping[str, float] | None = None,
) -> Calibration | TableCalibration:
    """Adjust a GPU's coefficients to measurements of your card, or of public tables.

    ``rows`` is a file of whole models (CSV or JSON, ``docs/how-to/own-gpu.md``); ``factors`` are
    efficiency factors of your own to start from. ``table`` is a kernel table in the format of
    NVIDIA's aiconfigurator, a folder of them or of kernel rows of your own, or several
    (``docs/method/other-gpus.md``). ``out`` is the folder to save the bundle in, which
    ``wattcast.predict(..., bundle=out)`` takes; without it the bundle is only returned."""
    if (rows is None) == (table is None):
        raise BadInput("calibrate takes one of two: rows of whole models, or table=... of kernels.")
    chip = find_gpu(gpu)
    found: Calibration | TableCalibration
    if table is not None:
        found = calibrate_tables(table, chip)
    else:
        path = Path(str(rows))
        bundle = apply_factors(bundle_for(chip), factors or {})
        analysed = calibration.analyse_models(read_calibration_rows(path, chip), chip, bundle)
        notes = check_calibration_rows(analysed, chip, bundle)
        found = calibration.calibrate_bundle(analysed, chip, bundle, path.name, notes)
    if out is not None:
        save_bundle(found.bundle, Path(out))
    return found


def read_calibration_rows(path: Path, gpu: Gpu) -> list[MeasuredModel]:
    """Read the rows of a file; errors name the line."""
    data = read_bytes(path, MAX_FILE_BYTE)
    if data.lstrip()[:1] in (b"[", b"{"):
        plain = decode_json(data, list[dict[str, Any]], path.name)
        lines = [(f"{path.name}: row {i}", entry) for i, entry in enumerate(plain, start=1)]
    else:
        decode_text(
            data, path.name
        )  # refuse a byte that a reader of other programs' tables would let pass
        table = parse_csv(data, path.name)
        if "workload" not in table[0]:
            raise bad_value(
                path.name,
                "a first line that names columns, workload among them",
                ", ".join(table[0]),
            )
        kept = ({name: cell for name, cell in row.items() if cell} for row in table)
        lines = [(f"{path.name}: line {number}", row) for number, row in enumerate(kept, start=2)]
    if not 1 <= len(lines) <= MOST_ROWS:
        raise bad_value(path.name, f"from 1 to {MOST_ROWS} rows", len(lines))
    if set(lines[0][1]) == set(PUBLISHED_HEADER):
        top_hz = float(sweep_values(gpu.clocks.max_hz))
        runs = [
            (where, parse_published_run({k: str(v) for k, v in entry.items()}))
            for where, entry in lines
        ]
        return [
            _check_measured(replace(m, clock_hz=min(m.clock_hz or top_hz, top_hz)), at, gpu)
            for at, m in runs
        ]
    return [
        _check_measured(_read_measured(entry, where, path.parent), where, gpu)
        for where, entry in lines
    ]


def _read_measured(entry: Mapping[str, Any], where: str, folder: Path) -> MeasuredModel:
    given = dict[str, float]()
    options = dict[str, Any]()
    known = {item.name for item in fields(ModelOptions)}
    for column, cell in entry.items():
        name = column.strip()
        place = f"{where}: {column}"
        if (quantity := _split_quantity(name)) is not None:
            if quantity[0] in given:
                raise bad_value(where, f"one {quantity[0]}", "two columns of it")
            given[quantity[0]] = _read_quantity(str(cell).strip(), *quantity, place)
        elif name in known:
            options[name] = parse_option(name, str(cell), where)
        elif name != "workload":
            wanted = ["workload", *sorted(known), *QUANTITIES]
            raise unknown_name(f"column at {where}:", name, wanted, f"Known: {', '.join(wanted)}.")
    if "workload" not in entry:
        raise bad_value(where, "a workload", "none")
    if "latency" not in given:
        raise bad_value(where, "a latency (latency_ms, latency_s ...)", "none")
    workload = str(entry["workload"])
    path = folder / workload
    try:
        beside = path if is_regular(path) else workload
        graph = load_workload.load_workload(beside, ModelOptions(**options))
    except WattcastError as error:
        raise type(error)(f"{where}: {error}") from None
    latency_s = given["latency"]
    power_w = given.get("power", given["energy"] / latency_s if "energy" in given else None)
    if (
        "power" in given
        and "energy" in given
        and abs(given["energy"] / (given["power"] * latency_s) - 1) > 0.05
    ):
        found = f"{given['energy']:.4g} J, {given['power']:.4g} W and {latency_s:.4g} s"
        raise bad_value(
            where, "energy = power x latency", found, "Give one of the two, or mend the units."
        )
    settings = (
        given.get("clock"),
        given.get("temperature", DEFAULT_TEMPERATURE_C),
        given.get("power_limit"),
    )
    return MeasuredModel(graph.name, graph, latency_s, power_w, *settings)


def _split_quantity(column: str) -> tuple[str, str] | None:
    """Split ``latency_ms`` into latency and ms, ``latency`` into latency and no unit; None for any
    other column.
    """
    if column in QUANTITIES:
        return column, ""
    name, _, suffix = column.rpartition("_")
    return (
        (name, _SUFFIX[suffix.lower()])
        if name in QUANTITIES and suffix.lower() in _SUFFIX
        else None
    )


def _read_quantity(text: str, name: str, unit: str, where: str) -> float:
    if not unit and not any(c.isalpha() for c in text.replace("e", "").replace("E", "")):
        example = {"s": "ms", "Hz": "MHz", "C": "c"}.get(QUANTITIES[name], QUANTITIES[name])
        raise bad_unit(where, f"a unit, as in {name}_{example} or {text} {example}", text)
    value = units.parse(f"{text} {unit}".strip(), QUANTITIES[name], where)
    if not np.isfinite(value) or (value <= 0 and name != "temperature"):
        raise bad_value(where, "a number above zero", text)
    return value


def _check_measured(m: MeasuredModel, where: str, gpu: Gpu) -> MeasuredModel:
    """Refuse a clock that the card does not have and a power that it cannot draw."""
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    low_hz = (
        float(sweep_values(gpu.clocks.min_hz)) if gpu.clocks.min_hz is not None else 0.05 * top_hz
    )
    if m.clock_hz is not None and not 0.999 * low_hz <= m.clock_hz <= 1.001 * top_hz:
        span = (
            f"a clock of the {gpu.name}, {units.show(low_hz, 'Hz')} to {units.show(top_hz, 'Hz')}"
        )
        raise bad_value(
            f"{where}: clock",
            span,
            units.show(m.clock_hz, "Hz"),
            "Is the unit right, and the card?",
        )
    limit_w = float(np.max(gpu.power.limit_w))
    if m.power_w is not None and not 0.02 * limit_w <= m.power_w <= 1.5 * limit_w:
        wanted = f"a mean power the {gpu.name} can draw, up to about {limit_w:.0f} W"
        raise bad_value(
            f"{where}: power",
            wanted,
            units.show(m.power_w, "W"),
            "Are energy and latency of one run?",
        )
    return m


def check_calibration_rows(
    rows: Sequence[AnalysedModel], gpu: Gpu, bundle: Bundle
) -> tuple[str, ...]:
    """Refuse units mixed up and rows that contradict one another; note repeats that differ."""
    measured, (seconds, _) = (
        [row.measured for row in rows],
        calibration.predict_models(rows, {}, gpu, bundle),
    )
    ratio = np.array([m.latency_s for m in measured]) / seconds
    far = np.flatnonzero((ratio > FAR_FACTOR) | (ratio < 1.0 / FAR_FACTOR))
    if far.size:
        m = measured[far[0]]
        times = float(ratio[far[0]])
        said = f"measured {units.show(m.latency_s, 's')}, forecast {units.show(float(seconds[far[0]]), 's')}"
        prefix = abs(abs(np.log10(times)) - 3) < 0.7
        guess = " A factor of a thousand is a unit's prefix (s, ms, us)." if prefix else ""
        raise BadInput(
            f"{m.name}: {said}, a factor of {max(times, 1 / times):.3g}.{guess} Check units, workload and clock; a "
            f"calibration does not reach that far."
        )
    return tuple(note for a, b in combinations(measured, 2) if (note := _compare_repeats(a, b)))


def _compare_repeats(a: MeasuredModel, b: MeasuredModel) -> str:
    """Return a note where two rows of one run differ; refuse them where they cannot both be right."""
    if a.graph is not b.graph and a.graph != b.graph:
        return ""
    if (a.clock_hz, a.power_limit_w) != (b.clock_hz, b.power_limit_w):
        return ""
    pairs = [("latency", a.latency_s, b.latency_s, "s")]
    if a.power_w is not None and b.power_w is not None:
        pairs.append(("power", a.power_w, b.power_w, "W"))
    for name, x, y, unit in pairs:
        apart = max(x, y) / min(x, y)
        said = f"{a.name}: two rows of the same run say {units.show(x, unit)} and {units.show(y, unit)}"
        if apart > CONTRADICTION_FACTOR:
            raise BadInput(
                f"{said} {name}. Remove the wrong one, or say what differs (clock, power limit, options)."
            )
        if apart > NOTED_FACTOR:
            return f"{said} {name}; both are used"
    return ""
