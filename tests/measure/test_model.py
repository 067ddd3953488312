"""``measure run --model``: power from the launches a command traced, beside what was measured."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from standin import StandIn, undisturbed
from wattcast.cli.command_output import Environment
from wattcast.cli.main import build_command
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import Provenance
from wattcast.lab.counter_models.launch_power import LaunchKey, read_counter_book, read_launches
from wattcast.power.power_model import SavedModel, save_model
from wattcast.power.rate_power import RatePower

# A program of kernels of 1 ms every 2 ms, which runs for some seconds and writes the trace a
# profiler would.
TRACED = """
import json, sys, time
began_ns, length_s = time.time_ns(), float(sys.argv[2])
time.sleep(length_s)
event = lambda i: dict(ph="X", cat="kernel", name="void scale<float, 4>(float*)", ts=2000.0 * i, dur=1000.0,
                       args=dict(grid=[240, 1, 1], block=[64, 1, 1]))
events = [event(i) for i in range(round(700 * length_s / 1.5))]
json.dump(dict(baseTimeNanoseconds=began_ns, traceEvents=events), open(sys.argv[1], "w"))
"""
KEY = LaunchKey("scale<float,4>", (240, 1, 1), (64, 1, 1))


@pytest.fixture
def files(tmp_path: Path) -> SimpleNamespace:
    """A model of 100 W and 1 nJ an instruction, and the counters of one kernel: 0.4 J a launch."""
    model = RatePower(100.0, {"warp_instruction": 1e-9})
    save_model(SavedModel("made", model, Provenance("made for a test")), tmp_path / "model.yaml")
    write_book(tmp_path / "book.json", KEY, 4e8)
    trace = str(tmp_path / "trace.json")
    return SimpleNamespace(
        model=str(tmp_path / "model.yaml"),
        book=str(tmp_path / "book.json"),
        trace=trace,
        program=(sys.executable, "-c", TRACED, trace),
    )


def write_book(path: Path, key: LaunchKey, instructions: float) -> None:
    counted = vars(key) | {
        "count": {"warp_instruction": instructions},
        "passes": {"warp_instruction": 1},
    }
    path.write_text(json.dumps({"format": 1, "kernels": [counted]}))


def command_line(*arguments: str) -> str:
    env = Environment(io.StringIO(), io.StringIO())
    try:
        code = build_command("measure").main(list(arguments), standalone_mode=False, obj=env)
    except typer.Exit as ended:
        code = ended.exit_code
    assert not code
    return env.stdout.getvalue()


def test_launches_give_the_power_of_the_stretch_that_was_measured(
    standin: StandIn, files: SimpleNamespace, tmp_path: Path
) -> None:
    """Half the time at 500 W and half at 100 W is 300 W, which is what the stand-in draws."""
    figure = tmp_path / "power.png"

    def measure() -> SimpleNamespace:
        out = command_line(
            *("run", "--source", "nvml", "--json", "--plot", str(figure), "--model", files.model),
            *("--counters", files.book, "--launches", files.trace, "--", *files.program, "1.5"),
        )
        found = json.loads(out)["model"]
        return SimpleNamespace(**found, flags=found["measured_flags"])

    found = undisturbed(measure)
    assert found.power_w == pytest.approx(300.0, rel=0.002)
    assert found.measured_w == pytest.approx(300.0, rel=0.02)
    assert found.part_w == {
        "base": pytest.approx(100.0),
        "warp_instruction": pytest.approx(200.0, rel=0.002),
    }
    assert found.known_share == 1.0
    assert found.without_counters == []
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_kernel_without_counters_is_named_and_its_time_left_out(
    standin: StandIn, files: SimpleNamespace
) -> None:
    write_book(Path(files.book), LaunchKey("other", (1, 1, 1), (1, 1, 1)), 1.0)
    out = command_line(
        *(
            "run",
            "--source",
            "nvml",
            "--model",
            files.model,
            "--counters",
            files.book,
            "--launches",
            files.trace,
        ),
        *("--", *files.program, "0.5"),
    )
    assert "over the 50 % of" in out
    assert "1 kernel lacks counters, the first: scale<float,4> grid (240, 1, 1)" in out


def test_what_is_missing_is_said_before_the_command_runs(files: SimpleNamespace) -> None:
    with pytest.raises(BadInput, match="--counters FILE"):
        command_line("run", "--model", files.model, "--", "false")
    with pytest.raises(BadInput, match="--launches FILE"):
        command_line("run", "--model", files.model, "--counters", files.book, "--", "false")
    with pytest.raises(BadInput, match="--model FILE"):
        command_line("run", "--counters", files.book, "--", "false")


def test_an_export_of_ncu_becomes_a_book_keyed_by_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    head = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'
    metrics = {
        "gpu__time_duration.sum": ("nsecond", "1,000"),
        "sm__cycles_elapsed.max": ("cycle", "1,800"),
    }
    lines = [
        f'"{i}","void scale<float, 4>(float *)","(64, 1, 1)","({grid}, 1, 1)","{name}","{unit}","{value}"'
        for i, grid in enumerate((240, 480))
        for name, (unit, value) in metrics.items()
    ]
    path.write_text("\n".join([head, *lines]) + "\n")
    book = read_counter_book(path)
    assert set(book.count) == {KEY, LaunchKey("scale<float,4>", (480, 1, 1), (64, 1, 1))}
    assert book.count[KEY]["core_cycle"] == 1800.0


def test_bad_traces_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "dur": 1}]}))
    with pytest.raises(BadInput, match=r"expected kernels.*cpu_op"):
        read_launches(path)
    path.write_text(
        json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": 1.0, "args": {}}]}
        )
    )
    with pytest.raises(BadInput, match="grid and block"):
        read_launches(path)
    path.write_bytes(gzip.compress(path.read_bytes())[:-9])
    with pytest.raises(BadInput, match="not a whole gzip"):
        read_launches(path)


def test_counters_that_are_not_there_are_collected_once(
    standin: StandIn, files: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in ncu runs the command and leaves a table; the next run finds it and does not call
    ncu again.
    """
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text(NCU.format(python=sys.executable, calls=tmp_path / "calls"))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    arguments = (
        *(
            "run",
            "--source",
            "nvml",
            "--model",
            files.model,
            "--counters",
            str(tmp_path / "new.csv"),
            "--launches",
        ),
        *(files.trace, "--", *files.program, "0.1"),
    )
    first, second = command_line(*arguments), command_line(*arguments)
    assert "have no counters" not in first + second
    assert (tmp_path / "calls").read_text().count("--clock-control none --cache-control none") == 1


NCU = """#!{python}
import subprocess, sys
if "--query-metrics" in sys.argv:
    print("gpu__time_duration  time\\nsm__cycles_elapsed  cycles\\nsm__inst_executed  instructions")
    raise SystemExit
open("{calls}", "a").write(" ".join(sys.argv) + "\\n")
names = sys.argv[sys.argv.index("--metrics") + 1].split(",")
value = dict.fromkeys(names, "4e8")
head = ["ID", "Kernel Name", "Block Size", "Grid Size", *names]
rows = [["", "", "", "", *("" for n in names)], ["0", "void scale<float, 4>(float*)", "(64, 1, 1)", "(240, 1, 1)"]]
rows[1] += value.values()
text = "\\n".join(",".join('"' + cell + '"' for cell in row) for row in [head, *rows])
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write(text + "\\n")
raise SystemExit(subprocess.call(sys.argv[sys.argv.index({python!r}):]))
"""
