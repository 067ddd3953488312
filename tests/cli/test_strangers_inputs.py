"""What strangers type wrong gets one sentence with the nearest right spelling, and exit code 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from wattcast.cli.command_builder import OTHER_NAMES

TABLE = Path(__file__).with_name("strangers_inputs.txt").read_text(encoding="utf-8")
ROWS = [tuple(line.split(" | ")) for line in TABLE.splitlines() if not line.startswith("#")]
CONFIG = '{"model_type": "minimax_m9", "architectures": ["MiniMaxM9ForCausalLM"]}'
MOST_CHARACTERS = 420


def test_the_table_has_a_hundred_rows_that_no_other_table_has() -> None:
    others = Path(__file__).with_name("wrong_inputs.txt").read_text(encoding="utf-8")
    lines = {line for line, _ in ROWS}
    assert len(lines) >= 100
    assert lines.isdisjoint(row.partition(" | ")[0] for row in others.splitlines())


@pytest.mark.parametrize(("line", "says"), ROWS, ids=[line for line, _ in ROWS])
def test_a_strangers_mistake_gets_the_nearest_spelling(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "unknown.json").write_text(CONFIG)
    done = call(*shlex.split(line))
    assert done.code == 2, done.err
    assert says in done.err
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert len(done.err) < MOST_CHARACTERS
    assert {path.name for path in tmp_path.iterdir()} == {"figures", "unknown.json"}
    assert not list((tmp_path / "figures").iterdir())


RIGHT = {
    "predict gpt2 --gpu h200 --seq 64 --power_limit 500W": "--power-limit",
    "predict gpt2 --gpu h200,l4 --seq 64": "several GPUs",
    "explore sweep gpt2 --gpu h200 --seq 64 --vary batch=1,2 --minimize latency": "--minimise",
    "compare gpt2@h200,tp=1 @tp=2 --seq 64": "the GPU of the other run",
    "predict gpt2 --gpu h200 --seq 64 --price h100-sxm=2.5,h200=4": "prices by GPU",
    "predict flux.1-dev --gpu h200 --image 1024": "pixels",
}


@pytest.mark.parametrize("line", RIGHT)
def test_other_spellings_are_taken(call, line: str) -> None:
    done = call(*shlex.split(line))
    assert done.code == 0, done.err


def test_a_picture_is_given_in_pixels(call) -> None:
    """``--image 1024`` was a latent of 1024, a picture of 8192 pixels."""
    command = ("predict", "flux.1-dev", "--gpu", "h200", "--json")
    published, asked = (
        json.loads(call(*command, *more).out)["predictions"][0]
        for more in ((), ("--image", "1024"))
    )
    assert asked["latency_s"] == published["latency_s"]
    larger = json.loads(call(*command, "--image", "2048").out)["predictions"][0]
    assert larger["latency_s"] > 2 * published["latency_s"]


def test_other_names_lead_to_options_that_exist() -> None:
    from wattcast.cli.main import walk_commands

    known = {option for _, command in walk_commands() for p in command.params for option in p.opts}
    assert set(OTHER_NAMES.values()) <= known
