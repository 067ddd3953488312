"""The host of this machine, measured by ``doctor --host`` and remembered for predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wattcast
from wattcast.core.errors import BadInput
from wattcast.predictor.api import host_cost_of_run

EAGER = {"stack": "eager", "batch": 1, "seq": 64, "head": "none"}


@pytest.fixture
def host_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "host.json"
    monkeypatch.setenv("WATTCAST_HOST", str(path))
    return path


def test_a_host_is_measured_remembered_said_and_forgotten(
    call, host_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = wattcast.predict("gpt2", "h200", **EAGER)
    slow_s = 2.0 * usual.latency_s
    monkeypatch.setattr(
        "wattcast.measure.host_timing.time_small_model", lambda: (slow_s, "a made-up run")
    )
    done = call("doctor", "--host", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["file"] == str(host_file)
    own = wattcast.predict("gpt2", "h200", **EAGER)
    assert own.latency_s == pytest.approx(slow_s, rel=0.02)
    assert any("doctor --forget-host" in note for note in own.assumptions)
    given = wattcast.predict("gpt2", "h200", host_launch=16.8e-6, **EAGER)
    assert given.latency_s == pytest.approx(usual.latency_s)
    engine = {"phase": "prefill", "batch": 1, "seq": 64}
    with_own = wattcast.predict("gpt2", "h200", **engine)
    assert call("doctor", "--forget-host").code == 0
    assert not host_file.exists()
    assert with_own.latency_s == wattcast.predict("gpt2", "h200", **engine).latency_s
    again = wattcast.predict("gpt2", "h200", **EAGER)
    assert again.latency_s == usual.latency_s
    assert "No host was remembered" in call("doctor", "--forget-host").out


def test_a_damaged_file_says_what_to_do(host_file: Path) -> None:
    host_file.parent.mkdir()
    for text in ("{", '{"host_s_per_operator": 5.0, "measured": "", "date": ""}'):
        host_file.write_text(text)
        with pytest.raises(BadInput, match="doctor --forget-host"):
            wattcast.predict("gpt2", "h200", **EAGER)


def test_a_machine_without_a_gpu_measures_no_host(call, host_file: Path) -> None:
    """Without the driver's launches the figure would mean something else."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = call("doctor", "--host")
    assert done.code != 0
    assert "Traceback" not in done.err
    assert not host_file.exists()


def test_the_cost_of_a_run_is_the_one_that_predicts_it() -> None:
    p = wattcast.predict("gpt2", "h200", host_launch=30e-6, **EAGER)
    cost_s = host_cost_of_run("gpt2", p.latency_s, batch=1, seq=64, head="none")
    assert cost_s == pytest.approx(30e-6, rel=0.02)
