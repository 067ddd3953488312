"""The command line as a user meets it: results to stdout, the rest to stderr, one paragraph on a
mistake.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from wattcast import __version__
from wattcast.cli import check_commands
from wattcast.core.errors import ExitCode, Refused
from wattcast.core.strict_files import read_shipped_table
from wattcast.predictor.prediction_json import PredictOut

ROOT = Path(__file__).resolve().parent.parent
LLAMA = ("predict", "llama3-8b", "--gpu", "gh200", "--batch", "8", "--seq", "1024")
OPS = {
    "name": "tiny",
    "ops": [{"op": "linear", "m": 512, "n": 512, "k": 512, "dtype": "bf16", "count": 4}],
}


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(OPS))
    return str(path)


def test_predict_prints_the_promised_schema(call) -> None:
    done = call(*LLAMA, "--json")
    assert done.code == 0
    assert done.err == ""
    out = msgspec.json.decode(done.out, type=PredictOut)
    assert out.wattcast == __version__
    (p,) = out.predictions
    assert p.gpu == "gh200"
    assert p.energy_j == pytest.approx(p.power_w * p.latency_s)
    assert p.interval.latency_s[0] <= p.latency_s <= p.interval.latency_s[1]
    assert p.memory_byte > 8e9 * 2
    assert p.fits is True
    assert sum(m.power_w for m in p.modules) == pytest.approx(p.power_w)
    assert not p.support.inside
    assert "no measurement of the gh200" in " ".join(p.assumptions)


def test_text_output_says_that_a_gpu_is_forecast(call) -> None:
    done = call(*LLAMA)
    assert done.code == 0
    assert "forecast, not measured" in done.out
    assert "latency" in done.out


def test_all_public_operator_lists_in_one_call_and_in_order(call, reference: Path) -> None:
    files = sorted((reference / "energaizer" / "workloads").glob("*.json"))
    assert len(files) == 90
    done = call(
        "predict", *map(str, files), "--gpu", "a100-pcie-40gb", "--clock", "900MHz", "--json"
    )
    assert done.code == 0
    out = msgspec.json.decode(done.out, type=PredictOut)
    assert [p.name for p in out.predictions] == [f.stem for f in files]
    assert all(p.latency_s > 0 and p.power_w > 40 for p in out.predictions)


def test_ninety_lists_take_at_most_ten_times_one(reference: Path) -> None:
    files = [str(f) for f in sorted((reference / "energaizer" / "workloads").glob("*.json"))]

    def seconds(chosen: list[str]) -> float:
        start = os.times()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "wattcast",
                "predict",
                *chosen,
                "--gpu",
                "a100-pcie-40gb",
                "--json",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system

    one = min(seconds([files[0]]) for _ in range(3))
    assert any(seconds(files) <= 10 * one for _ in range(3)), (
        "other work on the machine slows a run, not all"
    )


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("predict", "llama3-8b", "--gpu", "h10-sxm"), ExitCode.BAD_INPUT, "Closest: h100-sxm"),
        (("predict", "lama3-8b", "--gpu", "h200"), ExitCode.BAD_INPUT, "Closest: llama3-8b"),
        (("predict", "llama3-8b", "--gpu", "h200", "--batch", "-3"), ExitCode.BAD_INPUT, "batch"),
        (("predict", "llama3-8b", "--gpu", "h200", "--batch", "0"), ExitCode.BAD_INPUT, "batch"),
        (("predict", "llama3-8b", "--gpu", "h200", "--seq", "0"), ExitCode.BAD_INPUT, "seq"),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--dtype", "fp61"),
            ExitCode.BAD_INPUT,
            "unknown dtype",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--clock", "1830"),
            ExitCode.BAD_INPUT,
            "1830 MHz",
        ),
        (("predict", "llama3-8b", "--gpu", "h200", "--clock", "500W"), ExitCode.BAD_INPUT, "Hz"),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--clock", "9GHz"),
            ExitCode.BAD_INPUT,
            "1.98 GHz",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--power-limit", "nanW"),
            ExitCode.BAD_INPUT,
            "power_limit",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--power-limit", "-5W"),
            ExitCode.BAD_INPUT,
            "power_limit",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--host-launch", "-1us"),
            ExitCode.BAD_INPUT,
            "host_launch",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--data", "prime"),
            ExitCode.BAD_INPUT,
            "random",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--phase", "dream"),
            ExitCode.BAD_INPUT,
            "prefill",
        ),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--temperature", "400C"),
            ExitCode.BAD_INPUT,
            "temperature",
        ),
        (("predict", "absent.json", "--gpu", "h200"), ExitCode.BAD_INPUT, "cannot be read"),
        (("predict", "llama3-8b", "--gpu", "absent.yaml"), ExitCode.BAD_INPUT, "cannot be read"),
        (
            ("predict", "llama3-8b", "--gpu", "h200", "--plot", "figure.xcf"),
            ExitCode.BAD_INPUT,
            ".png",
        ),
        (("predict", "llama3-8b"), ExitCode.BAD_INPUT, "--gpu"),
        (("predict", "llama3-8b", "--gpu", "h200", "--batch", "many"), ExitCode.BAD_INPUT, "batch"),
        (("predict", "llama3-8b", "--gpu", "h200", "--colour"), ExitCode.BAD_INPUT, "--colour"),
        (("prdict",), ExitCode.BAD_INPUT, "Closest: predict"),
        (("gpus", "show", "h300"), ExitCode.BAD_INPUT, "Closest: h200"),
    ],
)
def test_a_mistake_gets_one_paragraph(
    call, tmp_path: Path, monkeypatch, argv, code: ExitCode, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*argv)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.err.count("\n") <= 2
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"name": "x", "ops": [{"op": "linear", "m": -4, "n": 4, "k": 4}]}', "ops[0]: linear.m"),
        (b'{"name": "x", "ops": [{"op": "linear", "m": 4, "n": 4}]}', "missing required field `k`"),
        (
            b'{"name": "x", "ops": [{"op": "linear", "m": 4, "n": 4, "k": 4, "dtype": "bf17"}]}',
            "bf17",
        ),
        (b'{"name": "x", "ops": [{"op": "linear", "m": 4, "n": 4, "k": NaN}]}', "not valid JSON"),
        (b'{"name": "x", "ops": [{"op": "lnear"}]}', "Closest: linear"),
        (b'{"name": "x", "ops": []}', "at least one operator"),
        (b'{"name": "x", "ops": [{"op": "gelu", "n": 4', "not valid JSON"),
        (b"[" * 100_000, "nest"),
        (b'[[{"dim": 4, "op": "wiggle", "prec": "bf16"}, ["elementwise"]]]', "wiggle"),
        (
            b'[[{"batch": 1, "dimM": 0, "dimN": 2, "dimK": 2, "precM": "bf16"}, ["gemm"]]]',
            "linear.n",
        ),
    ],
)
def test_a_bad_workload_file_is_explained(call, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = call("predict", str(path), "--gpu", "h200")
    assert done.code == ExitCode.BAD_INPUT
    assert says in done.err
    assert "bad.json" in done.err
    assert done.out == ""


def test_operands_and_limits_change_the_answer(call, workload: str) -> None:
    def power(*options: str) -> tuple[float, float]:
        done = call(*LLAMA, "--json", *options)
        assert done.code == 0, done.err
        p = msgspec.json.decode(done.out, type=PredictOut).predictions[0]
        return p.power_w, p.latency_s

    base_w, base_s = power("--clock", "1200MHz")
    assert power("--clock", "1200MHz", "--data", "zeros")[0] < base_w
    assert power("--clock", "1200MHz", "--temperature", "80C")[0] > base_w
    assert power("--clock", "1500MHz")[1] < base_s
    assert power("--power-limit", "400W")[0] == pytest.approx(400.0, rel=1e-3)
    assert power("--clock", "1200MHz", "--host-launch", "1ms")[1] > base_s


def test_a_workload_file_and_a_list_of_models(call, workload: str) -> None:
    done = call("predict", workload, "--gpu", "h200", "--host-launch", "0us")
    assert done.code == 0
    assert "tiny" in done.out
    done = call("predict", "gpt2", "llama3-8b", "--gpu", "h200", "--seq", "128")
    assert done.code == 0
    assert "2 workloads" in done.out


def test_model_options_beside_an_operator_list_are_refused(call, workload: str) -> None:
    done = call("predict", workload, "--gpu", "h200", "--batch", "4")
    assert done.code == ExitCode.BAD_INPUT
    assert "states its own sizes" in done.err


def test_plot_writes_a_figure(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.pdf"
    done = call(*LLAMA, "--plot", str(path))
    assert done.code == 0, done.err
    assert path.read_bytes().startswith(b"%PDF")
    assert str(path) in done.err


def test_gpus_doctor_and_version(call) -> None:
    listed = json.loads(call("gpus", "--json").out)["gpus"]
    assert {gpu["name"] for gpu in listed} >= {"h200", "rtx-4090", "hd-7970"}
    shown = json.loads(call("gpus", "show", "L40S", "--json").out)
    bandwidth = next(n for n in shown["numbers"] if n["field"] == "memory.byte_per_s")
    assert bandwidth["value"] == 864e9
    assert any("846" in value for value, _ in bandwidth["disputed"])
    checks = json.loads(call("doctor", "--json").out)["checks"]
    assert {c["name"] for c in checks} >= {"base", "extra plot", "NVIDIA driver", "ncu", "chromium"}
    assert call("--version").out == f"wattcast {__version__}\n"
    for argv in (("gpus",), ("doctor",), ("gpus", "show", "h200"), ("--help",), ()):
        done = call(*argv)
        assert done.code == 0
        assert done.out


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("wattcast pre", "predict"),
        ("wattcast predict --gpu h1", "h100-sxm"),
        ("wattcast predict llama3", "llama3-8b"),
    ],
)
def test_the_shell_completes_commands_gpus_and_models(words: str, offers: str) -> None:
    variables = os.environ | {
        "_WATTCAST_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'wattcast'; from wattcast.cli.main import entry; entry()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert offers in done.stdout.split()


def test_doctor_knows_every_extra_and_what_is_missing(call, monkeypatch) -> None:
    """What pyproject.toml lists is what doctor looks for; hints name extras, never single packages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    looked_for = {
        row["extra"]: row["libraries"] for row in read_shipped_table("wattcast.cli", "extras.csv")
    }
    assert set(looked_for) == set(extras) - {"dev", "all"}
    for extra, libraries in looked_for.items():
        named = {re.split(r"[\[<>=;]", text)[0] for text in extras[extra]} - {"wattcast"}
        assert named <= {library.split()[0] for library in libraries.split("; ")}, extra
    monkeypatch.setattr(check_commands.importlib.util, "find_spec", lambda name: None)
    checks = {c["name"]: c for c in json.loads(call("doctor", "--json").out)["checks"]}
    assert checks["extra fit"]["found"] == "scipy, polars, scikit-learn, clarabel missing"
    assert "pip install 'wattcast[fit]'" in call("doctor").out
    hints = [
        line
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "pip install" in line
        and "pip install wattcast" not in line
        and "pip install 'wattcast[" not in line
    ]
    assert [line for line in hints if "pip install 'wattcast[{extra}]'" not in line] == []


def test_a_measured_program_keeps_its_own_arguments(call, monkeypatch) -> None:
    """``--traceback`` was taken from anywhere on the line, also from the program that was measured."""
    from wattcast.measure import measured_run

    asked: list[list[str]] = []

    def refuse(command: list[str], *_: object, **__: object) -> None:
        asked.append(command)
        raise Refused("not here.")

    monkeypatch.setattr(measured_run, "run_command", refuse)
    done = call("measure", "run", "--", "program", "--traceback", "--json", "--", "--help")
    assert asked == [["program", "--traceback", "--json", "--", "--help"]]
    assert "Traceback" not in done.err
    assert "Traceback" in call("measure", "run", "--traceback", "--", "program").err


def test_traceback_is_shown_when_asked(call) -> None:
    done = call("predict", "llama3-8b", "--gpu", "nope", "--traceback")
    assert "Traceback" in done.err
    assert done.code == ExitCode.BAD_INPUT


def test_a_closed_pipe_is_no_failure() -> None:
    command = (
        f"{sys.executable} -m wattcast gpus --json | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "rror" not in done.stderr


def test_ctrl_c_ends_quietly() -> None:
    """SIGINT in the middle of a long simulation must end it at once, in one line."""
    command = "simulate llama3-8b --gpu h200 --rate 50/s --seconds 100000"
    running = subprocess.Popen(
        [sys.executable, "-m", "wattcast", *command.split()],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    while running.poll() is None:  # until it computes: importing takes less processor time
        fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
        if int(fields[11]) + int(fields[12]) > 1.5 * ticks_per_s:
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    try:
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in err
    assert out == ""


def test_a_group_without_a_command_prints_its_help_and_no_empty_complaint(call) -> None:
    done = call("manage")
    assert done.code == 2
    assert "simulate" in done.out + done.err
    assert "wattcast: ." not in done.err
