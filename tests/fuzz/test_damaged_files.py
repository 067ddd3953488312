"""Damaged and hostile files: every reader answers with a value or one sentence, never with a traceback.

A normal run tries some dozens of mutations per reader. The nightly run tries 100,000 of each:

    WATTCAST_MUTATIONS=100000 python -m pytest tests/fuzz
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wattcast
from wattcast.core import measured_rows
from wattcast.core.arrays import read_arrays
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.measured_rows import read_lines, read_table, write_table
from wattcast.gpuwattch.architecture import format_xml_architecture, parse_xml_architecture
from wattcast.gpuwattch.component_build import demo_architecture
from wattcast.gpuwattch.simulator_logs import read_accelsim, read_gem5_stats, read_power_report
from wattcast.gpuwattch.trace_reading import SimulatorDialect, TraceSampling, dialect_counters
from wattcast.hardware import load_gpu
from wattcast.hardware.catalogue_reader import parse_gpu
from wattcast.measure import energy_samples
from wattcast.measure.campaigns.engine_campaign import read_own_model
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import read_bundle, residuals_from_bytes
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Linear
from wattcast.workload.readers.from_huggingface import parse_huggingface
from wattcast.workload.readers.from_json import parse_workload
from wattcast.workload.readers.from_profiler import parse_profile

MUTATIONS = int(os.environ.get("WATTCAST_MUTATIONS", "40"))
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    5,
    2**31,
    2**63,
    1e400,
    -1e-320,
    0.5,
    "",
    "x",
    "1e400",
    [],
    {},
    [[]],
    {"a": 1},
)
ODD_WORDS = (b"1e400", b"-1", b"nan", b"", b"99999999999999999999", b"x", b"\xff")

CONFIG = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 128, "vocab_size": 100, "id2label": {"0": "a"}, "max_position_embeddings": 64}
CONFIG |= {"architectures": ["BertForSequenceClassification"], "torch_dtype": "float32"}
VIT = CONFIG | {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_channels": 3}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA |= {"intermediate_size": 128, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e4}}
LLAMA |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WORKLOAD = {"name": "w", "ops": [{"op": "linear", "m": 8, "n": 8, "k": 8, "dtype": "bf16"}] * 2}
_ARGS = {"grid": [1, 2, 3], "block": [128, 1, 1], "stream": 7, "Input Dims": [[8, 8], [8, 8]], "External id": 3}
_ARGS |= {"Input type": ["float", "float"], "Input Strides": [[8, 1], [8, 1]], "Concrete Inputs": ["", ""]}
_CALL = {"cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "ph": "X", "args": _ARGS}
SIMULATOR_LOG = (
    b"kernel_name = a\ngpu_sim_cycle = 100\ngpgpu_n_tot_w_icount = 9\nW1:0\tW32:9\ntotal dram reads = 4\n" * 2
)
SIMULATOR_TABLE = b"-" * 100 + b",\ngpu_sim_cycle = (.*),\nAPPS,one,\nk--1,10,\nk--2,20,\n\n"
SIMULATOR_TABLE += b"-" * 100 + b",\ntotal dram reads = (.*),\nAPPS,one,\nk--1,3,\nk--2,4,\n"
GEM5_STATISTICS = b"---------- Begin Simulation Statistics ----------\nsimSeconds 0.001 # s\n"
GEM5_STATISTICS += b"system.cpu3.CUs0.totalCycles 1000 # n\nsystem.cpu3.CUs0.numInstrExecuted 50 # n\n"
POWER_REPORT = b"kernel_name = a \nKernel Average Power Data:\nkernel_avg_power = 5\n"
POWER_REPORT += "".join(f"gpu_avg_{c.column}, = 1.5\n" for c in dialect_counters(SimulatorDialect.GPUWATTCH)).encode()
PROFILE = {"traceEvents": [_CALL, _CALL | {"cat": "kernel", "name": "gemm"}], "deviceProperties": [{"name": "H200"}]}


def _recording() -> bytes:
    return EnergySamples(np.arange(20.0 * len(COLUMNS)).reshape(20, -1)).to_bytes()


def _arrays() -> bytes:
    packed = io.BytesIO()
    np.savez_compressed(
        packed, **{"time.linear.range": np.array([0.5, 2.0]), "time.linear.forest.features": np.eye(3)}
    )
    return packed.getvalue()


def _table(folder: Path) -> bytes:
    write_table(folder / "good.parquet", [{"id": f"r{i}", "operator": {"op": "linear", "m": i}} for i in range(9)])
    return (folder / "good.parquet").read_bytes()


def _from_file(read: Callable[[Path], Any], path: Path) -> Callable[[bytes], Any]:
    def call(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return call


def make_readers(folder: Path) -> dict[str, tuple[Callable[[bytes], Any], bytes | dict[str, Any]]]:
    """Every reader of files of others with a good file: bytes, or a tree that is mutated and encoded as JSON."""
    gpu = (Path(__file__).parents[2] / "src/wattcast/hardware/catalogue/h200.yaml").read_bytes()
    return {
        "huggingface": (lambda data: parse_huggingface(data, "config.json"), CONFIG),
        "huggingface pictures": (lambda data: parse_huggingface(data, "config.json"), VIT),
        "huggingface decoder": (lambda data: parse_huggingface(data, "config.json"), LLAMA),
        "workload": (lambda data: parse_workload(data, "w.json"), WORKLOAD),
        "profile": (lambda data: parse_profile(data, "trace.json"), PROFILE),
        "gpu": (lambda data: parse_gpu(data, "mine", "mine.yaml"), gpu),
        "xml": (lambda data: parse_xml_architecture(data, "gpu.xml"), format_xml_architecture(demo_architecture())),
        "simulator log": (_from_file(lambda path: read_accelsim(path, 1e9), folder / "sim.log"), SIMULATOR_LOG),
        "simulator table": (_from_file(lambda path: read_accelsim(path, 1e9), folder / "stats.csv"), SIMULATOR_TABLE),
        "gem5": (_from_file(read_gem5_stats, folder / "stats.txt"), GEM5_STATISTICS),
        "power report": (
            _from_file(
                lambda path: read_power_report(path, SimulatorDialect.GPUWATTCH, {}, TraceSampling(500, 1e9)),
                folder / "report.log",
            ),
            POWER_REPORT,
        ),
        "journal": (
            _from_file(lambda path: list(read_lines(path)), folder / "rows.jsonl"),
            b'{"id":"a","x":[1]}\n' * 3,
        ),
        "recording": (_from_file(EnergySamples.load, folder / "run.npz"), _recording()),
        "bundle": (lambda data: residuals_from_bytes(data, bundle_for(load_gpu("h200")).reference), _arrays()),
        "table": (_from_file(read_table, folder / "rows.parquet"), _table(folder)),
    }


READERS = ("huggingface", "huggingface pictures", "huggingface decoder", "workload", "profile", "gpu", "xml")
READERS += ("journal", "recording", "bundle", "table", "simulator log", "simulator table", "gem5", "power report")


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """Replace, drop or double one value somewhere in a tree."""
    if isinstance(tree, dict) and tree and chance.random() < 0.8:
        key = chance.choice(list(tree))
        if chance.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return tree | {key: mutate_tree(tree[key], chance)}
    if isinstance(tree, list) and tree and chance.random() < 0.7:
        place = chance.randrange(len(tree))
        return [*tree[:place], mutate_tree(tree[place], chance), *tree[place + chance.randrange(2) :]]
    return chance.choice(ODD)


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Cut, flip bytes, or put an odd word in place of another."""
    kind, place = chance.randrange(4), chance.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + data[place + chance.randrange(1, 40) :]
    words = [match.span() for match in re.finditer(rb"[\w.+-]+", data)]
    place, end = chance.choice(words or [(place, place + 1)])
    return data[:place] + chance.choice(ODD_WORDS) + data[end:]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_gets_a_value_or_a_sentence(name: str, tmp_path: Path) -> None:
    """141 of 4,000 damaged files gave "internal error ... report it" at 15 places."""
    read, good = make_readers(tmp_path)[name]
    if name != "bundle":  # a forest of three numbers is whole, and none of ours
        read(json.dumps(good).encode() if isinstance(good, dict) else good)
    chance = random.Random(f"{name} 29")
    for number in range(MUTATIONS):
        if isinstance(good, dict) and number % 4:
            tree = mutate_tree(good, chance)
            data = json.dumps(mutate_tree(tree, chance) if chance.random() < 0.3 else tree).encode()
        else:
            data = mutate_bytes(json.dumps(good).encode() if isinstance(good, dict) else good, chance)
        try:
            read(data)
        except WattcastError:
            pass
        except Exception as error:
            error.add_note(f"mutation {number}: {data[:1000]!r}")
            raise


def test_an_archive_is_not_unpacked_beyond_its_bound() -> None:
    """A file of 3 MB unpacked to 3 GiB."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.npy", bytes(4 * 2**20))
    with pytest.raises(BadInput, match="at most 1048576 bytes unpacked"):
        read_arrays(packed.getvalue(), "bomb.npz", 2**20)


def test_an_array_that_claims_more_than_it_holds_is_refused() -> None:
    packed, plain = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(plain, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.npy", plain.getvalue())
    with pytest.raises(BadInput, match="size is not that of its data"):
        read_arrays(packed.getvalue(), "claim.npz")


def test_arrays_come_back_as_numpy_wrote_them() -> None:
    packed = io.BytesIO()
    kept = {"a": np.arange(6.0).reshape(2, 3), "b": np.asfortranarray(np.eye(3)), "c": np.array(["x", "yz"])}
    np.savez_compressed(packed, **kept)
    found = read_arrays(packed.getvalue(), "good.npz")
    assert set(found) == set(kept)
    for name, values in kept.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_table_that_claims_more_than_anyone_measured_is_refused(tmp_path: Path) -> None:
    """Equal values take next to nothing in a packed column: a thousand bytes were read as billions of numbers."""
    polars = pytest.importorskip("polars", reason="no polars: pip install 'wattcast[lab]'")
    polars.DataFrame({"x": polars.repeat(1, 2**25 + 1, eager=True, dtype=polars.Int8)}).write_parquet(
        tmp_path / "rows.parquet"
    )
    with pytest.raises(BadInput, match="at most 33554432 values"):
        read_table(tmp_path / "rows.parquet")


def test_what_has_no_end_or_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device was read until the memory was full; a folder in place of arrays was an internal error."""
    monkeypatch.setattr(energy_samples, "_MOST_BYTE", 2**16)
    monkeypatch.setattr(measured_rows, "_MOST_BYTE", 2**16)
    for read in (EnergySamples.load, energy_samples.read_power_log, read_table, read_own_model):
        with pytest.raises(BadInput):
            read(Path("/dev/zero"))
    (tmp_path / "bundle.yaml").write_bytes(b"{}")
    (tmp_path / "arrays.npz").mkdir()
    with pytest.raises(BadInput, match="a folder"):
        read_bundle(tmp_path)


@pytest.mark.parametrize("config", ["", "[1]", '{"model_type": ', "[" * 100_000])
def test_a_damaged_model_of_ones_own_is_one_sentence(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadInput, match=r"a folder with a config\.json"):
        read_own_model(tmp_path)


def test_a_size_beyond_all_reason_is_refused() -> None:
    """A product of 2^31 cubed was answered: 894,000 years."""
    huge = {"op": "linear", "m": 2**31 - 1, "n": 2**31 - 1, "k": 2**31 - 1, "dtype": "bf16"}
    with pytest.raises(BadInput, match=r"2\^40"):
        parse_workload(json.dumps({"name": "w", "ops": [huge]}).encode(), "w.json")


def test_no_way_leads_to_a_size_beyond_all_reason() -> None:
    """Operators of Python and options of models are bounded as those of files are."""
    product = Linear(2**31 - 1, 2**31 - 1, 2**31 - 1)
    with pytest.raises(BadInput, match=r"2\^40"):
        wattcast.predict(Graph.from_operators("w", [product]), "h200")
    with pytest.raises(BadInput, match=r"2\^40"):
        wattcast.predict("gpt2", "h200", batch=2**31 - 1, seq=1024, force=True)
