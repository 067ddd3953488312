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
norms and embeddings out, so they do not replace the templates; a test compares the operators on
scores with them.
"""

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
from wattcast.calibrate.calibration import (
    AnalysedModel,
    Calibration,
    MeasuredModel,
)
from wattcast.calibrate.row_check_coefficients import ROW_CHECKS
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
from wattcast.core.strict_files import (
    decode_json,
    decode_text,
    parse_csv,
    read_bytes,
)
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
def build_run_graph(
    model: str,
    batch: int,
    seq: int | None,
    dtype: str,
) -> Graph:
    """Build the operators of one published run: base model, eager attention, no head."""
    options: dict[str, Any] = {
        "batch": batch,
        "dtype": dtype,
        "attention": "eager",
    }
    if seq is not None:
        options |= {"seq": seq, "head": "none"}
    if model in DECODERS:
        options["phase"] = "forward"  # no copies into a cache
    graph = load_workload.load_workload(model, ModelOptions(**options))
    tokens = batch * (seq or 1)
    blocks = []
    for block in graph.blocks:
        ops: list[Operator] = []
        for op in block.ops:
            if not op.label.endswith(_PACKING):
                ops += _as_issued(op, model, tokens)
        blocks.append(replace(block, ops=tuple(ops)))
    return replace(graph, blocks=tuple(blocks))


def _as_issued(
    op: Operator,
    model: str,
    tokens: int,
) -> tuple[Operator, ...]:
    """Return what version 4 of transformers issues for an operator; it scales the scores of
    attention otherwise.
    """
    is_scale = isinstance(op, Elementwise) and op.function == "scale"
    if not (is_scale and op.label.endswith(_SCORES)):
        return (op,)
    assert isinstance(op, Elementwise), "a scale is elementwise"
    if model == "bert-large":  # adds a mask of one row per sequence
        read = (op.n + tokens) * op.dtype.byte
        return op, replace(
            op,
            function="add",
            layout=Layout.BROADCAST,
            read=read,
        )
    if model == "gpt2":  # makes the divisor and the mask's value on the device
        number = Elementwise("fill", 1, dtype=op.dtype, label=op.label)
        return number, op, number
    if model == "opt-1.3b":  # has scaled its queries
        return ()
    return (op,)


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
    r"(?P<kind>[a-z0-9]+)_(?P<config>[\w.-]*?)_p(?P<dtype>bf16|fp32)_b(?P<batch>\d+)"
    r"(?:_s(?P<seq>\d+)_modeprefill)?"
    r"(?:_attneager)?_freq(?P<clock>\d+)_iter\d+\.csv"
)


def parse_published_run(line: Mapping[str, str]) -> MeasuredModel:
    """Parse a row of the published form; its clock is the mean that really ran."""
    match = PUBLISHED_NAME.fullmatch(line["workload"])
    if match is None or (match["kind"], match["config"]) not in PUBLISHED_MODELS:
        name = clip_text(line["workload"])
        raise BadInput(f"a run named {name} is not understood: wanted a name such as {_LIKE}.")
    try:
        time_ms = float(line["time"])
        energy_j = float(line["energy"])
        mhz = float(line["avg_freq"])
        celsius = float(line["temp"])
    except ValueError:
        raise BadInput(
            f"{line['workload']}: time, energy, avg_freq and temp have to be numbers."
        ) from None
    if not (time_ms > 0 and energy_j > 0 and mhz > 0):
        raise BadInput(f"{line['workload']}: time, energy and avg_freq have to be above zero.")

    model = PUBLISHED_MODELS[match["kind"], match["config"]]
    seq = int(match["seq"]) if match["seq"] else None
    name = f"{model} {match['dtype']} b{match['batch']}"
    if seq is not None:
        name += f" s{match['seq']}"
    latency_s = time_ms / 1e3
    return MeasuredModel(
        name=name,
        graph=build_run_graph(model, int(match["batch"]), seq, match["dtype"]),
        latency_s=latency_s,
        power_w=energy_j / latency_s,
        clock_hz=mhz * 1e6,
        temperature_c=celsius,
    )


MAX_FILE_BYTE = 16 << 20
MOST_ROWS = 10_000
_ROUNDED_CLOCK = 1.001  # by which a clock that was read may pass the ends of its range
# Powers of ten between two prefixes of a unit, and how near a row's error is called such a factor.
_THOUSAND, _NEAR_THOUSAND = 3, 0.7
QUANTITIES = {
    "latency": "s",
    "energy": "J",
    "power": "W",
    "clock": "Hz",
    "temperature": "C",
    "power_limit": "W",
}
_SUFFIX = {unit.lower(): unit for unit in "s ms us J mJ kJ W kW mW Hz MHz GHz C".split()}


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
    engine: str | None = None,
) -> TableCalibration: ...


def calibrate(
    rows: str | Path | None = None,
    gpu: str | Path | Gpu = "",
    *,
    table: str | Path | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    factors: Mapping[str, float] | None = None,
    engine: str | None = None,
) -> Calibration | TableCalibration:
    """Adjust a GPU's coefficients to measurements of your card, or of public tables.

    ``rows`` is a file of whole models (CSV or JSON, ``docs/how-to/own-gpu.md``); ``factors`` are
    efficiency factors of your own to start from. ``table`` is a kernel table in the format of
    NVIDIA's aiconfigurator, a folder of them or of kernel rows of your own, or several
    (``docs/method/other-gpus.md``). ``engine`` names whose tables are read:
    vllm, sglang or trtllm. ``out`` is the folder to save the bundle in, which
    ``wattcast.predict(..., bundle=out)`` takes; without it the bundle is only returned.
    """
    if (rows is None) == (table is None):
        raise BadInput("calibrate takes one of two: rows of whole models, or table=... of kernels.")
    chip = find_gpu(gpu)
    result: Calibration | TableCalibration
    if table is not None:
        result = calibrate_tables(table, chip, engine=engine)
    else:
        path = Path(str(rows))
        bundle = apply_factors(bundle_for(chip), factors or {})
        analysed = calibration.analyse_models(read_calibration_rows(path, chip), chip, bundle)
        notes = check_calibration_rows(analysed, chip, bundle)
        result = calibration.calibrate_bundle(
            analysed,
            chip,
            bundle,
            path.name,
            notes,
        )
    if out is not None:
        save_bundle(result.bundle, Path(out))
    return result


def read_calibration_rows(path: Path, gpu: Gpu) -> list[MeasuredModel]:
    """Read the rows of a file; errors name the line."""
    lines = _read_lines(path)
    if not 1 <= len(lines) <= MOST_ROWS:
        raise bad_value(path.name, f"from 1 to {MOST_ROWS} rows", len(lines))
    _, first_entry = lines[0]
    is_published = set(first_entry) == set(PUBLISHED_HEADER)
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    rows = []
    for where, entry in lines:
        if is_published:
            row = parse_published_run({name: str(cell) for name, cell in entry.items()})
            row = replace(row, clock_hz=min(row.clock_hz or top_hz, top_hz))
        else:
            row = _read_measured(entry, where, path.parent)
        rows.append(_check_measured(row, where, gpu))
    return rows


def _read_lines(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each line of a file with where it stands."""
    data = read_bytes(path, MAX_FILE_BYTE)
    lines: list[tuple[str, Mapping[str, Any]]] = []
    if data.lstrip()[:1] in (b"[", b"{"):
        plain = decode_json(data, list[dict[str, Any]], path.name)
        for number, entry in enumerate(plain, start=1):
            lines.append((f"{path.name}: row {number}", entry))
        return lines
    # refuse a byte that a reader of other programs' tables would let pass
    decode_text(data, path.name)
    table = parse_csv(data, path.name)
    if "workload" not in table[0]:
        expected = "a first line that names columns, workload among them"
        raise bad_value(path.name, expected, ", ".join(table[0]))
    for number, row in enumerate(table, start=2):
        cells = {name: cell for name, cell in row.items() if cell}
        lines.append((f"{path.name}: line {number}", cells))
    return lines


def _read_measured(
    entry: Mapping[str, Any],
    where: str,
    folder: Path,
) -> MeasuredModel:
    """Read a row of a user's file: its workload, its options and what was measured."""
    quantities: dict[str, float] = {}
    options: dict[str, Any] = {}
    option_names = {item.name for item in fields(ModelOptions)}
    for column, cell in entry.items():
        name = column.strip()
        quantity = _split_quantity(name)
        if quantity is not None:
            measured, unit = quantity
            if measured in quantities:
                raise bad_value(where, f"one {measured}", "two columns of it")
            text = str(cell).strip()
            quantities[measured] = _read_quantity(text, measured, unit, f"{where}: {column}")
        elif name in option_names:
            options[name] = parse_option(name, str(cell), where)
        elif name != "workload":
            names = ["workload", *sorted(option_names), *QUANTITIES]
            raise unknown_name(f"column at {where}:", name, names, f"Known: {', '.join(names)}.")
    if "workload" not in entry:
        raise bad_value(where, "a workload", "none")
    if "latency" not in quantities:
        raise bad_value(where, "a latency (latency_ms, latency_s ...)", "none")
    graph = _load_graph(str(entry["workload"]), options, where, folder)
    return MeasuredModel(
        name=graph.name,
        graph=graph,
        latency_s=quantities["latency"],
        power_w=_find_power(quantities, where),
        clock_hz=quantities.get("clock"),
        temperature_c=quantities.get("temperature", DEFAULT_TEMPERATURE_C),
        power_limit_w=quantities.get("power_limit"),
    )


def _load_graph(
    workload: str,
    options: Mapping[str, Any],
    where: str,
    folder: Path,
) -> Graph:
    """Load the workload of a row, which may be a file beside it."""
    path = folder / workload
    try:
        source = path if is_regular(path) else workload
        return load_workload.load_workload(source, ModelOptions(**options))
    except WattcastError as error:
        raise type(error)(f"{where}: {error}") from None


def _find_power(quantities: Mapping[str, float], where: str) -> float | None:
    """Return the mean power of a row, from its power or its energy; None where it has neither."""
    latency_s = quantities["latency"]
    power_w = quantities.get("power")
    energy_j = quantities.get("energy")
    if energy_j is None:
        return power_w
    if power_w is None:
        return energy_j / latency_s
    if abs(energy_j / (power_w * latency_s) - 1) > ROW_CHECKS.energy_mismatch:
        figures = f"{energy_j:.4g} J, {power_w:.4g} W and {latency_s:.4g} s"
        do = "Give one of the two, or mend the units."
        raise bad_value(where, "energy = power x latency", figures, do)
    return power_w


def _split_quantity(column: str) -> tuple[str, str] | None:
    """Split ``latency_ms`` into latency and ms, ``latency`` into latency and no unit; None for any
    other column.
    """
    if column in QUANTITIES:
        return column, ""
    name, _, suffix = column.rpartition("_")
    if name in QUANTITIES and suffix.lower() in _SUFFIX:
        return name, _SUFFIX[suffix.lower()]
    return None


def _read_quantity(
    text: str,
    name: str,
    unit: str,
    where: str,
) -> float:
    has_unit = any(c.isalpha() for c in text.replace("e", "").replace("E", ""))
    if not unit and not has_unit:
        example = {
            "s": "ms",
            "Hz": "MHz",
            "C": "c",
        }.get(QUANTITIES[name], QUANTITIES[name])
        raise bad_unit(where, f"a unit, as in {name}_{example} or {text} {example}", text)
    value = units.parse(f"{text} {unit}".strip(), QUANTITIES[name], where)
    if not np.isfinite(value) or (value <= 0 and name != "temperature"):
        raise bad_value(where, "a number above zero", text)
    return value


def _check_measured(
    m: MeasuredModel,
    where: str,
    gpu: Gpu,
) -> MeasuredModel:
    """Refuse a clock that the card does not have and a power that it cannot draw."""
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    low_hz = ROW_CHECKS.lowest_clock * top_hz
    if gpu.clocks.min_hz is not None:
        low_hz = float(sweep_values(gpu.clocks.min_hz))
    if (
        m.clock_hz is not None
        and not low_hz / _ROUNDED_CLOCK <= m.clock_hz <= _ROUNDED_CLOCK * top_hz
    ):
        span = f"{units.show(low_hz, 'Hz')} to {units.show(top_hz, 'Hz')}"
        expected = f"a clock of the {gpu.name}, {span}"
        do = "Is the unit right, and the card?"
        raise bad_value(f"{where}: clock", expected, units.show(m.clock_hz, "Hz"), do)
    limit_w = float(np.max(gpu.power.limit_w))
    least_w = ROW_CHECKS.lowest_power * limit_w
    most_w = ROW_CHECKS.highest_power * limit_w
    if m.power_w is not None and not least_w <= m.power_w <= most_w:
        expected = f"a mean power the {gpu.name} can draw, up to about {limit_w:.0f} W"
        do = "Are energy and latency of one run?"
        raise bad_value(f"{where}: power", expected, units.show(m.power_w, "W"), do)
    return m


def check_calibration_rows(
    rows: Sequence[AnalysedModel],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[str, ...]:
    """Refuse units mixed up and rows that contradict one another; note repeats that differ."""
    measured = [row.measured for row in rows]
    forecast_s, _ = calibration.predict_models(rows, {}, gpu, bundle)
    for m, seconds in zip(measured, forecast_s.tolist(), strict=True):
        ratio = m.latency_s / seconds
        if not 1.0 / ROW_CHECKS.far <= ratio <= ROW_CHECKS.far:
            raise _far_row_error(m, seconds, ratio)
    notes = [_compare_repeats(first, second) for first, second in combinations(measured, 2)]
    return tuple(note for note in notes if note)


def _far_row_error(
    m: MeasuredModel,
    forecast_s: float,
    ratio: float,
) -> BadInput:
    """Return the error of a row so far from the forecast that a unit was mixed up."""
    guess = ""
    if abs(abs(np.log10(ratio)) - _THOUSAND) < _NEAR_THOUSAND:
        guess = " A factor of a thousand is a unit's prefix (s, ms, us)."
    times = f"measured {units.show(m.latency_s, 's')}, forecast {units.show(forecast_s, 's')}"
    return BadInput(
        f"{m.name}: {times}, a factor of {max(ratio, 1 / ratio):.3g}.{guess} Check units, workload "
        "and clock; a calibration does not reach that far."
    )


def _compare_repeats(a: MeasuredModel, b: MeasuredModel) -> str:
    """Return a note where two rows of one run differ; refuse them where they cannot both be
    right.
    """
    if a.graph is not b.graph and a.graph != b.graph:
        return ""
    if (a.clock_hz, a.power_limit_w) != (b.clock_hz, b.power_limit_w):
        return ""
    pairs = [("latency", a.latency_s, b.latency_s, "s")]
    if a.power_w is not None and b.power_w is not None:
        pairs.append(("power", a.power_w, b.power_w, "W"))
    for name, x, y, unit in pairs:
        ratio = max(x, y) / min(x, y)
        figures = f"{units.show(x, unit)} and {units.show(y, unit)} {name}"
        sentence = f"{a.name}: two rows of the same run say {figures}"
        if ratio > ROW_CHECKS.contradiction:
            do = "Remove the wrong one, or say what differs (clock, power limit, options)."
            raise BadInput(f"{sentence}. {do}")
        if ratio > ROW_CHECKS.noted:
            return f"{sentence}; both are used"
    return ""
