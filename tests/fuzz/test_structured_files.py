"""Every reader against documents that are well formed and wrong: a value that is sound, or one
sentence.

The oracle: no exception but our own, no example over 10 s, no process over 1 GB, and nothing absurd
accepted. What a reader accepts and a prediction can use is predicted: figures are finite and
positive, within the card's limits, and energy is power times time.

A normal run tries a few documents a reader. The nightly run tries thousands:

    WATTCAST_EXAMPLES=4000 WATTCAST_SEED=2 python -m pytest tests/fuzz/test_structured_files.py

``python -m tests.fuzz.test_structured_files 200000 2`` spreads so many documents over all readers,
goes on after a failure, and says at the end how many ran and what failed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.fuzz import structured_mutations as mutations
from tests.fuzz.test_damaged_files import make_readers
from tests.workload.huggingface_configs import ENCODERS, TAKEN

import wattcast
from wattcast.core.arrays import read_arrays
from wattcast.core.errors import WattcastError
from wattcast.core.row_tables import read_table, write_table
from wattcast.hardware import Gpu, load_gpu
from wattcast.hardware.catalogue_reader import parse_gpu
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.power.power_model import parse_saved_model
from wattcast.predictor.bundle.bundle_file import (
    Bundle,
    bundle_to_plain,
    read_bundle,
    residuals_from_bytes,
    residuals_to_bytes,
    shipped_bundle,
)
from wattcast.report.comparison import compare_runs
from wattcast.report.comparison_sides import read_run
from wattcast.serving.arrivals import Trace
from wattcast.serving.simulate_serving import simulate
from wattcast.serving.trace_files import parse_trace
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.model_catalogue import parse_model
from wattcast.workload.model_options import WorkloadPhase
from wattcast.workload.operator_base import load_functions
from wattcast.workload.readers.from_huggingface import parse_huggingface
from wattcast.workload.readers.from_json import graph_to_plain, parse_workload

EXAMPLES = int(os.environ.get("WATTCAST_EXAMPLES", "3"))
SEED = int(os.environ.get("WATTCAST_SEED", "29"))
LONGEST_S = 10.0
MOST_BYTE = 1 << 30
LONGEST_RUN_S = 1e12  # ten billion calls of operators of 2^40 elements
SOURCE = Path(wattcast.__file__).parent


class Document(NamedTuple):
    """A good document as a tree, how it is written, how it is read, and how what was read is used."""

    tree: Any
    encode: Callable[[Any], bytes]
    read: Callable[[bytes], Any]
    use: Callable[[Any], None] = lambda value: None


def check_prediction(p: Any, gpu: Gpu) -> None:
    """Assert what holds for every prediction."""
    figures = (p.latency_s, p.power_w, p.energy_j, p.clock_hz, p.effective_clock_hz, p.peak_power_w)
    assert all(0.0 < float(figure) < np.inf for figure in figures), figures
    assert float(p.latency_s) < LONGEST_RUN_S, p.latency_s
    assert np.isclose(p.energy_j, p.power_w * p.latency_s, rtol=1e-9)
    assert min(float(module.power_w) for module in p.modules) >= 0.0, p.modules
    cannot = any("cannot be met" in text for text in p.assumptions)
    limit_w = float(np.max(gpu.power.limit_w))
    assert cannot or float(p.power_w) <= 1.001 * limit_w, (p.power_w, limit_w)
    for name in ("latency_s", "power_w", "energy_j"):
        low, high = getattr(p.interval, name)
        assert 0.0 <= low <= getattr(p, name) <= high < np.inf, (name, low, high)


def _predict(work: Any, gpu: Gpu | None = None, bundle: Bundle | None = None) -> None:
    chip = gpu or load_gpu("h200")
    check_prediction(wattcast.predict(work, chip, bundle=bundle, force=True), chip)


def _predict_on(gpu: Gpu) -> None:
    for work in ("gpt2", "resnet50"):
        _predict(work, gpu)


def _predict_by(bundle: Bundle) -> None:
    _predict("gpt2", None, bundle)


def _simulate(trace: Trace) -> None:
    if len(trace) > 50 or trace.arrival_s[-1] > 1e4 or trace.output_tokens.max() > 500:
        return  # sound, and long
    result = simulate("gpt2", "h200", trace=trace)
    assert 0.0 < result.length_s < np.inf
    assert np.isfinite(result.summarise()["energy_j"]) if "energy_j" in result.summarise() else True


def _compare_with_itself(run: Any) -> None:
    compare_runs(run, run)


_TOWER = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_PICTURE = {"patch_size": 16, "image_size": 224, "num_channels": 3, "hidden_act": "gelu"}
_TEXT = _TOWER | {"vocab_size": 49408, "max_position_embeddings": 77}
PICTURES: tuple[dict[str, Any], ...] = (
    {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_inner": None},
    {"model_type": "opt", **_TEXT, "ffn_dim": 3072, "activation_function": "relu"},
    {"model_type": "bert", **_TEXT, "id2label": {"0": "a"}},
    {"model_type": "vit", **_TOWER, **_PICTURE, "architectures": ["ViTForImageClassification"]},
    {"model_type": "dinov2", **_TOWER, **_PICTURE, "mlp_ratio": 4},
    {"model_type": "convnext", "depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768], **_PICTURE},
    {"model_type": "resnet", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64},
    {"model_type": "swin", "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "embed_dim": 96, "window_size": 7},
    {"model_type": "sam", "vision_config": {**_TOWER, "global_attn_indexes": [2, 5], "window_size": 14}},
    {"model_type": "clip", "vision_config": _TOWER | _PICTURE, "text_config": _TEXT, "projection_dim": 512},
    {"model_type": "siglip", "vision_config": _TOWER | _PICTURE, "text_config": _TEXT},
    {
        "model_type": "whisper", "encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "vocab_size": 100,
        "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "num_mel_bins": 80, "max_source_positions": 1500,
    },
)  # fmt: skip


def _list_models() -> dict[str, Document]:
    """Configurations of the hub, and catalogue models of every architecture."""
    documents = {}
    read: Callable[[bytes], Any] = partial(parse_huggingface, where="config.json", name="mine")
    for collected in [*TAKEN, *ENCODERS]:
        kind = collected.config["model_type"]
        documents[f"config {kind}"] = Document(
            collected.config, mutations.encode_json, read, _predict
        )
    for name in (
        "vit-base",
        "resnet50",
        "swin-tiny",
        "sd1.5-unet",
        "flux.1-dev",
        "sd3.5-medium",
        "pixart-sigma",
        "hunyuan-dit",
        "cogvideox1.5-5b",
        "hunyuan-video",
        "flux-vae-decoder",
        "clip-l-text",
        "mobilevit-s",
        "clip-base",
    ):
        tree = yaml.safe_load((SOURCE / f"workload/catalogue/{name}.yaml").read_bytes())
        read = partial(parse_model, where="mine.yaml", name="mine")
        documents[f"model {name}"] = Document(tree, mutations.encode_yaml, read, _predict)
    return documents


_SIZES = {"m": 64, "n": 128, "k": 256, "batch": 2, "dtype": "bf16"}


def _list_operators() -> dict[str, Document]:
    """Workload files with operators of every kind that a predicted model or the registry has."""
    graphs = [
        build_graph(model, ModelOptions(phase=WorkloadPhase(phase))) for model, phase in _WORKLOADS
    ]
    documents = {}
    read = partial(parse_workload, where="w.json")
    for graph in graphs:
        tree = graph_to_plain(graph)
        tree["ops"] = tree["ops"][:4]
        documents[f"operators of {graph.name}"] = Document(
            tree, mutations.encode_json, read, _predict
        )
    some = [{"op": name, "n": 4096, "dtype": "bf16"} for name in list(load_functions())[::9]]
    elementwise = {"name": "w", "ops": some}
    documents["operators of functions"] = Document(
        elementwise, mutations.encode_json, read, _predict
    )
    return documents


_WORKLOADS = (
    ("llama3-8b", "decode"), ("deepseek-v3", "prefill"), ("mixtral-8x7b", "decode"), ("gpt2", "train"),
    ("resnet50", "forward"), ("sd1.5-unet", "forward"), ("jamba-v0.1", "prefill"), ("whisper-tiny", "decode"),
)  # fmt: skip


def _list_hardware() -> dict[str, Document]:
    documents = {}
    for name in ("h200", "a10", "mi300x", "tesla-k40"):
        path = SOURCE / f"hardware/catalogue/{name}.yaml"
        if path.exists():
            read = partial(parse_gpu, name="mine", where="mine.yaml")
            tree = yaml.safe_load(path.read_bytes())
            documents[f"gpu {name}"] = Document(tree, mutations.encode_yaml, read, _predict_on)
    return documents


def _list_bundles(folder: Path) -> dict[str, Document]:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    plain = bundle_to_plain(replace(bundle, learned=None))
    documents = {
        "bundle": Document(
            plain, mutations.encode_json, partial(_read_plain_bundle, folder), _predict_by
        )
    }
    law = SOURCE / "power/presets/fitted/h200.yaml"
    read = partial(parse_saved_model, where="power.yaml")
    documents["power model"] = Document(
        yaml.safe_load(law.read_bytes()), mutations.encode_yaml, read
    )
    prediction = {
        "wattcast": wattcast.__version__,
        "predictions": [wattcast.predict("gpt2", "h200").to_dict()],
    }
    run = {"duration_s": 10.0, "power_w": 300.0, "sm_clock_hz": 1.7e9, "flags": ["x"]}
    for name, tree in (("prediction", prediction), ("measured run", run)):
        documents[name] = Document(
            tree, mutations.encode_json, partial(_read_run, folder), _compare_with_itself
        )
    return documents


def _read_plain_bundle(folder: Path, data: bytes) -> Bundle:
    (folder / "bundle.json").write_bytes(data)
    return read_bundle(folder / "bundle.json")


def _read_run(folder: Path, data: bytes) -> Any:
    (folder / "run.json").write_bytes(data)
    return read_run(str(folder / "run.json"), "", 1)


def _list_traces() -> dict[str, Document]:
    ours = b"arrival_s,prompt_tokens,output_tokens,prefix_id\n0.5,16,4,a\n1.5,32,8,\n2.5,8,8,b\n"
    azure = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,16,4\n2023-11-16 18:15:50,32,8\n"
    burst = (
        b"Timestamp,Model,Request tokens,Response tokens,Log Type\n5,ChatGPT,16,4,x\n9,y,3,2,x\n"
    )
    documents = {
        f"arrivals {name}": Document(
            mutations.split_table(data),
            mutations.encode_table,
            partial(parse_trace, name="t.csv"),
            _simulate,
        )
        for name, data in (("ours", ours), ("azure", azure), ("burstgpt", burst))
    }
    lines = [
        {"arrival_s": 0.5 * i, "prompt_tokens": 8, "output_tokens": 4, "prefix_id": "a"}
        for i in range(3)
    ]
    read = partial(parse_trace, name="t.jsonl")
    documents["arrivals lines"] = Document(lines, mutations.encode_lines, read, _simulate)
    return documents


YAML_READERS = ("energies", "column map", "fleet", "node", "model")
TABLE_READERS = (
    *(
        "simulator table",
        "hardware counters",
        "ncu",
        "ncu wide",
        "nvprof",
        "utilisations",
        "applications",
        "programs",
    ),
    *("counters", "kernel runs", "clock steps", "kernel list", "clocks", "measured models"),
)
LINE_READERS = ("journal", "microbenchmarks")
LOG_READERS = (
    *(
        "xml",
        "simulator log",
        "gem5",
        "power report",
        "simulator options",
        "mcpat",
        "tegrastats",
        "dcgm",
    ),
    "power table",
)
TREE_READERS = ("profile", "launches", "operators")


def _list_instruments(folder: Path) -> dict[str, Document]:
    """The readers of instruments' files, whose good files the byte-wise fuzzer keeps."""
    documents = {}
    for name, (read, good) in make_readers(folder).items():
        if name in TREE_READERS:
            documents[name] = Document(good, mutations.encode_json, read)
            continue
        if not isinstance(good, bytes):
            continue
        if name in YAML_READERS:
            documents[name] = Document(yaml.safe_load(good), mutations.encode_yaml, read)
        elif name in TABLE_READERS:
            documents[name] = Document(mutations.split_table(good), mutations.encode_table, read)
        elif name in LINE_READERS:
            lines = [json.loads(line) for line in good.splitlines()]
            documents[name] = Document(lines, mutations.encode_lines, read)
        elif name in LOG_READERS:
            documents[name] = Document(mutations.split_log(good), mutations.encode_log, read)
    return documents


def _list_arrays(folder: Path) -> dict[str, Document]:
    """Arrays of a recording and of learned factors, each array a list of numbers that an edit
    changes.
    """
    recording = EnergySamples(np.arange(4.0 * len(COLUMNS)).reshape(4, -1))
    return {"recording": _array_document(recording.to_bytes(), partial(_load_recording, folder))}


def _load_recording(folder: Path, data: bytes) -> Any:
    (folder / "run.npz").write_bytes(data)
    return EnergySamples.load(folder / "run.npz")


def _array_document(data: bytes, read: Callable[[bytes], Any]) -> Document:
    arrays = read_arrays(data, "good.npz")
    tree = {name: values.tolist() for name, values in arrays.items()}
    return Document(tree, _encode_arrays, read)


def _encode_arrays(tree: Any) -> bytes:
    packed = io.BytesIO()
    named = tree if isinstance(tree, dict) else {"rows": tree}
    arrays = {}
    for name, values in named.items():
        try:
            array = np.array(values)
        except (ValueError, OverflowError):
            continue  # rows of different lengths are no array
        if array.dtype != object:
            arrays[str(name).replace("\x00", "") or "x"] = array
    np.savez(packed, **arrays)
    return packed.getvalue()


def _list_tables(folder: Path) -> dict[str, Document]:
    rows = [
        {
            "id": f"r{i}",
            "operator": {"op": "linear", "m": i + 1},
            "latency_s": 1e-5,
            "kind": "burst",
        }
        for i in range(4)
    ]
    return {
        "table": Document(rows, partial(_encode_parquet, folder), partial(_read_parquet, folder))
    }


def _encode_parquet(folder: Path, tree: Any) -> bytes:
    rows = [row for row in tree if isinstance(row, dict)] if isinstance(tree, list) else []
    path = folder / "good.parquet"
    try:
        write_table(path, rows)
    except Exception:
        return b""  # polars takes no such rows
    return path.read_bytes()


def _read_parquet(folder: Path, data: bytes) -> Any:
    (folder / "rows.parquet").write_bytes(data)
    return read_table(folder / "rows.parquet")


def _list_learned(folder: Path) -> dict[str, Document]:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    assert bundle.learned is not None
    arrays = read_arrays(residuals_to_bytes(bundle.learned), "arrays.npz")
    families = [name.removesuffix(".range") for name in arrays if name.endswith(".range")]
    size_of = {
        family: sum(values.size for name, values in arrays.items() if name.startswith(f"{family}."))
        for family in families
    }
    smallest = min(size_of, key=size_of.__getitem__)  # an edit walks the whole tree
    few = {
        name: values.tolist() for name, values in arrays.items() if name.startswith(f"{smallest}.")
    }
    read = partial(residuals_from_bytes, reference=bundle.reference)
    return {"learned": Document(few, _encode_arrays, read)}


GROUPS: dict[str, Callable[[Path], dict[str, Document]]] = {
    "models": lambda folder: _list_models(),
    "operators": lambda folder: _list_operators(),
    "hardware": lambda folder: _list_hardware(),
    "bundles": _list_bundles,
    "traces": lambda folder: _list_traces(),
    "instruments": _list_instruments,
    "arrays": _list_arrays,
    "tables": _list_tables,
    "learned": _list_learned,
}


@cache
def list_documents(group: str) -> dict[str, Document]:
    """Return the documents of a group by name; their readers share a folder for files."""
    return GROUPS[group](Path(tempfile.mkdtemp(prefix="wattcast-fuzz-")))


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the block takes more of a processor, or sleeps ten times as long.

    Time in which others have the processor counts as neither, so that a machine which is busy with
    other work finds no hangs that are none.
    """
    begun_s = waited_s()

    def give_up(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s of a processor")

    def look_at_sleep(*_: object) -> None:
        slept_s = waited_s() - begun_s
        if slept_s > 10.0 * seconds:
            raise TimeoutError(f"slept for {slept_s:.0f} s")
        signal.setitimer(signal.ITIMER_REAL, max(10.0 * seconds - slept_s, 0.1))

    handlers = {signal.SIGPROF: give_up, signal.SIGALRM: look_at_sleep}
    before = {number: signal.signal(number, one) for number, one in handlers.items()}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10.0 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def waited_s() -> float:
    """Return the time that passed without this process wanting a processor.

    Where the kernel does not tell how long the process stood in line, that counts as well.
    """
    elapsed_s = time.monotonic() - time.process_time()
    try:
        fields = Path("/proc/self/schedstat").read_text().split()
    except OSError:
        return elapsed_s
    return elapsed_s - int(fields[1]) / 1e9


def try_document(document: Document, changes: list[mutations.Edit], use: bool = True) -> bool:
    """Read a changed document and use it; tell whether it was accepted."""
    data = document.encode(mutations.mutate(document.tree, changes))
    try:
        with within(LONGEST_S):
            value = document.read(data)
            if use:
                document.use(value)
    except WattcastError as error:
        sentence = str(error)
    except Exception as error:
        error.add_note(f"changes: {changes!r}")
        error.add_note(f"document: {data[:2000]!r}")
        raise
    else:
        return True
    assert 0 < len(sentence) < 4000
    return False


def attack_document(name: str, document: Document, examples: int, number: int) -> tuple[int, int]:
    """Try ``examples`` changed documents; return how many were tried and how many were accepted."""
    start_byte = mutations.begin_peak()
    document.use(document.read(document.encode(document.tree)))
    tried = accepted = 0

    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(mutations.edit_lists)
    def attack(changes: list[mutations.Edit]) -> None:
        nonlocal tried, accepted
        tried += 1
        accepted += try_document(document, changes)

    try:
        attack()
    except BaseException as error:
        error.add_note(f"reader: {name}")
        raise
    grown_byte = mutations.grown_byte(start_byte)
    assert grown_byte < MOST_BYTE, f"{name}: {grown_byte / 2**20:.0f} MiB"
    return tried, accepted


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", GROUPS)
def test_a_changed_document_gets_a_sound_value_or_a_sentence(group: str, step: int) -> None:
    """30 of 23,632 mutations of others were internal errors, and absurd bundles were believed.

    By day every other document of a group is changed.
    """
    documents = list(list_documents(group).items())[::step]
    tried = 0
    for name, document in documents:
        tried += attack_document(name, document, EXAMPLES, SEED)[0]
    assert tried >= min(EXAMPLES, 10) * len(documents)


def test_mutations_are_of_every_kind() -> None:
    """A fuzzer that changes nothing finds nothing."""
    chance = random.Random(SEED)
    tree = {"a": 1, "b": [1.5, "2 W"], "c": {"d": "word", "e": None}}
    seen = set()
    for _ in range(400):
        edit = mutations.Edit(
            chance.randrange(99), chance.randrange(16), 1e300, -1.0, chance.randrange(99)
        )
        seen.add(repr(mutations.mutate(tree, [edit])))
    assert len(seen) > 60


USED = 4  # of so many accepted documents of a long run, one is predicted or simulated
ROUND = 100  # documents of each reader after which the next reader has its turn


def peak_byte() -> int:
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attack_quickly(
    name: str, document: Document, chance: random.Random, failures: dict[str, str]
) -> int:
    """Try a round of documents and go on after failures; return how many were accepted."""
    accepted = 0
    for _ in range(ROUND):
        changes = mutations.draw_edits(chance)
        peak_before_byte = peak_byte()
        try:
            accepted += try_document(document, changes, use=chance.randrange(USED) == 0)
            grown_byte = peak_byte() - peak_before_byte
            assert grown_byte < MOST_BYTE // 2, f"{grown_byte / 2**20:.0f} MiB by {changes!r}"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{name}: {type(error).__name__} at {last.filename}:{last.lineno}"
            if kind not in failures:
                failures[kind] = "".join(traceback.format_exception(error, limit=-5))
                print(f"FAILED {kind}\n{failures[kind]}", flush=True)
    return accepted


def main(total: int, number: int) -> int:
    """Spread ``total`` documents over all readers, in rounds; print failures and how many were tried."""
    warnings.simplefilter("error")
    documents = {name: one for group in GROUPS for name, one in list_documents(group).items()}
    chances = {name: random.Random(f"{name} {number}") for name in documents}
    failures: dict[str, str] = {}
    tried = accepted = 0
    while tried < total:
        for name, document in documents.items():
            accepted += attack_quickly(name, document, chances[name], failures)
            tried += ROUND
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        took = time.process_time()
        print(
            f"{tried} documents of {len(documents)} readers, {accepted} accepted, "
            f"{len(failures)} kinds of failure; {took:.0f} s of a processor, {peak:.0f} MiB at most",
            flush=True,
        )
    return len(failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
