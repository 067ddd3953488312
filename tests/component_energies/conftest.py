"""A chip to build, and where dumped energies lie."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import typer

from wattcast.cli.environment import Environment
from wattcast.errors import WattcastError
from wattcast.power.component.bottom_up.design import Design, from_architecture
from wattcast.power.component.demo import demo_architecture
from wattcast.reference import reference_folder

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def demo() -> Design:
    """The demo chip."""
    return from_architecture(demo_architecture())


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of dumped energies."""
    folder = reference_folder(os.environ, ROOT)
    if folder is None or not (folder / "accelwattch").is_dir():
        pytest.skip("no dumped energies here (WATTCAST_REFERENCE)")
    return folder


@pytest.fixture
def verb():
    """Call one command module: ``verb(app, *argv)`` -> code, out, err."""

    def run(app: typer.Typer, *argv: str) -> tuple[int, str, str]:
        env = Environment(io.StringIO(), io.StringIO(), dict(os.environ))
        try:
            typer.main.get_command(app).main(list(argv), standalone_mode=False, obj=env)
        except WattcastError as error:
            return int(error.exit_code), env.stdout.getvalue(), env.stderr.getvalue() + str(error)
        return 0, env.stdout.getvalue(), env.stderr.getvalue()

    return run
