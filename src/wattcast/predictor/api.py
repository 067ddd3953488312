"""Predict from names and units as people type them: the Python API.

    import wattcast
    p = wattcast.predict("llama3-8b", gpu="h100-sxm", phase="decode", batch=8, seq=1024)
    p.tokens_per_s, p.energy_j_per_token, p.total_power_w

A number may be SI or a string with its unit; ``clock``, ``power_limit``, ``temperature`` and
``host_launch`` may be arrays, and the prediction then has their broadcast shape.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    TypeAlias,
    Unpack,
    overload,
)

import numpy as np

from wattcast import hardware
from wattcast.core import bad_value, check_names
from wattcast.core.user_results import ResultList
from wattcast.hardware import (
    Gpu,
    Node,
    strip_board,
)
from wattcast.hardware.catalogue_reader import load_node, load_node_file
from wattcast.options.setting_options import (
    OPERANDS,
    PREDICT,
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import Prediction, predict_graphs
from wattcast.predictor.prices import read_prices
from wattcast.predictor.run_settings import resolve_settings
from wattcast.predictor.runnable_checks import check_power_limit, check_runs
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import (
    OPTION_NAMES,
    ModelOptions,
    SoftwareStack,
    unknown_option_error,
)
from wattcast.workload.operator_base import is_any
from wattcast.workload.readers import load_workload
from wattcast.workload.readers.load_workload import Workload

if TYPE_CHECKING:
    from wattcast.options.keywords import PredictKeywords

_REPLAYED = (
    "host: as measured of vLLM 0.25.1, which prepares a step while the GPU computes the one before"
)
_WAITING = "host: as measured of vLLM 0.25.1"


SETTING_NAMES = tuple([name for name in PREDICT.declared if name not in OPTION_NAMES])
# Kinds of GPU that one call answers for: ["h200", "b200"]
SeveralGpus: TypeAlias = "list[str] | list[str | Path | Gpu] | tuple[str | Path | Gpu, ...]"


@overload
def predict(
    workload: Workload | Callable[..., Any],
    gpu: str | Path | Gpu,
    *,
    inputs: Any = None,
    **options: Unpack[PredictKeywords],
) -> Prediction: ...


@overload
def predict(
    workload: Workload | Callable[..., Any],
    gpu: SeveralGpus,
    *,
    inputs: Any = None,
    **options: Unpack[PredictKeywords],
) -> ResultList[Prediction]: ...


@PREDICT.sign
def predict(
    workload: Workload | Callable[..., Any],
    gpu: str | Path | Gpu | SeveralGpus,
    *,
    inputs: Any = None,
    **options: Unpack[PredictKeywords],
) -> Prediction | ResultList[Prediction]:
    """Predict speed, power, energy and clock of a workload on one or several GPUs of a kind.

    With a list of GPUs, such as ``gpu=["h200", "b200"]``, return a prediction for each kind.

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
    own YAML file): it decides what crosses the network. ``engine`` is whose kernels run: vllm,
    sglang or trtllm, as far as public tables time them. ``card``: ``another`` of the kind
    (intervals hold how far cards differ) or ``this``, the one it was fitted on. ``price`` is the
    rent of one GPU (``"2.50/h"``), ``electricity`` a tariff (``"0.12/kWh"``), ``carbon`` an
    intensity (``"400g/kWh"``) or a region (``"us"``), ``pue`` the site's overhead. ``force``
    predicts what cannot run: a number format without units, a power limit that the card does not
    take, a model that does not fit. ``host_factor`` and ``power_factor`` are a host's time and a
    card's watts over the usual ones; without them those that ``wattcast doctor --card`` measured
    on this machine hold, and 1 ignores these.
    """
    if isinstance(gpu, list | tuple):
        return ResultList(predict(workload, kind, inputs=inputs, **options) for kind in gpu)
    if inputs is not None or not isinstance(workload, (str, Path, Graph, ModelSpec, Mapping)):
        settings, model_options = _split_options(options)
        graph = load_workload.capture_workload(workload, inputs, model_options)
        return predict_many([graph], gpu, **settings)[0]
    return predict_many([workload], gpu, **options)[0]


@PREDICT.sign
def predict_many(
    workloads: Sequence[Workload | tuple[Workload, Mapping[str, Any]]],
    gpu: str | Path | Gpu | SeveralGpus,
    **options: Unpack[PredictKeywords],
) -> ResultList[Prediction]:
    """Predict many workloads on one kind of GPU, in order and several times as fast as one by one.

    With a list of GPUs, the predictions of the first kind come before those of the second.

    Options are those of ``predict``. A workload may come with options of its own, which go before
    those of all:

        wattcast.predict_many(["llama3-8b", ("llama3-8b", {"phase": "decode"}), ("resnet50",
        {"batch": 64})], "h200")
    """
    if isinstance(gpu, list | tuple):
        return ResultList(p for kind in gpu for p in predict_many(workloads, kind, **options))
    chosen = PREDICT.select(options)
    settings = chosen[SettingOptions]
    _, shared_options = _split_options(options)
    named = [_add_options(item, shared_options) for item in workloads]
    graphs = [load_workload.load_workload(workload, run) for workload, run in named]

    prices = read_prices(chosen[PriceOptions])
    chip = find_gpu(gpu, settings.node, settings.engine)
    bundle = find_bundle(settings.bundle, chip)
    if settings.factors:
        from wattcast.predictor.bundle.calibrated import apply_factors  # few predictions have any

        bundle = apply_factors(bundle, settings.factors)
    notes, at, bundle = resolve_settings(chip, bundle, settings, chosen[MachineOptions])
    if not settings.force:
        check_power_limit(chip, at)
        for (workload, run), graph in zip(named, graphs, strict=True):
            check_runs(graph, chip, workload, run)

    notes += prices.notes
    graphs = [_note_settings(graph, notes, settings.operands, chip) for graph in graphs]
    predictions = predict_graphs(graphs, chip, at, bundle)
    return ResultList(replace(prediction, prices=prices) for prediction in predictions)


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into settings of a prediction and options of its model."""
    settings: dict[str, Any] = {}
    model_options: dict[str, Any] = {}
    for name, value in options.items():
        target = settings if name in SETTING_NAMES else model_options
        target[name] = value
    return settings, model_options


def _add_options(
    item: Workload | tuple[Workload, Mapping[str, Any]], shared_options: Mapping[str, Any]
) -> tuple[Workload, ModelOptions]:
    """Return a workload with its own options before those of all."""
    workload, own_options = item if isinstance(item, tuple) else (item, {})
    merged = {**shared_options, **own_options}
    for name in merged:
        if name not in OPTION_NAMES:
            # it may have been meant for a setting of ``predict``
            raise unknown_option_error(name, SETTING_NAMES)
    return workload, ModelOptions.from_names(**merged)


def _note_settings(
    graph: Graph,
    notes: Sequence[str],
    operands: str | None,
    gpu: Gpu,
) -> Graph:
    """Return a graph with the settings' notes and the place of its operands.

    An engine replays its kernels, and its host counts step by step.
    """
    assumptions = list(graph.assumptions)
    waits = any(note.startswith("synchronous scheduling") for note in notes)
    for note in notes:
        is_replayed = graph.stack == SoftwareStack.ENGINE and note.startswith("host: ")
        replayed = _WAITING if waits else _REPLAYED
        assumptions.append(replayed if is_replayed else note)
    assumptions += _note_operands(graph, operands, gpu)
    return replace(graph, assumptions=tuple(assumptions), operands=operands or "")


def _note_operands(
    graph: Graph,
    operands: str | None,
    gpu: Gpu,
) -> list[str]:
    """Say where operands lie, where it matters and nobody said so.

    It matters where an operator that is not part of a model reads little enough to stay in L2.
    """
    if operands is None:
        l2_byte = np.max(gpu.l2.capacity_byte or 0.0)
        may_stay = [is_any(op.read_byte < l2_byte) for op in graph.stack_forms()]
        if graph.phase or not any(may_stay):
            return []
        return ["operands: weights in device memory, others in L2 as far as they fit (--operands)"]

    question = "Do they come from device memory (cold) or L2 (warm)?"
    check_names("operands", operands, OPERANDS, question)
    if graph.phase:
        do = (
            "Operators of a model find what the others leave, which is the default: "
            "leave --operands away."
        )
        expected = "an operator or a list of operators"
        raise bad_value(f"{graph.name}: operands", expected, "a model", do)
    where = "in device memory" if operands == "cold" else "in L2, as far as they fit"
    return [f"operands: {operands}, {where} when an operator begins"]


def host_cost_of_run(
    model: str,
    latency_s: float,
    **options: Any,
) -> float:
    """Return what issuing an operator costs a host that took so long for a pass of an eager model.

    The GPU must be the faster of both, as it is for a small model at batch 1.
    """
    eager_options = ModelOptions.from_names(stack=SoftwareStack.EAGER, **options)
    graph = load_workload.load_workload(model, eager_options)
    launch = bundle_for(hardware.load_gpu("h200")).launch
    calls = list(graph.calls())
    counts = [count for _, count in calls]
    usual_s = float(launch.host_s([op.kind for op, _ in calls], graph.layer_host) @ counts)
    return float(np.mean(launch.host_s_per_operator)) * latency_s / usual_s


def find_bundle(bundle: Bundle | str | Path | None, gpu: Gpu) -> Bundle:
    """Return a bundle, read it from its folder, or take the one that Wattcast has for the GPU."""
    if bundle is None:
        return bundle_for(gpu)
    if isinstance(bundle, Bundle):
        return bundle
    from wattcast.predictor.bundle.calibrated import load_bundle  # few predictions bring a bundle

    loaded = load_bundle(Path(bundle))
    if strip_board(loaded.gpu) != strip_board(gpu.name):
        expected = f"one of the {gpu.name}"
        do = "Choose the GPU it was made for."
        raise bad_value("bundle", expected, f"one of the {loaded.gpu}", do)
    return loaded


def find_gpu(
    gpu: str | Path | Gpu,
    node: str | Path | Node | None = None,
    engine: str | None = None,
) -> Gpu:
    """Find a GPU in the catalogue or in the user's own YAML file, and the node it stands in
    likewise. ``engine`` is whose kernels it runs.
    """
    if isinstance(gpu, Gpu):
        chip = gpu
    elif _is_file(gpu):
        chip = hardware.load_gpu_file(Path(gpu))
    else:
        chip = hardware.load_gpu(str(gpu))
    if engine is not None:
        chip = replace(chip, engine=engine)
    if node is None:
        return chip
    if not isinstance(node, Node):
        node = load_node_file(Path(node)) if _is_file(node) else load_node(str(node))
    return replace(chip, node=node)


def _is_file(name: str | Path) -> bool:
    return isinstance(name, Path) or name.endswith((".yaml", ".yml"))
