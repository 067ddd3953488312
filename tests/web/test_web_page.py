"""The page in a real browser: every control, comparing, links, uploads good and bad, downloads, themes, widths."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

# Every control, what is done to it, and the field of the request it must set.
CONTROLS = [
    ("model", "select", "gpt2", "model", "gpt2"),
    ("gpu", "select", "h100-sxm", "gpu", "h100-sxm"),
    ("batch", "fill", "4", "batch", 4),
    ("seq", "fill", "512", "seq", 512),
    ("dtype", "select", "fp16", "dtype", "fp16"),
    ("attention", "select", "eager", "attention", "eager"),
    ("stack", "select", "compiled", "stack", "compiled"),
    ("data", "select", "zeros", "data", "zeros"),
    ("head", "select", "all", "head", "all"),
    ("tp", "fill", "2", "tp", 2),
    ("host", "fill", "5", "host_launch_s", 5e-6),
    ("temperature", "fill", "60", "temperature_c", 60),
    ("phase", "select", "generate", "phase", "generate"),
    ("tokens", "fill", "16", "tokens", 16),
    ("clock", "range", "1200000000", "clock_hz", 1.2e9),
    ("limit", "range", "400", "power_limit_w", 400),
]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
LIST = {"name": "<b>my</b> list", "ops": [{"op": "linear", "m": 512, "n": 4096, "k": 4096, "count": 8}]}


def until(page, expression: str, argument: object = None, limit_s: float = 60.0) -> None:
    """Wait for a JavaScript expression to hold. Playwright's own way evaluates text, which the page forbids."""
    code = expression if "=>" in expression.split("(")[0] or expression.startswith("(") else f"() => {expression}"
    end_s = time.monotonic() + limit_s
    while not page.evaluate(code, argument):
        assert time.monotonic() < end_s, f"never: {expression}; the page says: {page.inner_text('body')[:600]}"
        page.wait_for_timeout(20)


def act(page, how: str, at: str, value: str) -> None:
    if how == "select":
        page.select_option(f"#{at}", value)
    elif how == "fill":
        page.fill(f"#{at}", value)
    else:
        page.eval_on_selector(
            f"#{at}", "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", value
        )


def value_of(page, name: str, index: int = 0) -> str:
    return page.eval_on_selector(
        f".set[data-index='{index}']",
        "(e, name) => [...e.children].find(d => d.firstChild.textContent === name).children[1].textContent",
        name,
    )


def settled(page) -> None:
    until(page, "document.querySelectorAll('.set').length && !document.querySelector('.set.stale')")


def test_it_loads_and_says_what_predict_says(open_page, call) -> None:
    page = open_page()
    p = json.loads(call("predict", "llama3-8b", "--gpu", "h200", "--batch", "8", "--seq", "1024", "--json").out)
    energy_j = p["predictions"][0]["energy_j"]
    assert abs(float(value_of(page, "energy").split()[0]) / energy_j - 1) < 1e-3
    assert page.locator("#breakdown rect").count() > 20
    assert page.locator("#clocks path.line").count() == 1
    assert "h200" in page.inner_text("#tiles h3")
    until(page, "document.querySelector('#tiles').textContent.includes('largest batch')")
    names = page.eval_on_selector_all(
        "input, select, button", "all => all.filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))"
    )
    assert names == [], "every control has a name"


def test_every_control_changes_the_request_and_the_picture(open_page) -> None:
    page = open_page()
    page.click("#controls details > summary")
    sent: list[dict] = []
    page.on("request", lambda r: sent.append(json.loads(r.post_data)) if r.url.endswith("/api/view") else None)
    for at, how, value, field, wanted in CONTROLS:
        before = page.inner_html("#results")
        if at == "model":  # the wanted values below are the defaults of no model
            sent.clear()
        act(page, how, at, value)
        until(
            page,
            "old => !document.querySelector('.set.stale') && document.querySelector('#results').innerHTML !== old",
            before,
        )
        assert page.locator("#errors p").count() == 0, (at, page.inner_text("#errors"))
        assert sent[-1][field] == wanted, at
    assert {"clock_hz", "power_limit_w", "tokens", "phase", "seq"} <= set(sent[-1])
    assert page.inner_text("#clock-said") == "1.2 GHz"
    page.check("#clock-free")
    settled(page)
    assert "clock_hz" not in sent[-1]


def test_a_slider_moved_quickly_ends_at_its_last_value(open_page) -> None:
    page = open_page()
    for hertz in range(600, 1800, 30):
        act(page, "range", "clock", str(hertz * 1_000_000))
    until(
        page,
        "document.querySelector('.set').textContent.includes('1.77 GHz') || "
        "document.querySelector('.set').textContent.includes('power limit')",
    )
    settled(page)
    act(page, "range", "clock", "600000000")
    until(page, "document.querySelector('.set').textContent.includes('600 MHz')")


def test_up_to_four_are_compared_and_a_link_restores_them(open_page) -> None:
    page = open_page()
    for gpu in ("h100-sxm", "a100-sxm-80gb", "l40s"):
        page.click("#add")
        page.select_option("#gpu", gpu)
        until(page, "gpu => [...document.querySelectorAll('.set h3')].at(-1).textContent.includes(gpu)", gpu)
    assert page.locator("#add").count() == 0
    assert page.locator("#clocks path.line").count() == 4
    settled(page)
    shown = page.inner_text("#tiles")
    page.click("#share")
    until(page, "document.querySelector('#told').textContent.includes('ink') ")
    link = page.evaluate("location.hash")
    again = open_page("/" + link, width=1280)
    until(again, "document.querySelectorAll('.set b').length === 24 && !document.querySelector('.set.stale')")
    assert strip(again.inner_text("#tiles")) == strip(shown)
    assert again.input_value("#gpu") == "l40s"
    again.click("#remove")
    assert again.locator(".set").count() == 3


def strip(tiles: str) -> str:
    """Without what arrives later."""
    return "\n".join(line.partition("; largest batch")[0] for line in tiles.splitlines())


@pytest.mark.parametrize("hash_", ["#garbage", "#eyJ2IjoxLCJjIjpbXX0", "#%00", "#" + "A" * 5000])
def test_a_broken_link_shows_the_default(open_page, hash_: str) -> None:
    page = open_page("/" + hash_)
    assert "llama3-8b" in page.inner_text("#tiles h3")


def test_a_hostile_link_stays_text(open_page) -> None:
    hostile = {"v": 1, "c": [{"model": "<img src=x onerror=alert(1)>", "gpu": "h200"}], "s": 99}
    page = open_page(wait=False)
    coded = page.evaluate(
        "s => btoa(s).replaceAll('+','-').replaceAll('/','_').replaceAll('=','')", json.dumps(hostile)
    )
    again = open_page("/#" + coded, wait=False)
    again.wait_for_selector("#errors p")
    assert "<img" in again.inner_text("#errors")
    assert again.locator("img").count() == 0


def test_uploads_good_and_bad(open_page, tmp_path: Path) -> None:
    page = open_page()
    for name, content in (("config.json", CONFIG), ("list.json", LIST)):
        (tmp_path / name).write_text(json.dumps(content))
        page.set_input_files("#file", str(tmp_path / name))
        until(page, "name => document.querySelector('#told').textContent.includes(name)", name)
        settled(page)
        assert page.inner_text("#model option:checked") == f"uploaded: {name}"
    assert "<b>my</b> list" in page.inner_text("#tiles h3")
    assert page.locator("#tiles h3 b").count() == 0
    assert page.is_disabled("#batch")
    before = page.inner_text("#tiles")
    bad = {
        "broken.json": ('{"name": ', "not valid JSON"),
        "number.json": ("17", "object or list"),
        "unknown.json": ('{"name": "x", "ops": [{"op": "conjure"}]}', "conjure"),
        "strange.json": (json.dumps(CONFIG | {"hidden_size": "big"}), "hidden_size"),
        "deep.json": ("[" * 100 + "]" * 100, "nesting"),
        "large.json": ('{"name": "x", "ops": [' + " " * 2_100_000 + "]}", "at most"),
    }
    for name, (text, said) in bad.items():
        (tmp_path / name).write_text(text)
        page.set_input_files("#file", str(tmp_path / name))
        until(page, "said => document.querySelector('#errors').textContent.includes(said)", said)
        assert page.inner_text("#tiles") == before, "a bad file leaves what was shown"


def test_a_file_may_be_dropped(open_page) -> None:
    page = open_page()
    page.evaluate(
        """content => {
          const data = new DataTransfer();
          data.items.add(new File([content], "dropped.json", {type: "application/json"}));
          const how = {dataTransfer: data, bubbles: true, cancelable: true};
          document.getElementById("drop").dispatchEvent(new DragEvent("drop", how));
        }""",
        json.dumps(LIST),
    )
    until(page, "document.querySelector('#told').textContent.includes('dropped.json')")


def test_downloads(open_page, tmp_path: Path) -> None:
    page = open_page("/")
    page.select_option("#model", "gpt2")
    settled(page)
    page.click("#downloads > summary")
    wanted = {"json": b"{", "csv": b"configuration,workload", "figure": b"<?xml", "report": b"<!doctype html>"}
    for what, start in wanted.items():
        with page.expect_download() as found:
            page.click(f"#get-{what}")
        path = tmp_path / found.value.suggested_filename
        found.value.save_as(path)
        assert path.read_bytes().startswith(start), what
    assert json.loads((tmp_path / "wattcast.json").read_text())["predictions"][0]["gpu"] == "h200"
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto((tmp_path / "wattcast-report.html").as_uri())
    assert page.inner_text("h1").startswith("gpt2")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "the report fits a phone too"


def test_it_works_by_keyboard_alone(open_page) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#clock")
    page.keyboard.press("Home")
    until(page, "document.querySelector('.set').textContent.includes('345 MHz')")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.set').textContent.includes('360 MHz')")
    page.focus("#add")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.set').length === 2")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    for _ in range(60):  # everything that can be clicked can be reached
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "live-start":
            break
    assert page.evaluate("document.activeElement.id") == "live-start"


def test_a_recorded_run_plays_on_the_axes_of_its_prediction(open_page) -> None:
    page = open_page()
    page.click("#live-same")
    until(page, "document.querySelector('#tiles h3').textContent.includes('recorded linear')")
    settled(page)
    page.click("#live-start")
    until(page, "document.querySelectorAll('#live-power circle.dot').length >= 20")
    until(page, "document.querySelector('#live-start').textContent === 'Again'")
    assert page.locator("#live-power path.line").count() == 1
    assert page.locator("#live-power .band").count() == 1
    assert page.locator("#live-clock circle.dot").count() > 10
    assert page.locator("#live-energy circle.dot").count() >= 20


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_reads_well_at_every_width_and_in_both_themes(open_page, width: int, scheme: str) -> None:
    page = open_page(width=width, scheme=scheme)
    page.click("#add")
    until(page, "document.querySelectorAll('.set b').length === 12")
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing makes the page scroll sideways"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.querySelector('.set span')).{c}") for c in ("color", "color")
    )
    assert ink == paper
    assert contrast(page, ".set span", ".set") >= 4.5
    assert contrast(page, "#live-about", "body") >= 4.5
    folder = os.environ.get("WATTCAST_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"page-{width}-{scheme}.png"), full_page=True)
    page.select_option("#theme", "dark" if scheme == "light" else "light")
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)") != dark


def contrast(page, text: str, behind: str) -> float:
    """WCAG contrast of a text's colour on an element's background."""

    def luminance(selector: str, what: str) -> float:
        colour = page.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{what}")
        channels = [int(c) / 255 for c in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pair = sorted([luminance(text, "color"), luminance(behind, "backgroundColor")])
    return (pair[1] + 0.05) / (pair[0] + 0.05)
