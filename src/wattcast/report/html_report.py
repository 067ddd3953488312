"""Write one prediction as a single HTML file to send to a colleague.

The file has no script and fetches nothing: a content-security policy inside it forbids both, and
all text is escaped, so that opening a report is safe whatever the names in it are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Unpack

import numpy as np

from wattcast import __version__
from wattcast.core import files
from wattcast.core.errors import MissingTool, WattcastError
from wattcast.core.units import show
from wattcast.hardware import Gpu
from wattcast.predictor import answer_lines
from wattcast.predictor.answer_lines import AnswerLine, judge_confidence, list_answers, round_number
from wattcast.predictor.api import SettingKeywords
from wattcast.report.configuration_view import ConfigurationView, view_configuration
from wattcast.report.figure_style import Figure, encode_figure
from wattcast.report.prediction_figures import (
    draw_clock_curves,
    draw_figure,
    draw_pareto,
    label_views,
)
from wattcast.report.text_tables import describe_clock
from wattcast.workload.model_options import ModelOptions

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)  # that print pages
PAPERS = ("A4", "Letter")


class HtmlMarkup(str):
    """Markup that may stand in a page as it is; any other text is escaped."""


def join_markup(*pieces: object) -> HtmlMarkup:
    """Join pieces one after another, and escape those that are not markup."""
    return HtmlMarkup("".join(p if isinstance(p, HtmlMarkup) else escape(str(p)) for p in pieces))


def make_element(name: str, *inside: object, **attributes: str) -> HtmlMarkup:
    """Make one element; ``class_`` writes ``class``."""
    said = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return HtmlMarkup(f"<{name}{said}>{join_markup(*inside)}</{name}>")


def make_html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> HtmlMarkup:
    """Make a table whose first column names the row and whose other columns are right-aligned
    numbers.
    """
    top = make_element("tr", *(make_element("th", cell, scope="col") for cell in head))
    body = [
        make_element(
            "tr",
            make_element("th", row[0], scope="row"),
            *(make_element("td", cell) for cell in row[1:]),
        )
        for row in rows
    ]
    table = make_element("table", make_element("thead", top), make_element("tbody", *body))
    return make_element("div", table, class_="wide", tabindex="0")


def embed_figure(figure: Figure, label: str) -> HtmlMarkup:
    """Embed a figure as inline SVG, with a label for those who cannot see it."""
    svg = encode_figure(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    attributes = f' role="img" aria-label="{escape(label)}"'
    prefix = (
        re.sub(r"[^a-z0-9]", "", label.lower())[:24] + "-"
    )  # ids must differ from those of other drawings
    named = re.sub(
        r'(\bid="|href="#|url\(#)', rf"\1{prefix}", svg.replace("<svg", f"<svg{attributes}", 1)
    )
    return make_element("figure", HtmlMarkup(named))


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
MOST_REPORT_OPS = 20
_FIGURES = {"latency_s": "s", "power_w": "W", "energy_j": "J"}  # of operators
_COMPARED = {"total_power_w": "W", "total_energy_j": "J", "latency_s": "s", "clock_hz": "Hz"}


def build_report(
    workload: Any,
    gpus: Sequence[Gpu],
    options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
    how: str = "",
    **settings: Unpack[SettingKeywords],
) -> str:
    """Build the page: the first GPU at length, and the others compared with it at their own clock
    and limit.

    ``how`` is the command that made it.
    """
    main = view_configuration(workload, gpus[0], options, **settings)
    others: dict[str, ConfigurationView | str] = {}
    settings |= {"clock": None, "power_limit": None}
    for gpu in gpus[1:]:
        try:
            others[gpu.name] = view_configuration(workload, gpu, options, **settings)
        except WattcastError as error:
            others[gpu.name] = str(error)
    return build_report_page(main, others, how)


def build_report_page(
    main: ConfigurationView, others: Mapping[str, ConfigurationView | str], how: str
) -> str:
    """Build the page of a configuration and of others, each a view or the reason why there is none."""
    p = main.prediction
    title = f"{p.name} on {p.gpu}"
    seen = [main, *(o for o in others.values() if isinstance(o, ConfigurationView))][:8]
    compared = (
        embed_figure(draw_clock_curves(seen), "clock curves compared")
        if len(seen) > 1
        else HtmlMarkup("")
    )
    roof = make_element("p", "No operator of this workload does arithmetic.")
    if any(o.op.flop for o in p.ops):
        roof = embed_figure(draw_figure("roofline", main), f"roofline of {title}")
    sections = [
        (
            "Where the power goes",
            embed_figure(draw_figure("breakdown", main), f"power breakdown of {title}"),
        ),
        ("Over the clock", embed_figure(draw_figure("clocks", main), f"clock curves of {title}")),
        ("Beside others", _write_others(main, others)),
    ]
    details = [
        ("Does it fit?", _write_memory(main)),
        ("Modules and operators", _write_breakdown(main)),
        ("Over time", embed_figure(draw_figure("timeline", main), f"power over time of {title}")),
        ("Against the roof", roof),
        ("Clock curves compared", compared),
        (
            "Assumed",
            make_element(
                "ul", *(make_element("li", note) for note in answer_lines.rank_assumptions(p))
            ),
        ),
        ("Where it comes from", _write_provenance(main, how)),
    ]
    body, appendix = (
        [
            make_element("section", make_element("h2", name), inside)
            for name, inside in part
            if inside
        ]
        for part in (sections, details)
    )
    template, style = (
        files("wattcast.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css")
    )
    return Template(template).substitute(
        policy=POLICY,
        style=style,
        title=escape(title),
        conclusion=escape(conclude_view(main)),
        main=join_markup(_write_summary(main), *body),
        appendix=join_markup(*appendix),
    )


def conclude_view(seen: ConfigurationView) -> str:
    """Return the conclusion in three sentences: the answer, what decides it, and what a clock would
    change.
    """
    p = seen.prediction
    said = {line.label: line for line in list_answers(seen.prediction)}
    speed = (
        f"runs at {said['throughput'].value}"
        if "throughput" in said
        else f"takes {said['latency'].value}"
    )
    cost = f" and {said['cost'].value}" if "cost" in said else ""
    answer = f"It {speed}, draws {said['total power'].value} in all and takes {said['energy'].value}{cost}."
    first, second = sorted(p.modules, key=lambda m: -float(m.power_w))[:2]
    shares = " and ".join(
        f"{m.name} ({float(m.power_w) / float(p.power_w):.0%})" for m in (first, second)
    )
    waits = 1.0 - float(p.busy_s) / float(p.latency_s)
    fits = {True: "it fits", False: "it does not fit", None: "whether it fits is unknown"}[p.fits]
    held = answer_lines.describe_cap(p)
    waiting = (
        f"the GPU waits for the host {waits:.0%} of the time"
        if waits > answer_lines.MUCH_WAITING
        else ""
    )
    cause = (
        "; ".join(filter(None, [f"Most of the power goes to {shares}", held, waiting, fits])) + "."
    )
    best = int(np.argmin(seen.clocks["energy_j"]))
    saved = 1.0 - float(seen.clocks["energy_j"][best]) / float(p.energy_j)
    slower = float(seen.clocks["latency_s"][best]) / float(p.latency_s) - 1.0
    clock = show(float(seen.clocks["clock_hz"][best]), "Hz", 3)
    trade = f"At {clock} it would take {saved:.0%} less energy and {slower:.0%} more time"
    trade = trade if saved > 0.02 else "No other clock would take much less energy"
    return f"{answer} {cause} {trade}; these numbers are {judge_confidence(p).value}."


def _write_summary(seen: ConfigurationView) -> HtmlMarkup:
    """Return the answer in tiles, as the first screen of ``predict`` gives it, and the clock."""
    p = seen.prediction
    held = describe_clock(p) or "as asked for"
    clock = AnswerLine("clock", show(float(p.clock_hz), "Hz"), held)
    tiles = []
    for line in (*list_answers(p), clock, judge_confidence(p), answer_lines.support_line(p)):
        said = make_element("span", line.label, class_="name"), make_element("strong", line.value)
        tiles.append(make_element("div", *said, make_element("span", line.remark), class_="tile"))
    note = f"{p.interval.level:.0%} intervals below the numbers."
    return join_markup(make_element("div", *tiles, class_="tiles"), make_element("p", note))


def _write_memory(seen: ConfigurationView) -> HtmlMarkup:
    room = seen.room
    p = seen.prediction
    capacity = show(room.capacity_byte, "byte")
    if room.footprint is None:
        said = "A list of operators does not say what it holds;"
        if p.memory_byte is not None:
            said = f"{'Yes' if p.fits else 'No'}: the list states {show(p.memory_byte, 'byte')},"
        return make_element("p", f"{said} the {p.gpu} has {capacity}.")
    held = room.footprint
    sizes = {name: float(value) for name, value in vars(held).items() if value} | {
        "total": float(held.total_byte)
    }
    rows = [
        (name.removesuffix("_byte").replace("_", " "), show(byte, "byte"))
        for name, byte in sizes.items()
    ]
    fits = held.fits(room.capacity_byte)
    answer = make_element("strong", "Yes" if fits else "No", class_="yes" if fits else "no")
    many = (
        ""
        if room.largest_batch is None
        else f" The largest batch that fits is {room.largest_batch:,}."
    )
    said = f": {show(float(held.total_byte), 'byte')} of {capacity}. The CUDA context comes on top.{many}"
    return join_markup(make_element("p", answer, said), make_html_table(("held", "bytes"), rows))


def _write_breakdown(seen: ConfigurationView) -> HtmlMarkup:
    p = seen.prediction
    modules = []
    for m in p.modules:
        busy = "" if m.utilisation is None else f"{float(m.utilisation):.1%}"
        share = f"{float(m.power_w) / float(p.power_w):.1%}"
        modules.append((m.name, show(float(m.power_w), "W", 3), share, busy))
    ranked = p.rank_ops()
    ops = []
    for o in ranked[:MOST_REPORT_OPS]:
        figures = (show(float(getattr(o, name)), unit, 3) for name, unit in _FIGURES.items())
        ops.append((o.op, f"{o.count:,}", *figures, f"{float(o.energy_j) / float(p.energy_j):.1%}"))
    rest = f"{len(ranked) - MOST_REPORT_OPS} smaller operators are not listed."
    by_module = make_html_table(("module", "power", "share", "utilisation"), modules)
    by_operator = make_html_table(("operator", "calls", "time", "power", "energy", "share"), ops)
    whose = (
        make_element("p", f"Of one of {p.gpu_count} GPUs, which are taken to do the same.")
        if p.gpu_count > 1
        else ""
    )
    return join_markup(
        whose,
        by_module,
        by_operator,
        make_element("p", rest) if len(ranked) > MOST_REPORT_OPS else "",
    )


def _write_others(
    main: ConfigurationView, others: Mapping[str, ConfigurationView | str]
) -> HtmlMarkup:
    if not others:
        return HtmlMarkup("")
    seen = [main, *(o for o in others.values() if isinstance(o, ConfigurationView))]
    named = {label: look.prediction for label, look in zip(label_views(seen), seen, strict=True)}
    rows = []
    for label, p in named.items():
        unit, units_a_run = p.basis.graph.unit
        speed = f"{round_number(units_a_run / float(p.latency_s), 4)} {unit}s/s"
        each = f"{show(float(p.total_energy_j) / units_a_run, 'J')}/{unit}"
        figures = (show(float(getattr(p, name)), shown) for name, shown in _COMPARED.items())
        fits = {True: "fits", False: "does not fit", None: "unknown"}[p.fits]
        rows.append((label, str(p.gpu_count), speed, each, *figures, fits, p.status))
    titles = (
        "",
        "GPUs",
        "speed",
        "energy each",
        "total power",
        "total energy",
        "latency",
        "clock",
        "memory",
    )
    pieces = [make_html_table((*titles, "coefficients"), rows)]
    if refused := [
        make_element("li", f"{name}: {why}") for name, why in others.items() if isinstance(why, str)
    ]:
        pieces.append(make_element("ul", *refused))
    if len(seen) > 1:
        points = {
            label: (1e3 * float(p.latency_s), float(p.total_energy_j)) for label, p in named.items()
        }
        many = any(p.gpu_count > 1 for p in named.values())
        energy = "Energy of all GPUs (J)" if many else "Energy (J)"
        figure = draw_pareto(points, "Latency (ms)", energy, main.prediction.name, "predicted")
        pieces.append(embed_figure(figure, "by latency and energy"))
    return join_markup(*pieces)


def _write_provenance(seen: ConfigurationView, how: str) -> HtmlMarkup:
    p = seen.prediction
    said = {
        "coefficients": p.status,
        "source": p.provenance.source,
        "device": p.provenance.device,
        "date of the fit": p.provenance.date,
        "note": p.provenance.note,
        "GPU": f"{seen.gpu.name}: {seen.gpu.title}",
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Wattcast {__version__}",
        "made by": how,
    }
    known = (
        (make_element("dt", name), make_element("dd", value))
        for name, value in said.items()
        if value
    )
    return make_element("dl", *(piece for pair in known for piece in pair))


def print_report(page: str, paper: str = "A4") -> bytes:
    """Print a page of ``build_report`` as PDF on A4 or Letter, through the Chromium or Chrome of
    this machine.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise MissingTool(
            "a PDF needs Chromium or Chrome, and neither is here. Write .html and print it elsewhere."
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "report.html")
        printed = Path(folder, "report.pdf")
        source.write_text(page.replace("@page {", f"@page {{ size: {paper};", 1), encoding="utf-8")
        options = [
            "--headless",
            "--disable-gpu",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile",
        ]
        if getattr(os, "geteuid", lambda: 1)() == 0:
            options.append("--no-sandbox")  # Chromium has none for root; the page has no script
        command = [browser, *options, f"--print-to-pdf={printed}", source.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if not printed.exists():
            raise MissingTool(f"{browser} printed nothing: {done.stderr.strip()[-200:]}")
        return printed.read_bytes()
