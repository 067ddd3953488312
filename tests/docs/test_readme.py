"""README: short, and each block runs with exactly the install that stands above it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wattcast
from wattcast.predictor.bundle import fit_status

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(sh|console|python)\n(.*?)```", re.DOTALL)
INSTALL = re.compile(r"python -m pip install (?:-c \S+ )?(?:-e )?'?\.(?:\[([\w,]+)\])?'?")


def list_steps() -> list[tuple[str, dict[str, Any]]]:
    """Return what a reader runs in order, each with the extras that were installed by then."""
    extras = ""
    steps: list[tuple[str, dict[str, Any]]] = []
    for language, text in BLOCK.findall(README):
        if language == "python":
            steps.append((extras, {"python": text}))
            continue
        for part in re.split(r"\n|&&", text):
            install = INSTALL.search(part)
            if install is not None:
                extras = install[1] or ""
            words = (
                shlex.split(part.removeprefix("$ "), comments=True) if "wattcast" in part else []
            )
            is_command = language == "sh" or part.startswith("$ ")
            if is_command and words[:1] == ["wattcast"]:
                steps.append((extras, {"argv": words[1:]}))
    return steps


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(list_steps()) >= 9
    assert {extras for extras, _ in list_steps()} == {"", "plot,serve"}


@pytest.mark.parametrize("extras", ["", "plot,serve"])
def test_blocks_run_with_the_install_above_them(extras: str, tmp_path: Path) -> None:
    """``to_frame()`` needed polars, which the install above its block did not bring."""
    steps = [task for installed, task in list_steps() if installed == extras]
    runner = Path(__file__).with_name("run_with_extras.py")
    done = subprocess.run(
        [sys.executable, str(runner), extras],
        input=json.dumps(steps),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for step, answer in zip(steps, json.loads(done.stdout), strict=True):
        refusal = "--tp" not in step.get("argv", ()) and "70B" in str(step)
        assert answer["code"] == (2 if refusal else 0), (step, answer["err"])


def test_the_runner_refuses_what_the_install_does_not_bring(tmp_path: Path) -> None:
    """Without this the test above would pass whatever the blocks import."""
    tasks = [{"python": "import polars"}, {"python": "import numpy"}]
    runner = Path(__file__).with_name("run_with_extras.py")
    done = subprocess.run(
        [sys.executable, str(runner), ""],
        input=json.dumps(tasks),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    codes = [answer["code"] for answer in json.loads(done.stdout)]
    assert codes == [1, 0]


@pytest.mark.slow
def test_blocks_run_in_a_fresh_environment(tmp_path: Path) -> None:
    """A new environment, pip and nothing else; needs a package index."""
    fresh = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    environment = {"PATH": f"{fresh / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    installed = None
    for extras, task in list_steps():
        if extras != installed:
            target = f"{ROOT}[{extras}]" if extras else str(ROOT)
            pip = [str(fresh / "bin" / "python"), "-m", "pip", "install", "-q", target]
            subprocess.run(pip, check=True, cwd=tmp_path)
            installed = extras
        words = (
            ["python", "-c", task["python"]] if "python" in task else ["wattcast", *task["argv"]]
        )
        done = subprocess.run(
            [str(fresh / "bin" / words[0]), *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        refusal = "--tp" not in task.get("argv", ()) and "70B" in str(task)
        assert done.returncode == (2 if refusal else 0), (task, done.stderr)


def test_the_page_of_errors_names_every_calibrated_gpu() -> None:
    text = (ROOT / "docs" / "how-far-off.md").read_text(encoding="utf-8")
    shown = {kind: cards for cards, kind in re.findall(r"^\| (.+?) \| \*(\w+)\*", text, re.M)}
    for kind in ("measured", "calibrated"):
        names = {gpu.name for gpu in wattcast.gpus() if fit_status(gpu.name) == kind}
        assert set(re.findall(r"`([\w-]+)`", shown[kind])) == names
