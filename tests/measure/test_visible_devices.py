"""Which card is measured under ``CUDA_VISIBLE_DEVICES`` and its relatives."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from standin import StandIn
from wattcast.core.errors import BadInput, ExitCode
from wattcast.measure.device_control import NvmlCard
from wattcast.measure.visible_devices import ListedCard, choose_amd_card, choose_nvidia_card

ALIKE = [ListedCard(n, "NVIDIA H200", f"GPU-{n}a3f-{n}") for n in range(4)]
MIXED = [ListedCard(0, "NVIDIA T4", "GPU-t4"), ListedCard(1, "NVIDIA H200", "GPU-h200")]
MIG = {"MIG-c6d4-1": "GPU-2a3f-2"}


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("1", (1,)),
        (" 3 , 1 ", (3, 1)),
        ("2,-1,3", (2,)),  # CUDA ignores what follows an entry that names no card
        ("1,9,2", (1,)),
        ("GPU-2a3f-2", (2,)),
        ("GPU-3", (3,)),  # as much as is unique
        ("GPU-3,GPU-0", (3, 0)),
        ("MIG-c6d4-1", (2,)),
        ("MIG-GPU-1a3f-1/7/0", (1,)),
    ],
)
def test_a_list_names_the_card(text: str, visible: tuple[int, ...]) -> None:
    choice = choose_nvidia_card(ALIKE, {"CUDA_VISIBLE_DEVICES": text}, MIG.get)
    assert (choice.index, choice.visible) == (visible[0], visible)
    assert ("MIG" in choice.flag) == text.startswith("MIG")
    assert ("only GPU" in choice.note) == (len(visible) > 1)


@pytest.mark.parametrize(
    "text",
    ["", "-1", "NoDevFiles", "abc", "4", "99999999999999999999", "GPU-", "GPU-9", "MIG-x", "1,1"],
)
def test_a_list_that_shows_no_card_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"CUDA_VISIBLE_DEVICES=.*--device N"):
        choose_nvidia_card(ALIKE, {"CUDA_VISIBLE_DEVICES": text}, MIG.get)


def test_numbers_of_cards_that_differ_need_an_order() -> None:
    """CUDA's number 0 is the fastest card by default, and nvidia-smi's the first on the bus."""
    with pytest.raises(BadInput, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        choose_nvidia_card(MIXED, {"CUDA_VISIBLE_DEVICES": "0"})
    ordered = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert choose_nvidia_card(MIXED, ordered).index == 1
    assert choose_nvidia_card(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-t4"}).index == 0
    unset = choose_nvidia_card(MIXED, {})
    assert unset.index == 0
    assert "the fastest" in unset.note
    assert choose_nvidia_card(ALIKE[:1], {}).note == ""


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, (0, 1, 2, 3)),
        ({"HIP_VISIBLE_DEVICES": "2"}, (2,)),
        ({"CUDA_VISIBLE_DEVICES": "3"}, (3,)),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3"}, (2,)),
        ({"ROCR_VISIBLE_DEVICES": "1,3"}, (1, 3)),
        ({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"}, (3,)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2"}, (2,)),
    ],
)
def test_hip_numbers_what_rocr_leaves(environ: dict[str, str], visible: tuple[int, ...]) -> None:
    assert choose_amd_card(ALIKE, environ).visible == visible
    with pytest.raises(BadInput, match="ROCR_VISIBLE_DEVICES"):
        choose_amd_card(ALIKE, environ | {"ROCR_VISIBLE_DEVICES": ""})


def run_measure(*words: str) -> SimpleNamespace:
    done = subprocess.run(
        [sys.executable, "-m", "wattcast.measure", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def test_the_command_measures_the_card_that_its_program_sees(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``CUDA_VISIBLE_DEVICES=1`` GPU 0 was measured while GPU 1 worked."""
    standin.follow("devices 3", "at -10 300 1980 0 45 60")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = json.loads(run_measure("run", "--json", "--", "sleep", "0.1").out)
    assert (seen["device"]["index"], seen["device"]["uuid"]) == (1, "GPU-standin-1")
    seen = json.loads(run_measure("run", "--device", "2", "--json", "--", "sleep", "0.1").out)
    assert seen["device"]["uuid"] == "GPU-standin-2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-standin-2,0")
    several = run_measure("run", "--", "sleep", "0.1")
    assert "only GPU 2 is measured" in several.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    hidden = run_measure("idle", "--seconds", "0.1")
    assert hidden.code == ExitCode.BAD_INPUT
    assert "hides all 3 GPUs" in hidden.err


PROBE = """
import json
from wattcast.measure.device_control import NvmlCard
from wattcast.measure.energy_sources import open_source
card = NvmlCard()
card.open()
print(json.dumps([card.index, card.uuid, open_source("auto")[1].uuid, open_source("nvml", 0)[1].uuid]))
"""


def test_managing_and_callbacks_take_the_same_card(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``manage run`` set the clocks of GPU 0 while the program ran on GPU 1."""
    standin.follow("devices 3", "at -10 300 1980 0 45 60")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [1, "GPU-standin-1", "GPU-standin-1", "GPU-standin"]
    assert NvmlCard(2).index == 2


def test_doctor_shows_the_lists(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES='1'" in call("doctor").out.replace("\n", " ")
