"""Run what a page documents in the environment of the Python that runs this file.

``python run_outside.py < steps.json``: steps are ``{"file": name, "text": ...}``, which is written,
``{"python": ...}``, blocks of one page that share their names, and ``{"argv": [...]}``, a command
of the environment. Prints JSON: ``[{"step": ..., "code": 0, "err": ""}, ...]``.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

LONGEST_S = 120


def run_step(step: dict[str, Any], space: dict[str, Any]) -> tuple[int | None, str]:
    """Return the exit code and what went to stderr; None: it took too long."""
    if "file" in step:
        Path(step["file"]).write_text(step["text"], encoding="utf-8")
        return 0, ""
    if "python" in step:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(step["python"], "page", "exec"), space)
        except BaseException:
            return 1, traceback.format_exc()
        return 0, ""
    program, *words = step["argv"]
    home = Path(sys.executable).parent
    try:
        done = subprocess.run(
            [str(home / program), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return None, f"took more than {LONGEST_S} s"
    return done.returncode, done.stderr


if __name__ == "__main__":
    names: dict[str, Any] = {"__name__": "__main__"}
    answers = []
    for step in json.load(sys.stdin):
        code, err = run_step(step, names)
        answers.append({"step": step, "code": code, "err": err})
    json.dump(answers, sys.stdout)
