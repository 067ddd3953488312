"""The image and its neighbours, where Docker runs: ``python -m pytest -m slow
tests/test_containers.py``.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE, GRAFANA = "http://127.0.0.1:8080", "http://127.0.0.1:3000"
WITHOUT_A_GPU = """
services:
  exporter:
    gpus: !reset null
    command: [export, prometheus, --host, 0.0.0.0, --allow-host, exporter, --source, none, --workload, llama3-8b,
              --gpu, h200, --batch, "8", --seq, "1024"]
  grafana:
    environment: {GF_AUTH_ANONYMOUS_ENABLED: "true"}
"""


def fetch(address: str) -> dict:
    asked = urllib.request.Request(address)
    if address.startswith(GRAFANA):
        asked.add_header("authorization", "Basic " + base64.b64encode(b"admin:admin").decode())
    with urllib.request.urlopen(asked, timeout=5) as answer:
        return json.load(answer)


def wait_for(question: Callable[[], object], limit_s: float = 180.0) -> object:
    """Return the first true answer; the last error when none comes."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            if found := question():
                return found
        except OSError:
            if time.monotonic() > end_s:
                raise
        assert time.monotonic() < end_s, "no answer in time"
        time.sleep(2.0)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Image built, everything started, and ended after the last test."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no Docker: containers are built where it runs")
    more = tmp_path_factory.mktemp("compose") / "no-gpu.yaml"
    more.write_text(WITHOUT_A_GPU, encoding="utf-8")
    compose = [
        docker,
        "compose",
        "-p",
        "wattcast-test",
        "-f",
        str(ROOT / "deploy" / "compose.yaml"),
        "-f",
        str(more),
    ]
    try:
        subprocess.run([*compose, "up", "--build", "--detach"], check=True, cwd=ROOT)
        yield compose
    finally:
        subprocess.run([*compose, "down", "--volumes"], cwd=ROOT)


@pytest.mark.slow
def test_the_page_is_healthy_and_not_root(services: list[str]) -> None:
    assert "wattcast" in wait_for(lambda: fetch(f"{PAGE}/api/health"))
    who = subprocess.run(
        [*services, "exec", "page", "id", "-un"], capture_output=True, text=True, check=True
    )
    assert who.stdout.strip() == "wattcast"


@pytest.mark.slow
def test_grafana_shows_the_dashboard_with_numbers(services: list[str], tmp_path: Path) -> None:
    (found,) = wait_for(lambda: fetch(f"{GRAFANA}/api/search?query=wattcast"))
    assert found["uid"] == "wattcast"
    (source,) = wait_for(lambda: fetch(f"{GRAFANA}/api/datasources"))
    query = f"{GRAFANA}/api/datasources/proxy/uid/{source['uid']}/api/v1/query?query=wattcast_model_power_watts"
    wait_for(lambda: fetch(query)["data"]["result"])
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install 'wattcast[dev]'"
    )
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{GRAFANA}/d/wattcast?kiosk")
        page.get_by_text("Power: measured and predicted").wait_for(timeout=60_000)
        page.wait_for_timeout(3000)
        picture = page.screenshot(path=tmp_path / "dashboard.png")
        browser.close()
    assert len(picture) > 20_000
