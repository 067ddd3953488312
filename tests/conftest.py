"""Shared fixtures. Nothing here needs a GPU; what needs reference data skips, saying so."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from wattcast.cli.environment import Environment
from wattcast.cli.main import main
from wattcast.reference import reference_folder

ROOT = Path(__file__).resolve().parent.parent
settings.register_profile("wattcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wattcast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What polls the stand-in NVML library runs in real time: a run of its own, beside nothing else."""
    for item in items:
        if "standin" in getattr(item, "fixturenames", ()):
            item.add_marker("realtime")


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of independent measurements, or a skip that says it is not here."""
    folder = reference_folder(os.environ, ROOT)
    if folder is None:
        pytest.skip("no reference data: set WATTCAST_REFERENCE or put it in ../shared/reference")
    return folder


class Called:
    """What a command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call():
    """Call the command line in this process: ``call("predict", ...)`` -> code, out, err."""

    def run(*argv: str) -> Called:
        env = Environment(io.StringIO(), io.StringIO(), dict(os.environ))
        code = main(argv, env)
        return Called(int(code), env.stdout.getvalue(), env.stderr.getvalue())

    return run
