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
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def shared_page(browser):
    """A page that tests use one after another: one that is loaded again takes half the time of a
    new one.
    """
    return open_context(browser).new_page()


def open_context(browser):
    context = browser.new_context(accept_downloads=True)
    context.set_default_timeout(60_000)  # the machine may be busy
    return context


@pytest.fixture
def open_page(browser, shared_page, server: Server):
    """``open_page(width=..., scheme=...)`` -> a loaded page; complaints of the browser fail the
    test at its end.

    The first page of a test is the shared one, which remembers nothing of earlier tests but files
    of the server; further ones, and ``fresh`` ones, have a context of their own."""
    used, complaints = [], []

    def complain(message) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def fail(error) -> None:
        complaints.append(str(error))

    def opened(
        address: str = "/",
        width: int = 1280,
        scheme: str = "light",
        wait: bool = True,
        height: int = 900,
        fresh: bool = False,
    ):
        page = open_context(browser).new_page() if fresh or used else shared_page
        used.append(page)
        page.goto(
            server.url + "/api/health"
        )  # loads the page anew, in the same process of the browser
        everything = {"origin": server.url, "storageTypes": "all"}
        page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", everything)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="no-preference")
        page.on("console", complain)
        page.on("pageerror", fail)
        page.goto(server.url + address)
        if wait:
            page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for page in used:
        if page is not shared_page:
            page.context.close()
        else:
            page.unroute_all()
            page.remove_listener("console", complain)
            page.remove_listener("pageerror", fail)
    real = [
        text for text in complaints if "status of 422" not in text and "ERR_FAILED" not in text
    ]  # on purpose
    assert not real, real


@pytest.fixture(scope="session")
def standin_folder(shared_folder) -> Path:
    with shared_folder("standin") as folder:
        if not (folder / "libnvidia-ml.so.1").exists() and compile_library(folder) is None:
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
