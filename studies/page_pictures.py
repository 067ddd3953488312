"""Take the pictures of the page in docs/images: every tab with its first example, and the first
screen on a phone.

Run: ``python studies/page_pictures.py docs/images`` (needs the extras ``serve`` and ``dev``, and
Chromium)."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ANSWERED = {  # tab -> what stands on the screen once it has answered
    "predict": "document.querySelector('#roof circle.mark') && !document.querySelector('#answer.stale')",
    "compare": "document.querySelectorAll('#why svg').length >= 2",
    "plan": "/simulated/.test(document.querySelector('#plan-said').textContent)",
    "simulate": "document.querySelector('#p-simulate:not(.stale) svg')",
    "train": "document.querySelector('#p-train:not(.stale) svg')",
    "live": "document.querySelectorAll('#p-live svg circle').length > 50",
}
TOAST_MS = 9000  # until a notice has gone


def take_pictures(address: str, folder: Path) -> None:
    """Save one picture of each tab, 1440 pixels wide, and the first screen of a phone in the dark."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 800}, bypass_csp=True)
        page.set_default_timeout(300_000)  # the machine may be busy
        page.goto(address)
        for tab, ready in ANSWERED.items():
            page.click(f"#tab-{tab}")
            if tab == "live":
                page.click("#p-live button >> nth=1")
                page.wait_for_timeout(3000)
                page.click("#p-live button >> nth=0")
            page.wait_for_function(f"Boolean({ready})", timeout=600_000)
            page.wait_for_timeout(TOAST_MS)
            name = "page" if tab == "predict" else f"page-{tab}"
            save_picture(page.screenshot(full_page=True), folder / f"{name}.webp", 1100)
        phone = browser.new_page(
            viewport={"width": 390, "height": 844}, color_scheme="dark", bypass_csp=True
        )
        phone.goto(address)
        phone.wait_for_function(f"Boolean({ANSWERED['predict']})", timeout=600_000)
        save_picture(phone.screenshot(), folder / "page-phone.webp", 390)
        browser.close()


def save_picture(data: bytes, path: Path, width: int) -> None:
    """Write a picture as WebP, scaled to a width."""
    picture: Any = Image.open(io.BytesIO(data)).convert("RGB")
    picture = picture.crop(
        (0, 0, picture.width, min(picture.height, picture.width)) if width > 1000 else None
    )
    picture.resize(
        (width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS
    ).save(path, quality=82, method=6)


def main(folder: Path) -> None:
    """Start the server on a free port, take the pictures and stop it."""
    command = [
        sys.executable,
        "-m",
        "wattcast",
        "serve",
        "--port",
        "0",
        "--limit",
        "60s",
        "--live",
        "replay",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            take_pictures(re.findall(r"http://[\d.:]+/", server.stdout.readline())[0], folder)
        finally:
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
