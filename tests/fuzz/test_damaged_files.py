"""Damaged and hostile files: every reader answers with a value or one sentence, never with a
traceback.

A normal run tries some dozens of mutations per reader. The nightly run tries 100,000 of each, of
another seed:

    WATTCAST_MUTATIONS=100000 WATTCAST_SEED=2 python -m pytest tests/fuzz
"""

from __future__ import annotations

import contextlib
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
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

import wattcast
from wattcast.calibrate.calibration_rows import read_calibration_rows
from wattcast.control.policy_comparison import read_replay_tables
from wattcast.core import row_tables
from wattcast.core.arrays import read_arrays
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import read_table, write_table
from wattcast.explore.fleet import read_fleet
from wattcast.hardware import load_gpu
from wattcast.hardware.catalogue_reader import parse_gpu, parse_node
from wattcast.lab.campaigns.engine_campaign import read_own_model
from wattcast.lab.campaigns.kernel_campaign import read_listed
from wattcast.lab.counter_models.counter_table import read_counter_table
from wattcast.lab.counter_models.gpmtool_files import (
    read_applications,
    read_measured_programs,
    read_utilisations,
)
from wattcast.lab.counter_models.launch_power import read_launches
from wattcast.lab.counter_models.profiler_counters import read_accelwattch_hw, read_ncu, read_nvprof
from wattcast.lab.fit.engine_records import pack_engine_folders
from wattcast.lab.gpuwattch.architecture import format_xml_architecture, parse_xml_architecture
from wattcast.lab.gpuwattch.component_fit import KernelColumns, read_measured_kernels
from wattcast.lab.gpuwattch.energy_table import format_energy_table, read_energies
from wattcast.lab.gpuwattch.simulated_power import read_clock_steps
from wattcast.lab.gpuwattch.simulator_config import read_simulator_config
from wattcast.lab.gpuwattch.simulator_logs import read_accelsim, read_gem5_stats, read_power_report
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, TraceSampling, dialect_counters
from wattcast.lab.gpuwattch.trace_statistics import read_kernel_list
from wattcast.lab.microbench.microbench_results import read_results
from wattcast.measure import energy_samples, power_logs
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.power_logs import read_power_log
from wattcast.power.component_power import read_mcpat
from wattcast.predictor.bundle import bundle_for, shipped_bundle
from wattcast.predictor.bundle.bundle_file import (
    read_bundle,
    residuals_from_bytes,
    write_bundle,
)
from wattcast.serving.trace_files import read_trace
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import parse_model
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.operator_types import Linear
from wattcast.workload.readers.from_huggingface import parse_huggingface
from wattcast.workload.readers.from_json import parse_workload
from wattcast.workload.readers.from_profiler import parse_profile

MUTATIONS = int(os.environ.get("WATTCAST_MUTATIONS", "16"))
SEED = os.environ.get("WATTCAST_SEED", "29")  # another night draws other damage
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
CONFIG |= {
    "intermediate_size": 128,
    "vocab_size": 100,
    "id2label": {"0": "a"},
    "max_position_embeddings": 64,
}
CONFIG |= {"architectures": ["BertForSequenceClassification"], "torch_dtype": "float32"}
VIT = CONFIG | {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_channels": 3}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA |= {
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1e4},
}
LLAMA |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WORKLOAD = {"name": "w", "ops": [{"op": "linear", "m": 8, "n": 8, "k": 8, "dtype": "bf16"}] * 2}
_ARGS = {
    "grid": [1, 2, 3],
    "block": [128, 1, 1],
    "stream": 7,
    "Input Dims": [[8, 8], [8, 8]],
    "External id": 3,
}
_ARGS |= {
    "Input type": ["float", "float"],
    "Input Strides": [[8, 1], [8, 1]],
    "Concrete Inputs": ["", ""],
}
_CALL = {
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 1,
    "ts": 1.0,
    "dur": 2.0,
    "ph": "X",
    "args": _ARGS,
}
SIMULATOR_LOG = (
    b"kernel_name = a\ngpu_sim_cycle = 100\ngpgpu_n_tot_w_icount = 9\nW1:0\tW32:9\ntotal dram reads = 4\n"
    * 2
)
SIMULATOR_TABLE = b"-" * 100 + b",\ngpu_sim_cycle = (.*),\nAPPS,one,\nk--1,10,\nk--2,20,\n\n"
SIMULATOR_TABLE += b"-" * 100 + b",\ntotal dram reads = (.*),\nAPPS,one,\nk--1,3,\nk--2,4,\n"
GEM5_STATISTICS = b"---------- Begin Simulation Statistics ----------\nsimSeconds 0.001 # s\n"
GEM5_STATISTICS += (
    b"system.cpu3.CUs0.totalCycles 1000 # n\nsystem.cpu3.CUs0.numInstrExecuted 50 # n\n"
)
POWER_REPORT = b"kernel_name = a \nKernel Average Power Data:\nkernel_avg_power = 5\n"
POWER_REPORT += "".join(
    f"gpu_avg_{c.column}, = 1.5\n" for c in dialect_counters(SimulatorDialect.GPUWATTCH)
).encode()
HW_COUNTERS = (
    b"Kernel,L1_RH,L1_RM,L1_WH,L1_WM,CC_ACC,SHRD_ACC,DRAM_Rd,DRAM_Wr,L2_RH,L2_RM,L2_WH,L2_WM,NOC,"
)
HW_COUNTERS += b"Pipeline_Duty,Num_Idle_SMs,Elapsed_Cycles,Chip Voltage\nk,1,2,3,4,5,6,7,8,9,10,11,12,13,0.9,2.5,1000,1.0\n"
NCU = b'"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
NCU += b'"0","first","gpu__time_duration.sum","nsecond","10000"\n"0","first","sm__cycles_elapsed.max","cycle","14,000"\n'
NCU_WIDE = b'==PROF== x\n"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_elapsed.max","sm__inst_executed.sum"\n'
NCU_WIDE += b'"","","usecond","cycle","inst"\n"0","first","10","14,000","300"\n"1","second","20","28000","400"\n'
NVPROF = b'"Device","Kernel","Invocations","Metric Name","Metric Description","Min","Max","Avg"\n'
NVPROF += b'"K20c (0)","void k(float*, int)",3,"inst_fp_32","FP Instructions",900,1100,1000\n'
UTILISATIONS = b"2\n1000,3000\n2,1\nINT,L2,DRAM\n50,800,1000,0,0,0\n85,800,3000,0.5,0.1,0.2\n90,1000,3000,0.1,0.4,0.7\n"
APPLICATIONS = b"2\n1000,3000\n2,1\nINT,L2,DRAM\nidle,0,0,0\na,0.5,0.1,0.2\n"
TEGRASTATS = (
    b"RAM 2020/7852MB CPU [9%@345,off] GR3D_FREQ 0% VDD_SYS_GPU 100/158 VDD_IN 3140/3208\n" * 2
)
DCGM = b"#Entity   POWER    SMCLK\nID        W        MHz\nGPU 0     100.0    1410\nGPU 0     200.0    1410\n"
CONFIGURED = b"-gpgpu_n_clusters 15\n-power_simulation_enabled 1\n-gpuwattch_xml_file gpu.xml\n-steady_state_definition 5:7\n"
MCPAT = b"Processor: \n  Subthreshold Leakage = 12.5 W\n  Gate Leakage = 1.5 W\n\n"
MCPAT += b"  Total Cores: 15 cores \n  Subthreshold Leakage = 9.5 W\n  Gate Leakage = 1.0 W\n\n"
RUNS = b"kernel,watts,part_RFP,part_L2CP\na_k0,21.0,5,20\na_k1,21.7,6,19\nb_k2,22.4,7,18\n"
SITE = b"power: 3 kW\ngpus: {h200: 1, l4: 1}\nworkloads:\n"
SITE += b"  - {name: chat, workload: gpt2, rate: 20/s, options: {batch: 8, seq: 64}}\n"
CLOCKS = b"work\n3505,600,20.0,90.0,1800\n3505,800,15.0,100.0,1500\n3505,1000,12.0,110.0,1320\n"
ARRIVALS = b"arrival_s,prompt_tokens,output_tokens,prefix_id\n0.5,16,4,a\n1.5,32,8,\n"
MEASURED = b"workload,batch,seq,latency_ms,energy_j,clock_mhz\ngpt2,8,128,6.0,1.5,1200\ngpt2,32,512,60,17,1200\n"
COLUMN_MAP = b"benchmark: work\npower: {column: watts, unit: W}\nclock: {column: core, unit: MHz}\n"
COLUMN_MAP += b"memory_clock: {column: memory, unit: MHz}\ndefault: {clock: 1000 MHz, memory_clock: 2000 MHz}\n"
COLUMN_MAP += b"events:\n  int_busy_cycle: {column: int, rate: true}\n"
COUNTED = b"work,watts,core,memory,int\na,30,700,1600,0.1\na,40,1000,2000,0.1\nb,50,1000,2000,0.7\n"
PROFILE = {
    "traceEvents": [_CALL, _CALL | {"cat": "kernel", "name": "gemm"}],
    "deviceProperties": [{"name": "H200"}],
}


def _recording() -> bytes:
    return EnergySamples(np.arange(20.0 * len(COLUMNS)).reshape(20, -1)).to_bytes()


def _arrays() -> bytes:
    packed = io.BytesIO()
    np.savez_compressed(
        packed,
        **{"time.linear.range": np.array([0.5, 2.0]), "time.linear.forest.features": np.eye(3)},
    )
    return packed.getvalue()


def _table(folder: Path) -> bytes:
    write_table(
        folder / "good.parquet",
        [{"id": f"r{i}", "operator": {"op": "linear", "m": i}} for i in range(9)],
    )
    return (folder / "good.parquet").read_bytes()


def _from_file(read: Callable[[Path], Any], path: Path) -> Callable[[bytes], Any]:
    def call(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return call


def make_readers(folder: Path) -> dict[str, tuple[Callable[[bytes], Any], bytes | dict[str, Any]]]:
    """Every reader of files of others with a good file: bytes, or a tree that is mutated and
    encoded as JSON.
    """
    gpu = (Path(__file__).parents[2] / "src/wattcast/hardware/catalogue/h200.yaml").read_bytes()
    return {
        "huggingface": (lambda data: parse_huggingface(data, "config.json"), CONFIG),
        "huggingface pictures": (lambda data: parse_huggingface(data, "config.json"), VIT),
        "huggingface decoder": (lambda data: parse_huggingface(data, "config.json"), LLAMA),
        "workload": (lambda data: parse_workload(data, "w.json"), WORKLOAD),
        "profile": (lambda data: parse_profile(data, "trace.json"), PROFILE),
        "gpu": (lambda data: parse_gpu(data, "mine", "mine.yaml"), gpu),
        "xml": (
            lambda data: parse_xml_architecture(data, "gpu.xml"),
            format_xml_architecture(demo_architecture()),
        ),
        "simulator log": (
            _from_file(lambda path: read_accelsim(path, 1e9), folder / "sim.log"),
            SIMULATOR_LOG,
        ),
        "simulator table": (
            _from_file(lambda path: read_accelsim(path, 1e9), folder / "stats.csv"),
            SIMULATOR_TABLE,
        ),
        "gem5": (_from_file(read_gem5_stats, folder / "stats.txt"), GEM5_STATISTICS),
        "power report": (
            _from_file(
                lambda path: read_power_report(
                    path, SimulatorDialect.GPUWATTCH, {}, TraceSampling(500, 1e9)
                ),
                folder / "report.log",
            ),
            POWER_REPORT,
        ),
        "journal": (
            _from_file(lambda path: list(read_lines(path)), folder / "rows.jsonl"),
            b'{"id":"a","x":[1]}\n' * 3,
        ),
        "recording": (_from_file(EnergySamples.load, folder / "run.npz"), _recording()),
        "bundle": (
            lambda data: residuals_from_bytes(data, bundle_for(load_gpu("h200")).reference),
            _arrays(),
        ),
        "table": (_from_file(read_table, folder / "rows.parquet"), _table(folder)),
        **_make_instrument_readers(folder),
    }


def _make_instrument_readers(
    folder: Path,
) -> dict[str, tuple[Callable[[bytes], Any], bytes | dict[str, Any]]]:
    """The readers of tables and logs that instruments write."""
    source, h200 = Path(__file__).parents[2] / "src/wattcast", load_gpu("h200")
    (folder / "columns.yaml").write_bytes(COLUMN_MAP)
    (folder / "counted.csv").write_bytes(COUNTED)
    operator = {"op": "linear", "m": 8, "n": 8, "k": 8, "dtype": "bf16"}
    micro = (source / "database/h200/microbench.jsonl").read_bytes().splitlines(keepends=True)
    readers: dict[str, tuple[Callable[[Path], Any], bytes | dict[str, Any]]] = {
        "hardware counters": (lambda path: read_accelwattch_hw(path, 1e9), HW_COUNTERS),
        "ncu": (read_ncu, NCU),
        "ncu wide": (lambda path: read_ncu(path, 80.0), NCU_WIDE),
        "nvprof": (read_nvprof, NVPROF),
        "launches": (read_launches, PROFILE),
        "utilisations": (read_utilisations, UTILISATIONS),
        "applications": (read_applications, APPLICATIONS),
        "programs": (read_measured_programs, CLOCKS),
        "column map": (lambda path: read_counter_table(folder / "counted.csv", path), COLUMN_MAP),
        "counters": (lambda path: read_counter_table(path, folder / "columns.yaml"), COUNTED),
        "kernel runs": (
            lambda path: read_measured_kernels(path, KernelColumns("watts", prefix="part_")),
            RUNS,
        ),
        "clock steps": (
            lambda path: read_clock_steps(path, 1e9),
            b"sample,clock,voltage\n0,1 GHz,1 V\n5,1.2 GHz,\n",
        ),
        "kernel list": (
            lambda path: read_kernel_list(path, 500),
            b"name,cycles,ipc\na,1250,10.5\nb,300,\n",
        ),
        "energies": (read_energies, format_energy_table(demo_energies())),
        "simulator options": (read_simulator_config, CONFIGURED),
        "mcpat": (read_mcpat, MCPAT),
        "tegrastats": (lambda path: read_power_log(path, 1.0), TEGRASTATS),
        "dcgm": (lambda path: read_power_log(path, 1.0), DCGM),
        "power table": (read_power_log, b"Time (s);Power (W)\n0.0;10\n2.0;30\n"),
        "fleet": (read_fleet, SITE),
        "clocks": (read_replay_tables, CLOCKS),
        "arrivals": (read_trace, ARRIVALS),
        "measured models": (lambda path: read_calibration_rows(path, h200), MEASURED),
        "operators": (read_listed, operator),
        "microbenchmarks": (read_results, b"".join(micro[:2])),
        "node": (
            lambda path: parse_node(path.read_bytes(), "mine", path.name),
            (source / "hardware/nodes/dgx-a100.yaml").read_bytes(),
        ),
        "model": (
            lambda path: parse_model(path.read_bytes(), path.name, "mine"),
            (source / "workload/catalogue/bert-base.yaml").read_bytes(),
        ),
    }
    return {
        name: (_from_file(read, folder / f"{name}.{'yaml' if name == 'energies' else 'csv'}"), good)
        for name, (read, good) in readers.items()
    }


READERS = (
    "huggingface",
    "huggingface pictures",
    "huggingface decoder",
    "workload",
    "profile",
    "gpu",
    "xml",
    "hardware counters",
    "ncu",
    "ncu wide",
    "nvprof",
    "launches",
    "utilisations",
    "applications",
    "programs",
    "column map",
    "counters",
    "kernel runs",
    "clock steps",
    "kernel list",
    "energies",
    "simulator options",
    "mcpat",
    "tegrastats",
    "dcgm",
    "power table",
    "fleet",
    "clocks",
    "arrivals",
    "measured models",
    "operators",
    "microbenchmarks",
    "node",
    "model",
    "journal",
    "recording",
    "bundle",
    "table",
    "simulator log",
    "simulator table",
    "gem5",
    "power report",
)


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """Replace, drop or double one value somewhere in a tree."""
    if isinstance(tree, dict) and tree and chance.random() < 0.8:
        key = chance.choice(list(tree))
        if chance.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return tree | {key: mutate_tree(tree[key], chance)}
    if isinstance(tree, list) and tree and chance.random() < 0.7:
        place = chance.randrange(len(tree))
        return [
            *tree[:place],
            mutate_tree(tree[place], chance),
            *tree[place + chance.randrange(2) :],
        ]
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
    chance = random.Random(f"{name} {SEED}")
    for number in range(MUTATIONS):
        if isinstance(good, dict) and number % 4:
            tree = mutate_tree(good, chance)
            data = json.dumps(mutate_tree(tree, chance) if chance.random() < 0.3 else tree).encode()
        else:
            data = mutate_bytes(
                json.dumps(good).encode() if isinstance(good, dict) else good, chance
            )
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
    np.lib.format.write_array_header_1_0(
        plain, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    )
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.npy", plain.getvalue())
    with pytest.raises(BadInput, match="size is not that of its data"):
        read_arrays(packed.getvalue(), "claim.npz")


def test_arrays_come_back_as_numpy_wrote_them() -> None:
    packed = io.BytesIO()
    kept = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.asfortranarray(np.eye(3)),
        "c": np.array(["x", "yz"]),
    }
    np.savez_compressed(packed, **kept)
    found = read_arrays(packed.getvalue(), "good.npz")
    assert set(found) == set(kept)
    for name, values in kept.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_damaged_table_prints_nothing_but_its_sentence(tmp_path: Path, capfd) -> None:
    """Threads of polars printed their panics, with a stack each, before the sentence that says what
    is wrong.
    """
    good = _table(tmp_path)
    footer = int.from_bytes(good[-8:-4], "little")
    chance, refused = random.Random(3), 0
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(chance.choice([1, 2, 5])):
            bad[chance.randrange(len(bad) - footer - 8, len(bad))] = chance.randrange(256)
        (tmp_path / "bad.parquet").write_bytes(bad)
        try:
            read_table(tmp_path / "bad.parquet")
        except BadInput:
            refused += 1
    assert refused > 50
    assert capfd.readouterr().err == ""
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_what_others_print_while_a_table_is_read_is_kept(capfd) -> None:
    with row_tables.catch_panics():
        os.write(2, b"of another thread")
    assert capfd.readouterr().err == "of another thread"


def test_a_table_that_claims_more_than_anyone_measured_is_refused(tmp_path: Path) -> None:
    """Equal values take next to nothing in a packed column: a thousand bytes were read as billions
    of numbers.
    """
    polars = pytest.importorskip("polars", reason="no polars: pip install 'wattcast[lab]'")
    polars.DataFrame(
        {"x": polars.repeat(1, 2**25 + 1, eager=True, dtype=polars.Int8)}
    ).write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match="at most 33554432 values"):
        read_table(tmp_path / "rows.parquet")


def test_what_has_no_end_or_is_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device was read until the memory was full; a folder in place of arrays was an internal
    error.
    """
    monkeypatch.setattr(energy_samples, "_MOST_BYTE", 2**16)
    monkeypatch.setattr(power_logs, "MOST_BYTE", 2**16)
    monkeypatch.setattr(row_tables, "_MOST_BYTE", 2**16)
    for read in (EnergySamples.load, power_logs.read_power_log, read_table, read_own_model):
        with pytest.raises(BadInput):
            read(Path("/dev/zero"))
    bundle = shipped_bundle("h200")
    assert bundle is not None
    write_bundle(bundle, tmp_path / "bundle.json")
    (tmp_path / "arrays.npz").unlink()
    (tmp_path / "arrays.npz").mkdir()
    with pytest.raises(BadInput, match="a folder"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("nvprof", b"1100", b"\r100"),
        ("clock steps", b"1 V", b"\r V"),
        ("kernel list", b"300", b"30\x1d"),
        ("launches", b"[1, 2, 3]", b"5"),
    ],
)
def test_rare_damage_gets_a_value_or_a_sentence(
    tmp_path: Path, name: str, old: bytes, new: bytes
) -> None:
    """Some of 20,000 mutations that the normal run does not draw were internal errors."""
    read, good = make_readers(tmp_path)[name]
    data = json.dumps(good).encode() if isinstance(good, dict) else good
    with contextlib.suppress(BadInput):
        assert read(data.replace(old, new)) is not None


@pytest.mark.parametrize("config", ["", "[1]", '{"model_type": ', "[" * 100_000])
def test_a_damaged_model_of_ones_own_is_one_sentence(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadInput, match=r"a folder with a config\.json"):
        read_own_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("runs.jsonl", "{}"),
        ("rows.jsonl", '{"id": {}, "kind": "prefill", "model": "m"}'),
        ("requests.jsonl", '{"run": "m/t"}'),
        ("steps.jsonl", "{}"),
        ("steps.jsonl", '{"run": "m/t", "begin_s": [0.0, 1.0], "device_s": [0.5]}'),
        ("steps.jsonl", '{"run": "m/t", "begin_s": 5}'),
    ],
)
def test_damaged_lines_of_an_engine_are_one_sentence(tmp_path: Path, name: str, line: str) -> None:
    """A key that was missing, or columns of two lengths, were internal errors of ``lab
    pack-engine``.
    """
    (tmp_path / "runs.jsonl").write_text('{"run": "r1"}\n')
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "m/t", "kind": "traffic", "model": "m", "run": "r1"}\n'
    )
    pack_engine_folders([tmp_path], tmp_path / "whole")
    (tmp_path / name).write_text(line + "\n")
    with pytest.raises(BadInput, match=f"{name}: expected"):
        pack_engine_folders([tmp_path], tmp_path / "out")


@pytest.mark.parametrize("name", ["batch", "tp", "dtype", "attention"])
def test_an_option_without_a_value_is_refused(name: str) -> None:
    """``options: {batch: }`` in the file of a fleet was an internal error."""
    with pytest.raises(BadInput, match=name):
        ModelOptions.from_names(**{name: None})


@pytest.mark.parametrize("size", [2**31 - 1, 10**400])
def test_a_size_beyond_all_reason_is_refused(size: int) -> None:
    """A product of 2^31 cubed was answered: 894,000 years. One that no float holds was an internal
    error.
    """
    huge = {"op": "linear", "m": size, "n": size, "k": size, "dtype": "bf16"}
    with pytest.raises(BadInput, match=r"2\^40"):
        parse_workload(json.dumps({"name": "w", "ops": [huge]}).encode(), "w.json")


def test_no_way_leads_to_a_size_beyond_all_reason() -> None:
    """Operators of Python and options of models are bounded as those of files are."""
    product = Linear(2**31 - 1, 2**31 - 1, 2**31 - 1)
    with pytest.raises(BadInput, match=r"2\^40"):
        wattcast.predict(Graph.from_operators("w", [product]), "h200")
    with pytest.raises(BadInput, match=r"2\^40"):
        wattcast.predict("gpt2", "h200", batch=2**31 - 1, seq=1024, force=True)
