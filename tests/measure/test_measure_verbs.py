"""Both command lines of ``measure`` take the same options with the same defaults."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wattcast.cli.main import walk_commands
from wattcast.core.errors import ExitCode
from wattcast.lab.__main__ import main as run_lab
from wattcast.lab.campaigns.campaign_verbs import VERBS
from wattcast.lab.microbench.microbench_sessions import microbench, multimedia
from wattcast.measure.__main__ import main
from wattcast.measure.measure_verbs import VERBS as MEASURE_VERBS

COMMANDS = {
    words.split()[1]: command
    for words, command in walk_commands()
    if words.split()[0] in ("measure", "lab") and len(words.split()) == 2
}
SHARED = [
    verb for verb in (*MEASURE_VERBS, *VERBS, microbench, multimedia) if verb.__name__ in COMMANDS
]


@pytest.mark.parametrize("verb", SHARED, ids=lambda verb: verb.__name__)
def test_a_verb_has_the_same_options_on_both_command_lines(
    verb: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """``lab kernels`` once took other steps by default than ``python -m wattcast.lab kernels``."""
    run_bare = main if verb in MEASURE_VERBS else run_lab
    with pytest.raises(SystemExit):
        run_bare([verb.__name__, "--help"])  # type: ignore[attr-defined]
    bare = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {
        "--help",
        "--suggest",
        "--list",
        "--own",
    }
    full = {flag for option in COMMANDS[verb.__name__].params for flag in option.opts}  # type: ignore[attr-defined]
    assert bare <= full


def test_mistakes_are_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lab(["kernels", "--out", str(tmp_path), "--round", "0"]) == ExitCode.BAD_INPUT
    assert (
        capsys.readouterr().err
        == "BadInput: --round: expected a round of the plan, 1 to 4, got 0.\n"
    )
    with pytest.raises(SystemExit):
        run_lab(["pack", "--out", str(tmp_path)])
    assert "folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run_bare", "verb", "argument"), [(main, "log", "file"), (run_lab, "kit", "out")]
)
def test_a_missing_argument_is_named(
    run_bare: Callable[[list[str]], int],
    verb: str,
    argument: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``python -m wattcast.measure log`` without a file once ended in a traceback.

    The parser took every positional argument as optional, and the verb got a class for a path.
    """
    with pytest.raises(SystemExit) as stop:
        run_bare([verb])
    assert stop.value.code == ExitCode.BAD_INPUT
    assert f"the following arguments are required: {argument}" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "verb"), [("measure", "sensor"), ("lab", "microbench")])
def test_a_node_without_msgspec_measures(package: str, verb: str) -> None:
    """A bare GPU node has NumPy and PyTorch; msgspec, which reads packed results, may be missing
    there.
    """
    code = (
        f"import sys; sys.modules['msgspec'] = None; from wattcast.{package}.__main__ import main; "
        "main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert verb in done.stdout
