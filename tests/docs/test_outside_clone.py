"""Every documented command works after ``pip install '.[all]'`` outside the clone, or says in one
sentence which data it lacks.

Slow: a new environment takes minutes and a package index. WATTCAST_OUTSIDE names the Python of an
environment that has the wheel already.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from staged_files import stage_files
from test_docs import (
    EVERY,
    NOT_RUN,
    ROOT,
    RUN,
    commands,
    documented,
    fences,
    left_over,
)

MODULE = re.compile(
    r"^(?: {4}|\$ |.*&& )?(python -m wattcast\.\w.*?)(?=\s*(?:#|&&|\||$))", re.MULTILINE
)
MENTIONED_MODULE = re.compile(r"`(python -m wattcast\.[^`|]*)`")
# reasons of not_run.txt that leave a line out here: it needs something beside files, or a long time
ELSEWHERE = (
    "GPU",
    "server",
    "daemon",
    "cluster",
    "slow",
    "minutes",
    "metrics of a service",
    "a card of yours",
    "counters of yours",
    "rows of yours",
    "the hall of the page",
    "kubelet",
    "collector",
    "a graph of yours",
)
# modules of the lab that take minutes and more, or measure on a GPU
MODULES_ELSEWHERE = (
    "long_checks.",
    "coefficient_trials",
    "kernel_chains",
)
# pages name these packages, which want a verb
PACKAGES = {
    "python -m wattcast.lab",
    "python -m wattcast.measure",
}
# what a sentence says that names data which are not there
LACKS = re.compile(
    r"cannot be read|expected an existing|expected a folder with|missing column|no such"
    r"|WATTCAST_REFERENCE|in the repository|no .* rows",
    re.IGNORECASE,
)


def is_run(line: str) -> bool:
    """Whether the line needs no GPU, no server and no more than two minutes."""
    if line in PACKAGES or any(name in line for name in MODULES_ELSEWHERE):
        return False
    reasons = [reason for start, reason in NOT_RUN if line.startswith(start)]
    return not any(word in reason for reason in reasons for word in ELSEWHERE)


def as_step(line: str) -> dict[str, Any]:
    """Return a documented line as a step, without what it shows as optional."""
    return {"argv": shlex.split(re.sub(r" \[[^]]*\]| ?\.\.\.", "", line))}


def list_page_steps(page: Path) -> list[dict[str, Any]]:
    """Return the blocks of a page that tests run as a whole, in order."""
    steps: list[dict[str, Any]] = []
    for name, language, text in fences(page) if page in RUN else []:
        if name:
            steps.append({"file": name, "text": text})
        elif language == "python":
            steps.append({"python": text})
        elif language == "sh":
            steps += [{"argv": ["wattcast", *words]} for words in commands(text)]
    return steps


def list_other_steps(page: Path) -> list[dict[str, Any]]:
    """Return the other lines of a page: those a reader runs on files of his own, and modules."""
    modules = [*documented(page, MODULE), *documented(page, MENTIONED_MODULE)]
    lines = dict.fromkeys([*left_over(page), *modules])
    return [as_step(line) for line in lines if is_run(line)]


@pytest.fixture(scope="session")
def outside_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel with all extras, and not the clone."""
    ready = os.environ.get("WATTCAST_OUTSIDE")
    if ready:
        return Path(ready)
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    wheel = next(folder.glob("wattcast-*.whl"))
    pinned = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "install", "-q", *pinned, f"{wheel}[all]"], check=True, cwd=folder)
    return python


def run_outside(python: Path, steps: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run steps in a folder by the installed package, and return their exit codes and messages."""
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        [str(python), "-P", "-c", Path(__file__).with_name("run_outside.py").read_text()],
        input=json.dumps(steps),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def save_predictions(python: Path, folder: Path) -> None:
    """Write the two predictions that pages compare."""
    for name, batch in (("before.json", "2"), ("after.json", "4")):
        line = f"wattcast predict gpt2 --gpu h200 --seq 128 --batch {batch} --json"
        program, *words = line.split()
        done = subprocess.run(
            [str(python.parent / program), *words],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        (folder / name).write_text(done.stdout, encoding="utf-8")


def classify(answer: dict[str, Any]) -> str:
    """Return ``works``, ``lacks`` where one sentence says which data are missing, or ``fails``."""
    if answer["code"] == 0:
        return "works"
    text = answer["err"].strip()
    if "Traceback" in text or "internal error" in text or not text:
        return "fails"
    return "lacks" if LACKS.search(text.splitlines()[-1]) else "fails"


@pytest.mark.slow
@pytest.mark.parametrize("page", EVERY, ids=lambda p: p.stem)
def test_documented_commands_run_outside_the_clone(
    page: Path, outside_python: Path, tmp_path: Path
) -> None:
    answers = []
    for name, steps in (("own", list_page_steps(page)), ("staged", list_other_steps(page))):
        folder = tmp_path / name
        folder.mkdir()
        if name == "staged" and steps:
            stage_files(folder)
            save_predictions(outside_python, folder)
        answers += run_outside(outside_python, steps, folder)
    found = [(classify(answer), answer) for answer in answers if "file" not in answer["step"]]
    counted = os.environ.get("WATTCAST_OUTSIDE_COUNTS")
    if counted:
        with Path(counted).open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps([page.name, *pair]) + "\n" for pair in found)
    assert not [answer for kind, answer in found if kind == "fails"]


def test_a_traceback_is_no_sentence() -> None:
    kinds = {
        "": "fails",
        "Traceback (most recent call last):\nKeyError: 'x'": "fails",
        "wattcast: internal error": "fails",
        "wattcast: --batch: expected a number, got 'x'.": "fails",
        "wattcast: mine.csv: cannot be read (No such file or directory).": "lacks",
    }
    assert {err: classify({"code": 2, "err": err}) for err in kinds} == kinds
    assert classify({"code": 0, "err": "a note"}) == "works"


def test_most_documented_lines_are_run() -> None:
    lines = {line for page in EVERY for line in [*documented(page), *documented(page, MODULE)]}
    left_out = {line for line in lines if not is_run(line)}
    assert len(lines) > 150
    assert len(left_out) < 0.35 * len(lines)
