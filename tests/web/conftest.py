"""A real server, and the system's Chromium."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Server

sys.path.insert(0, str(Path(__file__).parent.parent / "standin"))

from standin import StandIn, compile_library

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
FLAGS += "--disable-component-update --disable-sync --force-color-profile=srgb".split()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"no {name}: pip install 'wattcast[serve]'")
    # a time limit that no busy machine meets: what costs too much must be refused by its cost
    running = Server("--live", "replay", "--limit", "600s")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def browser():
    """Chromium, or a skip that says what is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser, server: Server):
    """``open_page(width=..., scheme=...)`` -> a loaded page; complaints of the browser fail the test at its end."""
    contexts, complaints = [], []

    def opened(address: str = "/", width: int = 1280, scheme: str = "light", wait: bool = True, height: int = 900):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(60_000)  # the machine may be busy
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url + address)
        if wait:
            page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    real = [text for text in complaints if "status of 422" not in text and "ERR_FAILED" not in text]  # on purpose
    assert not real, real


@pytest.fixture(scope="session")
def standin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standin")
    if compile_library(folder) is None:
        pytest.skip("no C compiler to build the stand-in NVML library")
    return folder


@pytest.fixture
def standin(standin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in NVML library; child processes of the test meet it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    made = StandIn(standin_folder, tmp_path / "script.txt")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    made.follow("at -10 300 1980 0 45 60")
    return made
