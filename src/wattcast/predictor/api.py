"""Predict from names and units as people type them: the Python API.

    import wattcast
    p = wattcast.predict("llama3-8b", gpu="h100-sxm", phase="decode", batch=8, seq=1024)
    p.tokens_per_s, p.energy_j_per_token, p.total_power_w

A number may be SI or a string with its unit; ``clock``, ``power_limit``, ``temperature`` and
``host_launch`` may be arrays, and the prediction then has their broadcast shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.core import BadInput, Dtype, bad_value, check_names, units
from wattcast.core.arrays import Sweepable, as_sweep
from wattcast.core.own_host import read_own_host
from wattcast.hardware import DEFAULT_TEMPERATURE_C, Gpu, Node, OperatingPoint, strip_board
from wattcast.hardware.catalogue_reader import load_node, load_node_file
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import REACTION_S
from wattcast.predictor.kernel_phases import LaunchCosts
from wattcast.predictor.prediction import Prediction, predict_graphs
from wattcast.predictor.prices import PriceKeywords, parse_prices
from wattcast.workload.build_model import compute_footprint, find_largest_batch
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import (
    OPTION_NAMES,
    RUNNABLE_DTYPES,
    ModelKeywords,
    ModelOptions,
    SoftwareStack,
    count_positions,
    unknown_option_error,
)
from wattcast.workload.operator_base import is_any
from wattcast.workload.readers import load_workload

FORCE = "Predict it all the same: --force, force=True."
CARDS = ("another", "this")
OPERANDS = ("cold", "warm")
SUSTAINED = "sustained"
Workload: TypeAlias = str | Path | Graph | ModelSpec | Mapping[str, object]
Quantity: TypeAlias = str | npt.ArrayLike  # "1830 MHz", 1.83e9, or an array in SI units


class SettingKeywords(PriceKeywords, total=False):
    """The settings of ``predict`` and ``predict_many``, which ``predict`` describes."""

    clock: Quantity | None
    power_limit: Quantity | None
    host_launch: Quantity | None
    temperature: Quantity | None
    duration: Quantity | None
    operands: str | None
    data: str
    bundle: Bundle | str | Path | None
    factors: Mapping[str, float] | None
    card: str
    node: str | Path | Node | None
    force: bool


class PredictKeywords(ModelKeywords, SettingKeywords, total=False):
    """Settings of a prediction, and the options of its model."""


SETTING_NAMES = tuple(SettingKeywords.__annotations__)


def predict(
    workload: Workload | Callable[..., Any],
    gpu: str | Path | Gpu,
    *,
    inputs: Any = None,
    **options: Unpack[PredictKeywords],
) -> Prediction:
    """Predict speed, power, energy and clock of a workload on one or several GPUs of a kind.

    ``workload`` is a model's name or Hugging Face id, a file (workload JSON, EnergAIzer list,
    Hugging Face ``config.json``), a mapping of the same, a Graph, or a ``torch.nn.Module`` with
    ``inputs``: example tensors or shapes, as ``wattcast.capture`` takes them. ``gpu`` is a
    catalogue name, your own YAML file or a Gpu.

    A model's options are the fields of ``ModelOptions``: batch, seq, tokens, phase, dtype,
    attention, head, stack, tp, pp, ... The others are settings. ``clock``, ``power_limit``,
    ``temperature`` (of the die) and ``host_launch`` (host time per operator) are numbers in SI
    units, strings with a unit, or arrays. ``duration`` is how long the work goes on after a pause
    ("5ms"), by default until the governor has settled: in the first 90 ms no power limit lowers the
    clock. ``operands`` says where an operator or a list of operators finds its data: ``cold`` in
    device memory, ``warm`` in L2 as far as they fit, by default weights cold and the rest warm;
    operators of a model find what the others leave. ``data`` is what the operands hold: random,
    zeros, ones, relu. ``bundle`` is a folder that ``calibrate`` or ``lab fit`` saved, in place of
    the shipped one or the forecast; ``factors`` are efficiency factors of your own
    (``predictor.bundle.calibrated``). ``node`` is where several GPUs stand (``"hgx-h100"``, your
    own YAML file): it decides what crosses the network. ``card``: ``another`` of the kind
    (intervals hold how far cards differ) or ``this``, the one it was fitted on. ``price`` is the
    rent of one GPU (``"2.50/h"``), ``electricity`` a tariff (``"0.12/kWh"``), ``carbon`` an
    intensity (``"400g/kWh"``) or a region (``"us"``), ``pue`` the site's overhead. ``force``
    predicts what cannot run: a number format without units, a power limit that the card does not
    take, a model that does not fit."""
    if inputs is not None or not isinstance(workload, (str, Path, Graph, ModelSpec, Mapping)):
        own = {name: value for name, value in options.items() if name not in SETTING_NAMES}
        settings: Any = {name: value for name, value in options.items() if name not in own}
        return predict_many(
            [load_workload.capture_workload(workload, inputs, own)], gpu, **settings
        )[0]
    return predict_many([workload], gpu, **options)[0]


def predict_many(
    workloads: Sequence[Workload | tuple[Workload, Mapping[str, Any]]],
    gpu: str | Path | Gpu,
    **options: Unpack[PredictKeywords],
) -> list[Prediction]:
    """Predict many workloads on one kind of GPU, in order and several times as fast as one by one.

    Options are those of ``predict``. A workload may come with options of its own, which go before
    those of all:

        wattcast.predict_many(["llama3-8b", ("llama3-8b", {"phase": "decode"}), ("resnet50",
        {"batch": 64})], "h200")
    """
    given: dict[str, Any] = {
        name: value for name, value in options.items() if name in SETTING_NAMES
    }
    of_all: dict[str, Any] = {name: value for name, value in options.items() if name not in given}
    pairs = [item if isinstance(item, tuple) else (item, {}) for item in workloads]
    for name in [name for _, own in pairs for name in (*of_all, *own) if name not in OPTION_NAMES]:
        raise unknown_option_error(
            name, SETTING_NAMES
        )  # it may have been meant for a setting of ``predict``
    asked = [(workload, ModelOptions.from_names(**{**of_all, **own})) for workload, own in pairs]
    graphs = [load_workload.load_workload(workload, chosen) for workload, chosen in asked]
    prices = parse_prices(
        **{name: given.pop(name) for name in PriceKeywords.__annotations__ if name in given}
    )
    chip = find_gpu(gpu, given.pop("node", None))
    fitted = find_bundle(given.pop("bundle", None), chip)
    if factors := given.pop("factors", None):
        from wattcast.predictor.bundle.calibrated import apply_factors  # few predictions have any

        fitted = apply_factors(fitted, factors)
    operands = given.pop("operands", None)
    force = given.pop("force", False)
    notes, at, fitted = resolve_settings(chip, fitted, **given)
    if not force:
        check_power_limit(chip, at)
        for (workload, chosen), graph in zip(asked, graphs, strict=True):
            check_runs(graph, chip, workload, chosen)
    notes += prices.notes
    found = predict_graphs(
        [_note_settings(graph, notes, operands, chip) for graph in graphs], chip, at, fitted
    )
    return [replace(p, prices=prices) for p in found]


def _note_settings(graph: Graph, notes: Sequence[str], operands: str | None, chip: Gpu) -> Graph:
    """Return a graph with the settings' notes and the place of its operands.

    An engine replays its kernels, and its host counts step by step. Where operands lie matters, and
    is noted, where an operator that is not part of a model reads little enough to stay in L2."""
    l2_byte = np.max(chip.l2.capacity_byte or 0.0)
    if operands is not None:
        check_names(
            "operands", operands, OPERANDS, "Do they come from device memory (cold) or L2 (warm)?"
        )
        if graph.phase:
            do = "Operators of a model find what the others leave, which is the default: leave --operands away."
            raise bad_value(
                f"{graph.name}: operands", "an operator or a list of operators", "a model", do
            )
        where = "in device memory" if operands == "cold" else "in L2, as far as they fit"
        notes = [*notes, f"operands: {operands}, {where} when an operator begins"]
    elif not graph.phase and any(is_any(op.read_byte < l2_byte) for op in graph.stack_forms()):
        notes = [
            *notes,
            "operands: weights in device memory, others in L2 as far as they fit (--operands)",
        ]
    replayed = graph.stack == SoftwareStack.ENGINE
    said = (_REPLAYED if replayed and note.startswith("host: ") else note for note in notes)
    return replace(graph, assumptions=(*graph.assumptions, *said), operands=operands or "")


_REPLAYED = (
    "host: as measured of vLLM 0.25.1, which prepares a step while the GPU computes the one before"
)


def resolve_settings(
    chip: Gpu,
    fitted: Bundle,
    clock: Quantity | None = None,
    power_limit: Quantity | None = None,
    host_launch: Quantity | None = None,
    temperature: Quantity | None = None,
    duration: Quantity | None = None,
    data: str = "random",
    card: str = "another",
) -> tuple[list[str], OperatingPoint, Bundle]:
    """Return a note for every default taken, the operating point, and the bundle for these
    settings.
    """
    host_s, limit_w = (
        float(np.mean(value)) for value in (fitted.launch.host_s_per_operator, chip.power.limit_w)
    )
    host_note = f"host: {units.show(host_s, 's')} to issue an operator"
    own = read_own_host() if host_launch is None and host_s > 0.0 else None
    if own is not None:  # of eager models: nothing says how engines fare on it
        launch = replace(fitted.launch, host_s_per_operator=own.host_s_per_operator, measured=True)
        fitted = replace(fitted, launch=launch)
        host_note = (
            f"host: {units.show(own.host_s_per_operator, 's')} to issue an operator, measured on "
            "this machine (undo: wattcast doctor --forget-host)"
        )
    defaults = {
        "clock: left to the governor": clock is None,
        f"power limit: the card's default, {units.show(limit_w, 'W')}": power_limit is None,
        host_note: host_launch is None,
        f"temperature: {DEFAULT_TEMPERATURE_C:g} C": temperature is None,
        "data: random-like": data == "random",
    }
    notes = [note for note, taken in defaults.items() if taken]
    if data != "random":
        fitted = fitted.for_data(data)
    check_names(
        "card", card, CARDS, "Is it the card the bundle was fitted on, or another of its kind?"
    )
    if card == "this":
        fitted = fitted.for_this_card()
    else:
        notes.append("intervals: for another card of the kind")
    if host_launch is not None:
        each_s = _read_amount(host_launch, "s", "host_launch")
        if (np.asarray(each_s) < 0).any():
            raise bad_value("host_launch", "zero or more", f"{np.min(each_s)} s")
        fitted = replace(fitted, launch=tell_host(fitted.launch, each_s))
    duration_s = None
    if duration in (None, SUSTAINED):
        notes.append("duration: sustained, with the governor settled")
    else:
        asked_s = _read_amount(duration, "s", "duration")
        if not (isinstance(asked_s, float) and 0.0 < asked_s < math.inf):
            do = "Leave it away: sustained."
            raise bad_value("duration", "one time above zero, such as 5ms", str(duration), do)
        duration_s = asked_s
        short = duration_s <= REACTION_S
        fitted = fitted.for_bursts() if short else fitted
        held = (
            "the governor has no time to lower the clock"
            if short
            else "the governor answers after 90 ms"
        )
        notes.append(f"duration: {units.show(duration_s, 's')}; {held}")
    at = OperatingPoint(
        clock_hz=_read_clock(chip, clock),
        power_limit_w=None
        if power_limit is None
        else _read_amount(power_limit, "W", "power_limit"),
        temperature_c=DEFAULT_TEMPERATURE_C
        if temperature is None
        else _read_temperature(temperature),
        duration_s=duration_s,
    )
    return notes, at, fitted


def host_cost_of_run(model: str, latency_s: float, **options: Any) -> float:
    """Return what issuing an operator costs a host that took so long for a pass of an eager model.

    The GPU must be the faster of both, as it is for a small model at batch 1.
    """
    graph = load_workload.load_workload(
        model, ModelOptions.from_names(stack=SoftwareStack.EAGER, **options)
    )
    launch = bundle_for(hardware.load_gpu("h200")).launch
    calls = list(graph.calls())
    usual_s = float(launch.host_s([op.kind for op, _ in calls]) @ [count for _, count in calls])
    return float(np.mean(launch.host_s_per_operator)) * latency_s / usual_s


def tell_host(launch: LaunchCosts, host_s_per_operator: Sweepable) -> LaunchCosts:
    """Return the launch costs of a host that takes so long for an operator; an engine takes as much
    longer.
    """
    usual_s = float(np.mean(launch.host_s_per_operator))
    factor = host_s_per_operator / usual_s if usual_s > 0.0 else 1.0
    return replace(
        launch, host_s_per_operator=host_s_per_operator, engine_factor=factor, measured=True
    )


def check_power_limit(gpu: Gpu, at: OperatingPoint, otherwise: str = FORCE) -> None:
    """Raise an error where a power limit lies outside what the card takes; an unpublished end is
    not checked.

    Where no highest limit is published, it is the default limit.
    """
    if at.power_limit_w is None:
        return
    spec = gpu.power
    low_w = 0.0 if spec.min_limit_w is None else float(np.min(spec.min_limit_w))
    high_w = float(np.max(spec.limit_w if spec.max_limit_w is None else spec.max_limit_w))
    asked = np.asarray(at.power_limit_w)
    outside = asked[(asked < low_w * (1 - 1e-9)) | (asked > high_w * (1 + 1e-9))]
    if outside.size:
        span = f"from {units.show(low_w, 'W')} to {units.show(high_w, 'W')}"
        found = units.show(float(outside.flat[0]), "W")
        raise bad_value(
            "power limit", f"a limit that the {gpu.name} takes, {span}", found, otherwise
        )


def check_runs(graph: Graph, gpu: Gpu, workload: Workload, options: ModelOptions) -> None:
    """Raise an error where a model was made for fewer tokens, or where a GPU has no units for a
    format of the workload, or too little memory for it.
    """
    _check_positions(graph, workload, options)
    check_formats(graph, gpu, FORCE)
    capacity_byte = float(np.max(gpu.memory.capacity_byte))
    if graph.memory_byte is None or graph.memory_byte <= capacity_byte:
        return
    each = " on each of its GPUs" if graph.gpu_count > 1 else ""
    model = load_workload.find_model(workload)
    ways = list_ways_to_fit(graph, gpu, model, options)
    raise bad_value(
        f"{graph.name}: memory",
        f"at most the {units.show(capacity_byte, 'byte', 3)} of the {gpu.name}{each}",
        units.show(graph.memory_byte, "byte", 3),
        " ".join(
            [
                f"It fits {', or '.join(ways)}." if ways else "It fits no GPU of the catalogue.",
                FORCE,
            ]
        ),
    )


def _check_positions(graph: Graph, workload: Workload, options: ModelOptions) -> None:
    """Raise an error where a workload has more tokens in a sequence than its model was made for."""
    if not graph.phase or options.seq is None:
        return
    model = load_workload.find_model(workload)
    if model is not None and model.kind is not ModelKind.VISION:
        check_context(model, options.seq + (options.tokens or 1) - 1, FORCE)


def check_context(model: ModelSpec, longest: int, do: str) -> None:
    """Raise an error where a sequence of ``longest`` tokens is more than a model was made for."""
    most = count_positions(model)
    if most is not None and longest > most:
        wanted = f"at most the {most:,} tokens that it was made for"
        fewer = "Ask for a shorter sequence, or a model with a longer context."
        raise bad_value(f"{model.name}: context", wanted, f"{longest:,} tokens", f"{fewer} {do}")


def check_formats(graph: Graph, gpu: Gpu, do: str) -> None:
    """Raise an error, with what to do, where a GPU has no units for a format that the workload
    multiplies in.
    """
    units_for = {*gpu.pipes.tensor_flop_per_cycle, *gpu.pipes.cuda_flop_per_cycle}
    asked = ((op.kind, op.dtype) for op in graph.stack_forms() if op.is_product)
    # cuDNN rounds fp32 to TF32 only where a card has it, unasked
    formats = [dtype for kind, dtype in asked if (kind, dtype) != ("conv2d", Dtype.TF32)]
    for dtype in dict.fromkeys(formats):
        if dtype not in units_for:
            known = ", ".join(sorted(str(d) for d in units_for if d in RUNNABLE_DTYPES))
            wanted = f"a format that the {gpu.name} has units for ({known})"
            kept = (
                f"Keep the weights alone in it: --weights {dtype}. "
                if dtype in ("fp8", "fp4")
                else ""
            )
            raise bad_value(f"{graph.name}: dtype", wanted, str(dtype), kept + do)


def list_ways_to_fit(
    graph: Graph, gpu: Gpu, model: ModelSpec | None, options: ModelOptions
) -> list[str]:
    """Return what would hold a workload: more of the same GPU, the smallest other GPU of its use, a
    smaller batch.
    """
    capacity_byte = float(np.max(gpu.memory.capacity_byte))
    ways = []
    if model is not None:
        for tp in (2, 4, 8, 16, 32, 64):
            try:
                held = compute_footprint(model, replace(options, tp=options.tp * tp))
            except BadInput:  # heads cannot be shared so
                continue
            if held.fits(capacity_byte):
                ways.append(f"on {graph.gpu_count * tp} x {gpu.name} (tp {options.tp * tp})")
                break
    needed_byte = graph.memory_byte or 0.0
    others = [card for card in map(hardware.load_gpu, hardware.gpu_names()) if card.use is gpu.use]
    enough = [card for card in others if np.max(card.memory.capacity_byte) >= needed_byte]
    if enough:  # of two as large the one with the faster memory
        smallest = min(
            enough, key=lambda c: (np.max(c.memory.capacity_byte), -np.max(c.memory.byte_per_s))
        )
        size = units.show(float(np.max(smallest.memory.capacity_byte)), "byte", 3)
        ways.append(f"on {graph.gpu_count} x {smallest.name} of {size}")
    if model is not None and options.batch > 1:
        largest = find_largest_batch(model, options, capacity_byte)
        ways += [f"with a batch of {largest}"] if largest else []
    return ways


def find_bundle(bundle: Bundle | str | Path | None, gpu: Gpu) -> Bundle:
    """Return the bundle given, read it from its folder, or take the one that Wattcast has for the
    GPU.
    """
    if bundle is None or isinstance(bundle, Bundle):
        return bundle or bundle_for(gpu)
    from wattcast.predictor.bundle.calibrated import load_bundle  # few predictions bring a bundle

    found = load_bundle(Path(bundle))
    if strip_board(found.gpu) != strip_board(gpu.name):
        raise bad_value(
            "bundle",
            f"one of the {gpu.name}",
            f"one of the {found.gpu}",
            "Choose the GPU it was made for.",
        )
    return found


def find_gpu(gpu: str | Path | Gpu, node: str | Path | Node | None = None) -> Gpu:
    """Find a GPU in the catalogue or in the user's own YAML file, and the node it stands in
    likewise.
    """
    if node is not None:
        if not isinstance(node, Node):
            own = isinstance(node, Path) or node.endswith((".yaml", ".yml"))
            node = load_node_file(Path(node)) if own else load_node(str(node))
        return replace(find_gpu(gpu), node=node)
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, Path) or gpu.endswith((".yaml", ".yml")):
        return hardware.load_gpu_file(Path(gpu))
    return hardware.load_gpu(gpu)


def _read_clock(gpu: Gpu, clock: Quantity | None) -> Sweepable | None:
    if clock is None:
        return None
    asked = _read_amount(clock, "Hz", "clock")
    low = gpu.clocks.min_hz or 1.0
    high = gpu.clocks.max_hz
    if (np.asarray(asked) > np.asarray(high) * (1 + 1e-9)).any() or (
        np.asarray(asked) < np.asarray(low)
    ).any():
        span = f"between {units.show(float(np.min(low)), 'Hz')} and {units.show(float(np.max(high)), 'Hz')}"
        worst = float(np.max(np.where(np.asarray(asked) > high, asked, np.min(asked))))
        raise bad_value("clock", f"a clock of the {gpu.name}, {span}", units.show(worst, "Hz"))
    return asked


def _read_amount(value: Quantity, unit: str, where: str) -> Sweepable:
    if isinstance(value, str):
        return units.parse(value, unit, where)
    try:
        amount = as_sweep(value)
    except (TypeError, ValueError):
        raise bad_value(
            where, f"a number in {unit}, a string with its unit, or an array", value
        ) from None
    if not np.isfinite(amount).all():
        raise bad_value(where, "finite numbers", value)
    return amount


def _read_temperature(value: Quantity) -> Sweepable:
    celsius = _read_amount(value, "C", "temperature")
    low = float(np.min(celsius))
    high = float(np.max(celsius))
    if low < 0 or high > 110:
        raise bad_value(
            "temperature", "die temperatures between 0 and 110 C", f"{low:g} to {high:g} C"
        )
    return celsius
