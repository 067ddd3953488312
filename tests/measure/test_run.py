"""``measure run`` and windows: what a program took, its exit code, and an interrupt that loses
nothing.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

import wattcast
from standin import StandIn, undisturbed
from wattcast.cli.command_output import Environment
from wattcast.cli.main import build_command
from wattcast.core.errors import BadInput, CannotWrite, ExitCode, MissingTool, Refused
from wattcast.measure.__main__ import main as bare_main
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.measured_run import MeasuredRun, measure_idle, run_command
from wattcast.measure.window_summary import Measurement, summarise_window

SLEEP = [sys.executable, "-c", "import time; time.sleep(1.2)"]


def command_line(*arguments: str) -> tuple[int, str, str]:
    """``wattcast measure ...`` as the command line calls it."""
    env = Environment(io.StringIO(), io.StringIO())
    try:
        code = build_command("measure").main(list(arguments), standalone_mode=False, obj=env)
    except typer.Exit as ended:
        code = ended.exit_code
    return int(code or 0), env.stdout.getvalue(), env.stderr.getvalue()


def measured_by(*arguments: str) -> SimpleNamespace:
    """What a command printed with ``--json``."""
    code, out, _ = command_line(*arguments)
    assert code == 0
    return SimpleNamespace(**{"flags": [], **json.loads(out)})


def test_a_command_is_measured_and_its_exit_code_passes_through(standin: StandIn) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1.2); raise SystemExit(7)"]
    runs: list[MeasuredRun] = []

    def measure() -> Measurement:
        runs.append(run_command(command, "nvml"))
        return runs[-1].measurement

    undisturbed(measure)
    run = runs[-1]
    assert run.exit_code == 7
    assert run.measurement.power_w == pytest.approx(300.0, rel=0.01)
    assert run.measurement.energy_j == pytest.approx(300.0 * run.measurement.duration_s, rel=0.01)
    assert run.measurement.peak_w == pytest.approx(300.0, rel=0.01)
    assert run.measurement.overhead is not None
    assert 0.0 < run.measurement.overhead < 0.05


def test_a_command_killed_by_a_signal_ends_as_in_a_shell(standin: StandIn) -> None:
    """The counter takes its first step long after the end, however long the command takes to start."""
    standin.follow("at -10 300 1980", "tick_ms 1e7")
    run = run_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], "nvml")
    assert run.exit_code == 143
    assert run.measurement.power_w is None  # too short, and said so
    assert run.measurement.flags


def test_an_unknown_command_and_none_at_all_are_the_users_mistake(standin: StandIn) -> None:
    with pytest.raises(BadInput, match="there is no command"):
        run_command(["/does/not/exist"], "nvml")
    with pytest.raises(BadInput, match="after --"):
        run_command([], "nvml")


def test_an_interrupt_goes_to_the_command_and_the_figures_are_still_printed(
    standin: StandIn,
) -> None:
    found = undisturbed(_interrupted)
    assert found.power_w == pytest.approx(300.0, rel=0.02)


def _interrupted() -> SimpleNamespace:
    code = "import signal, sys, time\nsignal.signal(2, lambda *a: sys.exit(9))\nprint('up', flush=True)\ntime.sleep(30)"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "wattcast.measure",
            "run",
            "--json",
            "--",
            sys.executable,
            "-c",
            code,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert (
        process.stderr.readline() == "up\n"
    )  # with --json the command's own output goes to stderr
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 9
    return SimpleNamespace(**json.loads(out))


def test_the_command_line_prints_json_and_saves_a_figure(standin: StandIn, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "power.png"
    code, out, _ = command_line(
        "run", "--source", "nvml", "--json", "--plot", str(figure), "--", *SLEEP
    )
    assert code == 0
    assert json.loads(out)["device"]["name"] == "Stand-in H200"
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_results_go_to_stdout_and_overhead_to_stderr(standin: StandIn) -> None:
    errors: list[str] = []

    def measure() -> SimpleNamespace:
        code, out, err = command_line("run", "--source", "nvml", "--", *SLEEP)
        assert code == 0
        errors.append(err)
        return SimpleNamespace(out=out, flags=re.findall(r"late_polls", out))

    out = undisturbed(measure).out
    mean_w = float(re.search(r"mean (\S+) W", out)[1])
    assert mean_w == pytest.approx(300.0, rel=0.02)
    assert "% of the processors" in errors[-1]


def test_against_a_prediction_it_says_which_term_is_off(standin: StandIn, tmp_path: Path) -> None:
    prediction = tmp_path / "predicted.json"
    first = {
        "latency_s": 3.1,
        "power_w": 200.0,
        "clock_hz": 1.98e9,
    }  # 3 s and the start of a program
    prediction.write_text(json.dumps({"predictions": [first]}))
    longer = ["sleep", "3"]  # an interpreter takes a tenth of that to start on a busy machine

    def measure() -> SimpleNamespace:
        found = measured_by(
            "run", "--source", "nvml", "--against", str(prediction), "--json", "--", *longer
        )
        late = ["late_polls"] if found.duration_s > 3.25 else []  # a stalled machine is no term
        return SimpleNamespace(against=found.against, flags=[*found.flags, *late])

    assert undisturbed(measure).against["term"] == "energy"


def test_idle_and_sensor_answer(standin: StandIn) -> None:
    found = undisturbed(
        lambda: measured_by("idle", "--seconds", "1.2", "--source", "nvml", "--json")
    )
    assert found.power_w == pytest.approx(300.0, rel=0.01)
    code, out, _ = command_line("sensor", "--source", "nvml", "--json")
    assert code == 0
    assert json.loads(out)["energy_period_s"] == pytest.approx(0.1, rel=0.02)


def test_idle_is_refused_while_something_runs(standin: StandIn) -> None:
    standin.follow(
        "at -10 100 1980", *(f"at {0.3 * i:.1f} {100 if i % 2 else 500} 1980" for i in range(20))
    )
    with pytest.raises(Refused, match="something else is running"):
        measure_idle(2.0, "nvml")


def test_a_bare_node_without_a_device_gets_a_sentence(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert bare_main(["idle", "--source", "nvml"]) == ExitCode.MISSING
    assert "no energy source on this machine" in capsys.readouterr().err
    assert bare_main(["idle", "--source", "nvm"]) == ExitCode.BAD_INPUT


def test_windows_nest_and_share_one_sampler(standin: StandIn) -> None:
    with wattcast.measure(
        "outermost", "nvml"
    ) as outermost:  # the sampler is up before the script begins
        standin.follow("at -10 200 1980", "at 1.5 500 1980")
        time.sleep(0.3)
        with wattcast.measure("whole") as whole:
            time.sleep(0.7)
            with wattcast.measure("part") as part:
                time.sleep(1.0)
                with pytest.raises(Refused, match="still running"):
                    _ = part.result
    assert outermost.inner == [whole]
    assert whole.inner == [part]
    assert part.result.power_w is not None
    assert part.result.power_w > whole.result.power_w > 200.0
    assert whole.result.duration_s > part.result.duration_s + 0.6
    assert wattcast.measure.measure.__module__ == "wattcast.measure.measured_run"


def test_a_window_closes_when_its_block_raises(standin: StandIn) -> None:
    seen = []

    def broken() -> None:
        with wattcast.measure("broken", "nvml") as live:
            seen.append(live)
            time.sleep(0.9)
            raise ZeroDivisionError

    def measure() -> Measurement:
        with pytest.raises(ZeroDivisionError):
            broken()
        return seen[-1].result

    assert undisturbed(measure).power_w == pytest.approx(300.0, rel=0.02)


def test_a_window_on_a_machine_without_sensors_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(MissingTool), wattcast.measure("nothing", "nvml"):
        pass
    assert os.environ["LD_LIBRARY_PATH"] == str(tmp_path)


@pytest.mark.parametrize("fault", ["lost 0", "hang 0 60"])
def test_a_device_lost_or_hung_amid_a_run_gives_no_energy_and_exit_code_5(
    standin: StandIn, tmp_path: Path, fault: str
) -> None:
    """2,003 J were reported, without a flag and with exit code 0, where 13,000 J were drawn."""
    away = tmp_path / "away.txt"
    away.write_text(standin.script.read_text() + fault + "\n")
    command = f"sleep 1.5; mv {away} {standin.script}; sleep 2"
    code, out, _ = command_line("run", "--source", "nvml", "--json", "--", "sh", "-c", command)
    found = json.loads(out)
    assert code == ExitCode.REFUSED
    assert "energy_j" not in found
    assert "power_w" not in found
    assert found["unmeasured_s"] > 1.0
    assert any("counter stopped" in flag for flag in found["flags"])
    assert ("device lost" in found["flags"]) == fault.startswith("lost")


@pytest.mark.slow
def test_a_device_away_at_a_hundred_moments_gives_no_unflagged_error_over_a_percent(
    standin: StandIn,
) -> None:
    """Whole runs in real time, five at once; the polling loop meets the same in imagined time."""
    code = (
        "import json, sys\nfrom wattcast.measure.measured_run import run_command\n"
        "run = run_command(['sh', '-c', sys.argv[1]], 'nvml')\n"
        "print(json.dumps([run.started_s, run.shell_code, run.measurement.plain()]))"
    )
    chance, plain = random.Random(29), 0
    steps = [(-10.0, 300.0), *((0.5 * i, chance.choice([200.0, 300.0, 500.0])) for i in range(400))]
    lines = [f"at {at_s} {watts} 1980" for at_s, watts in steps]
    for _ in range(20):
        started = []
        for number in range(5):
            fault = chance.choice(["lost 0", "hang 0 60", "hang 0 0.3", "error energy 999 0 1e9"])
            begin_s, away_s = (
                chance.uniform(0.0, 2.5),
                chance.choice([chance.uniform(0.05, 2.0), 60.0]),
            )
            own = StandIn(standin.folder, standin.script.with_name(f"own-{number}.txt"))
            epoch_s = own.follow(*lines)
            for name, more in (("bad", [fault]), ("good", [])):
                own.script.with_suffix(f".{name}").write_text(
                    "\n".join([f"epoch {epoch_s:.6f}", *lines, *more]) + "\n"
                )
            away = [
                f"mv {own.script.with_suffix('.bad')} {own.script}",
                f"sleep {min(away_s, 2.6 - begin_s):.3f}",
            ]
            back = (
                [f"mv {own.script.with_suffix('.good')} {own.script}"]
                if begin_s + away_s < 2.6
                else []
            )
            shell = "; ".join(
                [
                    f"sleep {begin_s:.3f}",
                    *away,
                    *back,
                    f"sleep {max(2.6 - begin_s - away_s, 0.0):.3f}",
                ]
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code, shell],
                env=os.environ | own.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append((process, epoch_s, shell))
        for process, epoch_s, shell in started:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0, shell
            began_s, shell_code, found = json.loads(out)
            if not found["flags"]:
                begin_s, end_s = began_s - epoch_s, began_s - epoch_s + found["duration_s"]
                later_s = [at_s for at_s, _ in steps[1:]] + [math.inf]
                drawn_j = sum(
                    watts * max(min(until_s, end_s) - max(at_s, begin_s), 0.0)
                    for (at_s, watts), until_s in zip(steps, later_s, strict=True)
                )
                assert shell_code == 0, shell
                assert found["energy_j"] == pytest.approx(drawn_j, rel=0.01), shell
                plain += 1
    assert plain > 10


def test_a_device_lost_before_its_first_step_gives_exit_code_5(standin: StandIn) -> None:
    """The exit code was 0: a counter that never stepped had not stopped either."""
    standin.follow("at -10 300 1980", "lost 0.0")
    code, out, _ = command_line("run", "--source", "nvml", "--json", "--", "sleep", "1")
    assert code == ExitCode.REFUSED
    assert json.loads(out)["unmeasured_s"] >= 1.0
    assert "energy_j" not in json.loads(out)


def test_a_counter_that_is_read_and_never_steps_has_stopped() -> None:
    rows = np.full((60, len(COLUMNS)), np.nan)
    rows[:, COLUMNS.index("time_s")] = np.arange(60) * 0.05
    assert summarise_window("x", EnergySamples(rows), 0.5, 2.5).unmeasured_s is None, (
        "it has no counter"
    )
    rows[:, COLUMNS.index("energy_j")] = 100.0
    found = summarise_window("x", EnergySamples(rows), 0.5, 2.5)
    assert found.unmeasured_s == 2.0
    assert found.energy_j is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ending_signals_go_to_the_command_and_nothing_is_lost(
    standin: StandIn, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM ended ``measure run`` alone: the figures were lost and the command ran on as an
    orphan.
    """
    code = (
        "import os, signal, sys, time\nfor n in (1, 15): signal.signal(n, lambda n, f: sys.exit(40 + n))\n"
        "print(os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(60)"
    )
    kept = tmp_path / "new" / "kept.npz"
    start = "import sys\nfrom wattcast.cli.main import main\nsys.exit(main())"
    words = [
        "measure",
        "run",
        "--source",
        "nvml",
        "--json",
        "--save",
        str(kept),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    child = int(process.stderr.readline())
    time.sleep(1.0)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 40 + number
    assert json.loads(out)["duration_s"] > 0.9
    assert len(EnergySamples.load(kept))
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_places_to_write_are_tried_before_the_run(call, tmp_path: Path) -> None:
    """``--save`` into a folder that could not be written failed after the run, and lost it."""
    (tmp_path / "taken").write_text("a file")
    ran = tmp_path / "ran"
    for option, name, told in (
        ("--save", "x.npz", "cannot be written"),
        ("--plot", "x.png", "a folder that exists"),
    ):
        found = call(
            "measure", "run", option, str(tmp_path / "taken" / name), "--", "touch", str(ran)
        )
        assert found.code == ExitCode.BAD_INPUT
        assert told in found.err
    assert not ran.exists()


def test_samples_that_cannot_be_saved_go_beside_and_the_result_is_printed(
    standin: StandIn, tmp_path: Path, monkeypatch
) -> None:
    target = tmp_path / "kept.npz"
    replace = os.replace

    def fail(source, to) -> None:
        if Path(to) == target:
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr(os, "replace", fail)
    code, out, err = command_line(
        "run", "--source", "nvml", "--json", "--save", str(target), "--", *SLEEP
    )
    assert code == ExitCode.FAILED
    assert json.loads(out)["duration_s"] > 1.0
    (beside,) = tmp_path.glob("kept-*.npz")
    assert f"samples saved: {beside}, because {target} could not be written" in err
    assert len(EnergySamples.load(beside))
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_takes_nothing_leaves_the_measurement_printed(
    standin: StandIn, tmp_path: Path, monkeypatch
) -> None:
    """Where no place took the samples, the run was over and its figures were not printed."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    code, out, err = command_line(
        "sensor", "--source", "nvml", "--json", "--out", str(tmp_path / "new")
    )
    assert code == ExitCode.BAD_INPUT
    assert json.loads(out)["energy_period_s"] > 0.0
    assert "No space left" in err
    env = Environment(io.StringIO(), io.StringIO())
    words = [
        "run",
        "--source",
        "nvml",
        "--json",
        "--save",
        str(tmp_path / "kept.npz"),
        "--",
        "true",
    ]
    with pytest.raises(CannotWrite, match="No space left"):
        build_command("measure").main(words, standalone_mode=False, obj=env)
    assert json.loads(env.stdout.getvalue())["duration_s"] > 0.0
    ran = tmp_path / "kept.npz" / "sensor"
    ran.parent.write_text("a file")
    with pytest.raises(CannotWrite):
        command_line("sensor", "--source", "none of these", "--out", str(ran))


def test_a_comparison_that_fails_leaves_the_measurement_printed(
    standin: StandIn, tmp_path: Path
) -> None:
    prediction = tmp_path / "predicted.json"
    prediction.write_text(
        json.dumps({"predictions": [{"latency_s": 1.0, "power_w": 200.0, "clock_hz": 1e9}]})
    )
    env = Environment(io.StringIO(), io.StringIO())
    words = [
        "run",
        "--source",
        "nvml",
        "--against",
        str(prediction),
        "--json",
        "--",
        "sleep",
        "0.2",
    ]
    with pytest.raises(Refused, match="nothing to compare"):
        build_command("measure").main(words, standalone_mode=False, obj=env)
    assert json.loads(env.stdout.getvalue())["duration_s"] > 0.1
