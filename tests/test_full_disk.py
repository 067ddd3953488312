"""A full or failing disk at every write of every command that writes: an exit code, a sentence, and
the old files.

In the normal run the Nth fsync of some commands fails. With ``-m slow`` every command runs below
``failing_disk.c``, where any call of the C library that writes may fail, those of polars and
pyarrow too."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path
from typing import Protocol

import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from wattcast.cli.main import walk_commands
from wattcast.core.row_tables import read_table
from wattcast.hardware import load_gpu
from wattcast.lab.fit import database_fit
from wattcast.lab.fit.database_fit import shipped_held_out
from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.energy_table import format_energy_table
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.lab.validate import ledger
from wattcast.lab.validate.kernel_checks import kernel_rows
from wattcast.predictor.bundle import bundle_for
from wattcast.report import figure_style

PREDICT = ("gpt2", "--gpu", "h100-sxm", "--batch", "1", "--seq", "64")
TRACE = ("metric.log", "--config", "chip.xml", "--energies", "table.yaml", "--sample-cycles", "500")
COUNTERS = (
    "lab",
    "fit",
    "counters",
    "counters.csv",
    "--columns",
    "columns.yaml",
    "--folds",
    "3",
    "--no-advice",
)
SIMULATE = (
    "gpt2",
    "--gpu",
    "h100-sxm",
    "--rate",
    "4/s",
    "--seconds",
    "1",
    "--prompt",
    "16",
    "--output",
    "4",
)
COMMANDS = {
    "plot": ("predict", *PREDICT, "--plot", "out/plot.svg"),
    "compare plot": ("compare", "gpt2@h200,seq=64", "@h100-sxm", "--plot", "out/plot.svg"),
    "export": ("export", "grafana", "--out", "out/board.json"),
    "designs": (
        "explore",
        "designs",
        *PREDICT,
        "--vary",
        "sm_count=66,132",
        "--out",
        "out/designs.parquet",
    ),
    "designs csv": (
        "explore",
        "designs",
        *PREDICT,
        "--vary",
        "sm_count=66,132",
        "--out",
        "out/designs.csv",
    ),
    "designs plot": (
        "explore",
        "designs",
        *PREDICT,
        "--vary",
        "sm_count=66,132",
        "--plot",
        "out/plot.svg",
    ),
    "sweep plot": (
        "explore",
        "sweep",
        *PREDICT,
        "--vary",
        "clock=900MHz,1200MHz",
        "--plot",
        "out/plot.svg",
    ),
    "fleet plot": ("explore", "fleet", "site.yaml", "--plot", "out/plot.svg"),
    "export table": ("manage", "simulate", "--export", "out/table.csv"),
    "manage plot": ("manage", "simulate", "--plot", "out/plot.svg"),
    "manage figures": ("manage", "simulate", "--figures", "out", "--format", "svg"),
    "replay plot": ("manage", "replay", "clocks.csv", "--plot", "out/plot.svg"),
    "replay figures": ("manage", "replay", "clocks.csv", "--figures", "out", "--format", "svg"),
    "simulate": ("simulate", *SIMULATE, "--out", "out/requests.parquet"),
    "simulate plot": ("simulate", *SIMULATE, "--plot", "out/plot.svg"),
    "plan plot": (
        *("plan", "gpt2", "--rate", "2/s", "--prompt", "16", "--output", "4", "--gpu", "h100-sxm"),
        *("--plot", "out/plot.svg"),
    ),
    "train plot": (
        "train",
        "gpt2",
        "--gpu",
        "h100-sxm",
        "--gpus",
        "2",
        "--tokens",
        "1B",
        "--plot",
        "out/plot.svg",
    ),
    "pack": ("lab", "pack", "campaign", "--out", "out"),
    "pack engine": ("lab", "pack-engine", "engine", "--out", "out"),
    "workload": ("models", "save", "gpt2", "out/workload.json", "--seq", "64"),
    "energies": ("gpus", "show", "chip.xml", "--energies", "--save", "out/energies.yaml"),
    "chip plot": ("gpus", "show", "chip.xml", "--energies", "--plot", "out/plot.svg"),
    "microbench": ("lab", "microbench", "--show", "h200", "--write", "out/page.md"),
    "microbench plot": ("lab", "microbench", "--show", "h200", "--plot", "out/plot.svg"),
    "microbench figures": (
        "lab",
        "microbench",
        "--show",
        "h200",
        "--figures",
        "out",
        "--format",
        "svg",
    ),
    "microbench table": ("lab", "microbench", "--show", "h200", "--table", "out/table.csv"),
    "counters": (*COUNTERS, "--out", "out/model.yaml"),
    "counters plot": (*COUNTERS, "--plot", "out/plot.svg"),
    "counters figures": (*COUNTERS, "--figures", "out", "--format", "svg"),
    "component": (
        *(
            "lab",
            "fit",
            "component",
            "runs.csv",
            "--measured",
            "watts",
            "--prefix",
            "part_",
            "--duration",
            "seconds",
        ),
        *("--architecture", "chip.xml", "--out", "out/new.xml"),
    ),
    "accelwattch": (
        "lab",
        "accelwattch",
        "h200",
        "--out",
        "out/h200.xml",
        "--energies",
        "out/h200.yaml",
    ),
    "sensitivity": ("lab", "sensitivity", "kernels.csv", "--out", "out/model.yaml"),
    "page": ("lab", "side-by-side", "h200", "--kernels", "8", "--page", "out/page.md"),
    "check energies": ("lab", "check-energies", "--plot", "out/plot.svg"),
    "trace": ("lab", "power-trace", *TRACE, "--out", "out"),
    "trace plot": ("lab", "power-trace", *TRACE, "--out", "out", "--plot", "out/plot.svg"),
    "trace chip": ("lab", "power-trace", *TRACE, "--out", "out", "--save-config", "out/chip.xml"),
    "calibrate": ("calibrate", "--gpu", "a100-sxm", "rows.csv", "--out", "out"),
    "host": ("lab", "fit", "host", "host.csv", "--gpu", "h200", "--out", "out"),
    "engine": ("lab", "fit", "engine", "h200/engine", "--gpu", "h200", "--out", "out"),
    "kernels": ("lab", "fit", "kernels", "h200", "--gpu", "h200", "--out", "out"),
    "suggest": ("lab", "kernels", "--suggest", "2", "--out", "out"),
    "ledger": ("lab", "validate", "--write", "out/ledger.md"),
    "ledger files": (
        *("lab", "validate", "--explain", "h200 engine decode, held-out models, board told"),
        *("--files", "out/files"),
    ),
    "ledger plot": ("lab", "validate", "--plot", "out/plot.svg"),
    "ledger figures": ("lab", "validate", "--figures", "out", "--format", "svg"),
    "report": ("report", *PREDICT, "--out", "out/report.html"),
    "predict power": ("predict", *PREDICT, "--power-out", "out/power.csv"),
    "simulate power": ("simulate", *SIMULATE, "--power-out", "out/power.parquet"),
    "train job": (
        *("train", "gpt2", "--gpu", "h100-sxm", "--gpus", "2", "--tokens", "1M"),
        "--write",
        "out/job.json",
    ),
    "train power": (
        *("train", "gpt2", "--gpu", "h100-sxm", "--gpus", "2", "--tokens", "1M"),
        *("--power-out", "out/power.csv"),
    ),
    "plan files": (
        *("plan", "gpt2", "--rate", "2/s", "--prompt", "16", "--output", "4", "--gpu", "h100-sxm"),
        *("--write", "out"),
    ),
    "dynamo": (
        *("export", "dynamo", "graph.yaml", "--limits", "decode=350W"),
        *("--out", "out/graph.yaml"),
    ),
    "hall": ("hall", "hall.yaml", "--span", "10min", "--out", "out"),
    "hall plot": ("hall", "hall.yaml", "--span", "10min", "--plot", "out/plot.svg"),
    "kernel plot": (
        *("lab", "kernel", "linear", "512x512x512", "--gpu", "h200"),
        *("--plot", "out/plot.svg"),
    ),
    "apply plot": (
        *("lab", "apply", "counters.csv", "--model", "model.yaml", "--columns", "columns.yaml"),
        *("--plot", "out/plot.svg"),
    ),
}
QUICK = ("plot", "export", "designs", "simulate", "pack", "pack engine", "workload", "energies")
BEFORE = b"what stood there before <!-- wattcast lab side-by-side h200 -->"
WRITES = (
    "--out",
    "--save",
    "--save-config",
    "--write",
    "--plot",
    "--figures",
    "--export",
    "--page",
    "--rows",
    "--files",
    "--power-out",
)
# They need the trace of a run, a service or a card; what they write goes through the functions of
# others.
NEED_A_RUN = {("lab estimate", "--plot"), ("check", "--rows"), ("manage rehearse", "--out")}
# other options that take a path; two write where another command reads, and stand in the table
READS = (
    *(
        "--architecture",
        "--base",
        "--bottom-up",
        "--bundle",
        "--busy",
        "--columns",
        "--components",
        "--config",
        "--counters",
        "--log",
        "--source",
    ),
    *(
        "--done",
        "--dvfs",
        "--energies",
        "--from",
        "--hall",
        "--jobs",
        "--kernels",
        "--launches",
        "--leakage",
        "--measured",
        "--model",
    ),
    *(
        "--own",
        "--plan",
        "--pods",
        "--power-file",
        "--predict",
        "--profile",
        "--published",
        "--progress",
        "--ran-with",
        "--reference",
        "--replay",
        "--results",
    ),
    *(
        "--sensitivity",
        "--simulator-config",
        "--socket",
        "--table",
        "--trace",
        "--units",
        "--workloads",
    ),
)
JOURNALS = {  # commands that measure: they need a card, and write through a campaign or its samples
    **dict.fromkeys(
        (
            "lab counters",
            "lab kernels",
            "lab microbench",
            "lab multimedia",
            "measure engine",
            "measure models",
        ),
        "tests/measure/test_campaign.py::test_a_disk_that_fails_at_any_write_leaves_whole_rows",
    ),
    "measure sensor": "tests/measure/test_run.py::test_a_disk_that_takes_nothing_leaves_the_measurement_printed",
    "measure run": "tests/measure/test_run.py::test_samples_that_cannot_be_saved_go_beside_and_the_result_is_printed",
    "manage run": "tests/control/test_live_control.py::test_rows_that_cannot_be_saved_leave_the_old_ones",
}


def test_every_option_that_writes_is_tried() -> None:
    """A command that is added with an option that writes a file fails here until it stands in the
    table above.
    """
    for place in JOURNALS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parent.parent / file).read_text(encoding="utf-8")
    tried = [(" ".join(argv), set(argv)) for argv in COMMANDS.values()]
    for words, command in walk_commands():
        for option in command.params:
            name = option.opts[0]
            assert (
                not (name.startswith("--") and "Path" in type(option.type).__name__)
                or name in WRITES + READS
            ), name
            if (words, name) in NEED_A_RUN:
                continue
            if name in WRITES and (
                words not in JOURNALS
                or (name != "--out" and words not in ("measure run", "manage run"))
            ):
                assert any(line.startswith(words) and name in argv for line, argv in tried), (
                    f"{words} {name}"
                )


@pytest.fixture
def without_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes before anything is written is taken as it ships, and figures are not
    encoded.
    """
    monkeypatch.setattr(
        figure_style,
        "encode_figure",
        lambda figure, _: f"<svg>{len(figure.axes)} axes</svg>".encode(),
    )
    shipped = bundle_for(load_gpu("h200"))
    monkeypatch.setattr(
        database_fit, "fit_kernel_database", lambda *_: (shipped, shipped_held_out("h200"))
    )
    monkeypatch.setattr(database_fit, "fit_engine_database", lambda *_: shipped)
    monkeypatch.setattr(
        ledger, "build_ledger", lambda *_, **__: kernel_rows(shipped_held_out("h200"), "h200")
    )


def _campaign(folder: Path) -> None:
    folder.mkdir()
    rows = [
        {"record": "run", "run": "r1", "date": "2026-11-16T00:00:00+00:00"},
        {
            "record": "row",
            "id": "burst-1",
            "run": "r1",
            "kind": "burst",
            "family": "linear",
            "latency_s": 1e-5,
        }
        | {"operator": {"op": "linear", "m": 8, "n": 8, "k": 8}},
        {
            "record": "model",
            "id": "m1",
            "run": "r1",
            "model": "gpt2",
            "phase": "prefill",
            "batch": 1,
            "dtype": "bf16",
        }
        | {"attention": "flash", "stack": "eager", "graph": False},
        {
            "record": "chain",
            "id": "c1",
            "run": "r1",
            "name": "x",
            "specs": ["a"],
            "alone_s": [1e-6],
        },
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _instruments(folder: Path) -> None:
    """Files that commands of instruments read: a chip with its energies and a trace, counters,
    measured models.
    """
    write_architecture(demo_architecture(), folder / "chip.xml")
    (folder / "table.yaml").write_bytes(format_energy_table(demo_energies()))
    columns = [c.column for c in dialect_counters(SimulatorDialect.GPUWATTCH)]
    rows = ["".join(f"{1.0 + 0.01 * i + j:f}," for j in range(len(columns))) for i in range(6)]
    (folder / "metric.log").write_text("\n".join([",".join(columns), *rows]) + "\n")
    (folder / "columns.yaml").write_text(
        "benchmark: work\npower: {column: watts, unit: W}\nclock: {column: core, unit: MHz}\n"
        "memory_clock: {column: memory, unit: MHz}\ndefault: {clock: 1000 MHz, memory_clock: 2000 MHz}\n"
        "events:\n  int_busy_cycle: {column: int, rate: true}\n  dram_busy_cycle: {column: dram, rate: true}\n"
    )
    counted = ["work,watts,core,memory,int,dram"]
    for i in range(48):
        core, memory, integer, dram = (
            700 + 100 * (i % 4),
            1600 + 400 * (i % 3 % 2),
            i % 7 / 10,
            i % 5 / 8,
        )
        counted.append(
            f"b{i % 12},{30 + core * (0.05 + 0.1 * integer) + memory * 0.03 * dram},{core},{memory},{integer},{dram}"
        )
    (folder / "counters.csv").write_text("\n".join(counted) + "\n")
    names = [
        "workload",
        "batch",
        "seq",
        "attention",
        "head",
        "latency_ms",
        "energy_j",
        "clock_mhz",
        "temperature_c",
    ]
    models = [
        ["gpt2", 8, 128, "eager", "none", 6.0, 1.5, 1200, 45],
        ["gpt2", 32, 512, "eager", "none", 60, 17, 1200, 45],
    ]
    (folder / "rows.csv").write_text(
        "\n".join(",".join(map(str, row)) for row in [names, *models]) + "\n"
    )
    watts = [
        f"app{i % 5}_k{i},{1.4 * (5 + i) + 0.7 * (20 - i)},0.001,{5 + i},{20 - i}"
        for i in range(15)
    ]
    (folder / "runs.csv").write_text(
        "\n".join(["kernel,watts,seconds,part_RFP,part_L2CP", *watts]) + "\n"
    )
    clocks = [(core, 12000 / core, 60 + core / 20) for core in range(600, 1201, 50)]
    lines = [f"3505,{core},{ms:.6f},{watts:.6f},{ms * watts:.6f}" for core, ms, watts in clocks]
    (folder / "clocks.csv").write_text("\n".join(["work", *lines]) + "\n")
    (folder / "host.csv").write_text(
        "model,batch,seq,phase,latency_s\ngpt2,1,64,prefill,2.9 ms\nbert-large,1,64,forward,5.1 ms\n"
    )
    (folder / "graph.yaml").write_text(
        "apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeployment\nmetadata: {name: llama}\n"
        "spec:\n  components:\n    - {name: Worker, type: decode, podTemplate: {metadata: {}}}\n"
    )
    (folder / "hall.yaml").write_text(
        "hours: 1\ngroups:\n  - {name: spare, system: dgx-h100, racks: 2, idle: cold}\n"
        "  - {name: work, system: dgx-h100, racks: 1, train: {model: gpt2}}\n"
    )
    (folder / "site.yaml").write_text(
        "power: 3 kW\ngpus: {h200: 1, l4: 1}\nworkloads:\n"
        "  - {name: chat, workload: gpt2, rate: 20/s, options: {batch: 8, seq: 64}}\n"
    )


def _engine(folder: Path) -> None:
    folder.mkdir()
    (folder / "runs.jsonl").write_text('{"run": "r1", "card_uuid": "GPU-1"}\n')
    step = {
        "id": "m/a",
        "kind": "prefill",
        "model": "m",
        "run": "r1",
        "held_out": False,
        "latency_s": 1,
        "flags": [],
    }
    traffic = {"id": "m/t", "kind": "traffic", "model": "m", "run": "r1", "ttft_s": {"p50": 0.25}}
    (folder / "rows.jsonl").write_text(f"{json.dumps(step)}\n{json.dumps(traffic)}\n")
    (folder / "requests.jsonl").write_text('{"run": "m/t", "number": 0, "arrival_s": 0.5}\n')
    (folder / "steps.jsonl").write_text(
        '{"run": "m/t", "begin_s": [0.0, 1.0], "device_s": [null, 0.5]}\n'
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".wattcast.lock"
    }


class FailingDisk(Protocol):
    """A disk whose Nth call that writes fails; call 0 is none, and they are counted."""

    def disk_fails_at(self, call: int, error: int) -> None: ...

    def disk_calls(self) -> int: ...


class FailingSync:
    """A disk that fails where files are synchronised, as every file is before it takes its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._count_or_fail)

    def disk_fails_at(self, call: int, error: int) -> None:
        self._calls, self._fails_at, self._error = 0, call, error

    def disk_calls(self) -> int:
        return self._calls

    def _count_or_fail(self, fd: int) -> None:
        self._calls += 1
        if self._calls == self._fails_at:
            raise OSError(self._error, os.strerror(self._error))
        self._fsync(fd)


BELOW = "WATTCAST_FAILING_DISK"  # names the library below which this process runs


def list_faults(calls: int) -> list[tuple[int, int]]:
    """Return which call fails with which error: each with both below the library, by turns without.

    Both errors are raised by the same call, so that by day either will do.
    """
    numbers = range(1, calls + 1)
    errors = (errno.ENOSPC, errno.EIO)
    if BELOW in os.environ:
        return list(product(numbers, errors))
    return list(zip(numbers, cycle(errors), strict=False))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    failing = ctypes.CDLL(os.environ[BELOW]) if BELOW in os.environ else FailingSync(monkeypatch)
    failing.disk_fails_at(0, 0)
    return failing


@pytest.mark.parametrize("name", COMMANDS if BELOW in os.environ else QUICK)
def test_the_nth_write_may_fail(
    name: str,
    call,
    without_fits,
    disk: FailingDisk,
    request,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``measure kernels`` exited with 0 after a traceback, and half a table stood where a whole one
    had been.
    """
    monkeypatch.chdir(tmp_path)
    _campaign(tmp_path / "campaign")
    _engine(tmp_path / "engine")
    _instruments(tmp_path)
    if name == "check energies":
        monkeypatch.setenv("WATTCAST_REFERENCE", str(request.getfixturevalue("reference")))
    if name == "sensitivity":
        assert call("manage", "simulate", "--export", "kernels.csv").code == 0
    if name == "apply plot":
        assert call(*COUNTERS, "--out", "model.yaml").code == 0
    out = tmp_path / "out"
    out.mkdir()
    if name == "page":
        (out / "page.md").write_bytes(BEFORE)
    assert call(*COMMANDS[name]).code == 0
    whole = _files(out)
    old = whole if name.startswith("pack") else dict.fromkeys(whole, BEFORE)

    def run(fails_at: int, error: int):
        shutil.rmtree(out)
        for path, data in old.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_bytes(data)
        disk.disk_fails_at(fails_at, error)
        return call(*COMMANDS[name]), disk.disk_calls()

    found, calls = run(0, 0)
    assert found.code == 0 < calls
    around = {path for path in tmp_path.rglob("*") if out not in path.parents}
    for fails_at, error in list_faults(calls):
        found, _ = run(fails_at, error)
        assert {path for path in tmp_path.rglob("*") if out not in path.parents} == around
        after = {path: data for path, data in _files(out).items() if ".parts/" not in path}
        if found.code == 0:  # the folder could not be synchronised: the file itself is there, whole
            assert set(after) == set(whole)
            assert not [path for path in old if after[path] == old[path] != whole[path]]
            continue
        assert "internal error" not in found.err
        assert "Traceback" not in found.err
        assert "No space left" in found.err or "Input/output error" in found.err
        assert set(after) == set(old)
        for path, data in after.items():
            unchanged = data == old[path]
            assert unchanged or (
                read_table(out / path) if path.endswith(".parquet") else data == whole[path]
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_any_call_that_writes_may_fail(name: str, tmp_path: Path) -> None:
    """A trace whose files could not be opened left hidden ones beside them."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    library = str(tmp_path / "failing_disk.so")
    source = str(Path(__file__).parent / "standin" / "failing_disk.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"],
        check=True,
    )
    below = os.environ | {"LD_PRELOAD": library, BELOW: library}
    one = f"{__file__}::test_the_nth_write_may_fail[{name}]"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", one]
    done = subprocess.run(argv, env=below, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "1 passed" in done.stdout or "1 skipped" in done.stdout
