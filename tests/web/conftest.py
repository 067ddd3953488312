"""A real server in a process of its own, and the system's Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="no FastAPI: pip install 'wattcast[serve]'")
pytest.importorskip("uvicorn", reason="no uvicorn: pip install 'wattcast[serve]'")

SOURCE = Path(__file__).resolve().parents[2] / "src"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
FLAGS += "--disable-component-update --disable-sync --force-color-profile=srgb".split()


class Server:
    """``wattcast serve`` on a free port; what it said is in ``said``."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "wattcast", "serve", "--port", "0", *arguments]
        paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, f"the server ended: {self.said}"
            self.said.append(line)
            found = re.search(r"http://\S+?:(\d+)/", line)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr or []), daemon=True)
        self._reader.start()

    def stop(self) -> int:
        """Interrupt it as Ctrl-C would, and wait."""
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server("--live", "replay", "--limit", "60s")
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

    def opened(address: str = "/", width: int = 1280, scheme: str = "light", wait: bool = True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(60_000)  # the machine may be busy
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url + address)
        if wait:
            page.wait_for_selector(".set b")
            page.wait_for_selector("#timeline svg path")
        return page

    yield opened
    for context in contexts:
        context.close()
    real = [text for text in complaints if "status of 422" not in text]  # bad input is answered so, on purpose
    assert not real, real
