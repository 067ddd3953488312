"""``doctor --card`` on the stand-in NVML library and a GPU that only keeps time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGpu

from standin import StandIn
from wattcast.calibrate import card_factor
from wattcast.core.errors import MissingTool, Refused
from wattcast.measure import card_loads

pytestmark = pytest.mark.realtime


class FakeLoads(FakeGpu):
    """The loads on a fake stream; each call takes a millisecond."""

    dtype = "bf16"
    uuid = ""
    host: Any = (5e-3, "a made-up pass")

    def prepare(self, name: str) -> Callable[[], None]:  # type: ignore[override]
        def queue_call() -> None:
            self.begin_stream()
            self.free_s += 1e-3

        return queue_call

    def time_host(self) -> tuple[float, str]:
        if isinstance(self.host, Exception):
            raise self.host
        return self.host


def recognise(name: str, board: str) -> None:
    """Take any card."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tenths of a second for each part."""
    rule = card_loads.SettlingRule(settle_s=0.2, least_s=0.7, longest_s=3.0)
    monkeypatch.setattr(card_loads, "RULE", rule)
    monkeypatch.setattr(card_loads, "IDLE_S", 1.0)
    monkeypatch.setattr(card_loads, "CONTEXT_S", 0.0)


def test_a_card_is_measured_compared_and_remembered(
    call, standin: StandIn, short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTCAST_CARDS", str(tmp_path / "cards.json"))
    monkeypatch.setattr(card_loads, "TorchLoads", FakeLoads)
    monkeypatch.setattr(card_factor, "name_card", lambda name, board: ["h200"])
    # the stand-in draws the same in all loads, which cards do not: what a copy in 1 ms draws
    copy = {"copy": card_loads.list_operators("bf16")["copy"]}
    monkeypatch.setattr(card_loads, "list_operators", lambda dtype: copy)
    standin.follow("at -10 390 1980 0 45 60")
    done = call("doctor", "--card", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["file"] == str(tmp_path / "cards.json")
    assert said["card"]["idle_w"] == pytest.approx(390.0, rel=0.02)
    names = [load["name"] for load in said["card"]["loads"]]
    assert names == ["copy"]
    assert all(
        load["measured_w"] == pytest.approx(390.0, rel=0.02) for load in said["card"]["loads"]
    )
    assert said["host_factor"] > 0.0
    assert json.loads(call("doctor", "--forget-card", "--json").out) == {"forgotten": True}


def test_an_unknown_card_is_refused_at_once(call, standin: StandIn, short, monkeypatch) -> None:
    monkeypatch.setattr(card_loads, "TorchLoads", FakeLoads)
    done = call("doctor", "--card")
    assert done.code == 2
    assert "Stand-in H200" in done.err
    assert "idle" not in done.err


def test_a_card_that_others_use_is_refused(
    standin: StandIn, short, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_loads, "_list_sharing", lambda index: ("MIG is on",))
    with pytest.raises(Refused, match="MIG is on"):
        card_loads.measure_card(lambda text: None, recognise, FakeLoads)


def test_another_card_than_the_measured_one_is_refused(standin: StandIn, short) -> None:
    loads = FakeLoads()
    loads.uuid = "GPU-not-this-one"
    with pytest.raises(Refused, match="CUDA_VISIBLE_DEVICES"):
        card_loads.measure_card(lambda text: None, recognise, lambda: loads)


def test_a_host_that_cannot_be_measured_loses_nothing_else(standin: StandIn, short) -> None:
    loads = FakeLoads()
    loads.host = MissingTool("transformers is missing.")
    said: list[str] = []
    figures = card_loads.measure_card(said.append, recognise, lambda: loads)
    assert figures.host.seconds is None
    assert "transformers is missing" in figures.host.words
    assert len(figures.loads) == 3
    assert len(said) == 5
    assert figures.loads[0].latency_s == pytest.approx(1e-3, rel=0.01)


def test_a_call_is_repeated_to_fill_a_chunk() -> None:
    loads = FakeLoads()
    calls = card_loads._count_calls(loads, loads.prepare("copy"))
    assert calls == round(card_loads.CHUNK_S / 1e-3)


def test_the_loads_queue_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch without a GPU, at sizes that a processor takes."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(card_loads, "SIZE", 32)
    monkeypatch.setattr(card_loads, "WIDTH", 48)
    monkeypatch.setattr(card_loads, "DEPTH", 16)
    monkeypatch.setattr(card_loads, "COPIED", 64)
    loads = card_loads.TorchLoads.__new__(card_loads.TorchLoads)

    def on_processor(function: Any) -> Any:
        return lambda *sizes, device, dtype: function(*sizes, dtype=dtype)

    calls: list[tuple[int, ...]] = []

    def multiply(inputs: Any, weights: Any, out: Any) -> None:
        calls.append((*inputs.shape, weights.shape[1]))
        torch.mm(inputs.float(), weights.float(), out=out.float())

    loads._torch = SimpleNamespace(
        cuda=SimpleNamespace(empty_cache=lambda: None),
        randn=on_processor(torch.randn),
        empty=on_processor(torch.empty),
        empty_like=torch.empty_like,
        mm=multiply,
    )
    loads._type = torch.bfloat16
    loads.dtype = "bf16"
    for name, operator in card_loads.list_operators("bf16").items():
        loads.prepare(name)()
        if "m" in operator:
            assert calls[-1] == (operator["m"], operator["k"], operator["n"])


def test_no_cuda_device_is_said_in_a_sentence(call) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = call("doctor", "--card")
    assert done.code == 2
    assert "--power-factor" in done.err
