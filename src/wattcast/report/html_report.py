"""Write one prediction as a single HTML file to send to a colleague.

The file has no script and fetches nothing: a content-security policy inside it forbids both, and
all text is escaped, so that opening a report is safe whatever the names in it are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
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
from wattcast.options.keywords import SettingKeywords
from wattcast.predictor import answer_lines
from wattcast.predictor.answer_lines import (
    AnswerLine,
    judge_confidence,
    list_answers,
    round_number,
)
from wattcast.predictor.prediction import Prediction
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

# Browsers that print pages.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAPERS = ("A4", "Letter")


class HtmlMarkup(str):
    """Markup that may stand in a page as it is; any other text is escaped."""


def join_markup(*pieces: object) -> HtmlMarkup:
    """Join pieces one after another, and escape those that are not markup."""
    return HtmlMarkup("".join(map(_as_markup, pieces)))


def _as_markup(piece: object) -> str:
    return piece if isinstance(piece, HtmlMarkup) else escape(str(piece))


def make_element(
    name: str,
    *inside: object,
    **attributes: str,
) -> HtmlMarkup:
    """Make one element; ``class_`` writes ``class``."""
    pairs = [f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items()]
    return HtmlMarkup(f"<{name}{''.join(pairs)}>{join_markup(*inside)}</{name}>")


def make_html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> HtmlMarkup:
    """Make a table; its first column names the row, the others are right-aligned numbers."""
    top = make_element("tr", *(make_element("th", cell, scope="col") for cell in head))
    body = []
    for row in rows:
        cells = [make_element("td", cell) for cell in row[1:]]
        body.append(make_element("tr", make_element("th", row[0], scope="row"), *cells))
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
    svg = svg.replace("<svg", f"<svg{attributes}", 1)
    # ids must differ from those of other drawings
    prefix = re.sub(r"[^a-z0-9]", "", label.lower())[:24] + "-"
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}", svg)
    return make_element("figure", HtmlMarkup(svg))


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
MOST_REPORT_OPS = 20
MOST_COMPARED = 8  # configurations in one figure
_LEAST_SAVING = 0.02  # share of the energy, below which another clock is not worth naming
_OPERATOR_FIGURES = {
    "latency_s": "s",
    "power_w": "W",
    "energy_j": "J",
}
_COMPARED = {
    "total_power_w": "W",
    "total_energy_j": "J",
    "latency_s": "s",
    "clock_hz": "Hz",
}


def build_report(
    workload: Any,
    gpus: Sequence[Gpu],
    options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
    how: str = "",
    **settings: Unpack[SettingKeywords],
) -> str:
    """Build the page: the first GPU at length, and the others compared with it.

    The others run at their own clock and power limit. ``how`` is the command that made the page.
    """
    main = view_configuration(workload, gpus[0], options, **settings)
    other_views: dict[str, ConfigurationView | str] = {}
    settings |= {"clock": None, "power_limit": None}
    for gpu in gpus[1:]:
        try:
            other_views[gpu.name] = view_configuration(workload, gpu, options, **settings)
        except WattcastError as error:
            other_views[gpu.name] = str(error)
    return build_report_page(main, other_views, how)


def build_report_page(
    main: ConfigurationView,
    others: Mapping[str, ConfigurationView | str],
    how: str,
) -> str:
    """Build the page of a configuration and of others, each a view or the reason why there is
    none.
    """
    p = main.prediction
    title = f"{p.name} on {p.gpu}"
    sections = {
        "Where the power goes": embed_figure(
            draw_figure("breakdown", main), f"power breakdown of {title}"
        ),
        "Over the clock": embed_figure(draw_figure("clocks", main), f"clock curves of {title}"),
        "Beside others": _write_others(main, others),
    }
    details = {
        "Does it fit?": _write_memory(main),
        "Modules and operators": _write_breakdown(main),
        "Over time": embed_figure(draw_figure("timeline", main), f"power over time of {title}"),
        "Against the roof": _write_roofline(main, title),
        "Clock curves compared": _write_clock_curves(main, others),
        "Assumed": _write_list(answer_lines.rank_assumptions(p)),
        "Where it comes from": _write_provenance(main, how),
    }
    return Template(_read_shipped("report.html")).substitute(
        policy=POLICY,
        style=_read_shipped("report.css"),
        title=escape(title),
        conclusion=escape(conclude_view(main)),
        main=join_markup(_write_summary(main), _write_sections(sections)),
        appendix=_write_sections(details),
    )


def _read_shipped(name: str) -> str:
    return files("wattcast.report").joinpath(name).read_text(encoding="utf-8")


def _write_sections(sections: Mapping[str, HtmlMarkup]) -> HtmlMarkup:
    """Return sections by their titles; empty ones are left out."""
    pieces = []
    for title, content in sections.items():
        if content:
            pieces.append(make_element("section", make_element("h2", title), content))
    return join_markup(*pieces)


def _write_list(items: Iterable[str]) -> HtmlMarkup:
    return make_element("ul", *(make_element("li", item) for item in items))


def _write_roofline(main: ConfigurationView, title: str) -> HtmlMarkup:
    if any(share.op.flop for share in main.prediction.ops):
        return embed_figure(draw_figure("roofline", main), f"roofline of {title}")
    return make_element("p", "No operator of this workload does arithmetic.")


def _list_views(
    main: ConfigurationView, others: Mapping[str, ConfigurationView | str]
) -> list[ConfigurationView]:
    """Return the configurations that have a prediction."""
    return [main, *(view for view in others.values() if isinstance(view, ConfigurationView))]


def _write_clock_curves(
    main: ConfigurationView, others: Mapping[str, ConfigurationView | str]
) -> HtmlMarkup:
    views = _list_views(main, others)[:MOST_COMPARED]
    if len(views) == 1:
        return HtmlMarkup("")
    return embed_figure(draw_clock_curves(views), "clock curves compared")


def conclude_view(view: ConfigurationView) -> str:
    """Return the conclusion in three sentences.

    They are the answer, what decides it, and what another clock would change.
    """
    answer = _conclude_answer(view.prediction)
    cause = _conclude_cause(view.prediction)
    trade = _conclude_trade(view)
    confidence = judge_confidence(view.prediction).value
    return f"{answer} {cause} {trade}; these numbers are {confidence}."


def _conclude_answer(p: Prediction) -> str:
    """Say how fast the workload runs and what it takes."""
    values = {line.label: line.value for line in list_answers(p)}
    if "throughput" in values:
        speed = f"runs at {values['throughput']}"
    else:
        speed = f"takes {values['latency']}"
    cost = f" and {values['cost']}" if "cost" in values else ""
    power = f"draws {values['total power']} in all"
    return f"It {speed}, {power} and takes {values['energy']}{cost}."


def _conclude_cause(p: Prediction) -> str:
    """Say where the power goes, and what holds the workload back."""
    largest = sorted(p.modules, key=lambda m: -float(m.power_w))[:2]
    shares = []
    for module in largest:
        share = float(module.power_w) / float(p.power_w)
        shares.append(f"{module.name} ({share:.0%})")
    causes = [f"Most of the power goes to {' and '.join(shares)}", answer_lines.describe_cap(p)]
    waiting = 1.0 - float(p.busy_s) / float(p.latency_s)
    if waiting > answer_lines.MUCH_WAITING:
        causes.append(f"the GPU waits for the host {waiting:.0%} of the time")
    verdicts = {
        True: "it fits",
        False: "it does not fit",
        None: "whether it fits is unknown",
    }
    causes.append(verdicts[p.fits])
    return "; ".join(filter(None, causes)) + "."


def _conclude_trade(view: ConfigurationView) -> str:
    """Say at which clock the workload would take least energy, and how much slower it would be."""
    p = view.prediction
    best = int(np.argmin(view.clocks["energy_j"]))
    saved = 1.0 - float(view.clocks["energy_j"][best]) / float(p.energy_j)
    if saved <= _LEAST_SAVING:
        return "No other clock would take much less energy"
    slower = float(view.clocks["latency_s"][best]) / float(p.latency_s) - 1.0
    clock = show(float(view.clocks["clock_hz"][best]), "Hz", 3)
    return f"At {clock} it would take {saved:.0%} less energy and {slower:.0%} more time"


def _write_summary(view: ConfigurationView) -> HtmlMarkup:
    """Return the answer in tiles, as the first screen of ``predict`` gives it, and the clock."""
    p = view.prediction
    clock = AnswerLine("clock", show(float(p.clock_hz), "Hz"), describe_clock(p) or "as asked for")
    tiles = []
    for line in (*list_answers(p), clock, judge_confidence(p), answer_lines.support_line(p)):
        name = make_element("span", line.label, class_="name")
        value = make_element("strong", line.value)
        remark = make_element("span", line.remark)
        tiles.append(
            make_element(
                "div",
                name,
                value,
                remark,
                class_="tile",
            )
        )
    note = f"{p.interval.level:.0%} intervals below the numbers."
    return join_markup(make_element("div", *tiles, class_="tiles"), make_element("p", note))


def _write_memory(view: ConfigurationView) -> HtmlMarkup:
    """Say whether the workload fits, and what it holds in memory."""
    room = view.room
    p = view.prediction
    capacity = show(room.capacity_byte, "byte")
    footprint = room.footprint
    if footprint is None:
        need = "A list of operators does not say what it holds;"
        if p.memory_byte is not None:
            verdict = "Yes" if p.fits else "No"
            need = f"{verdict}: the list states {show(p.memory_byte, 'byte')},"
        return make_element("p", f"{need} the {p.gpu} has {capacity}.")

    sizes = {name: float(value) for name, value in vars(footprint).items() if value}
    sizes["total"] = float(footprint.total_byte)
    rows = []
    for name, byte in sizes.items():
        rows.append((name.removesuffix("_byte").replace("_", " "), show(byte, "byte")))
    fits = footprint.fits(room.capacity_byte)
    verdict = make_element("strong", "Yes" if fits else "No", class_="yes" if fits else "no")
    total = show(float(footprint.total_byte), "byte")
    sentence = f": {total} of {capacity}. The CUDA context comes on top."
    if room.largest_batch is not None:
        sentence += f" The largest batch that fits is {room.largest_batch:,}."
    table = make_html_table(("held", "bytes"), rows)
    return join_markup(make_element("p", verdict, sentence), table)


def _write_breakdown(view: ConfigurationView) -> HtmlMarkup:
    """Return the modules, and the operators that take most energy."""
    p = view.prediction
    modules = []
    for module in p.modules:
        busy = "" if module.utilisation is None else f"{float(module.utilisation):.1%}"
        share = f"{float(module.power_w) / float(p.power_w):.1%}"
        modules.append((module.name, show(float(module.power_w), "W", 3), share, busy))
    ranked = p.rank_ops()
    operators = []
    for row in ranked[:MOST_REPORT_OPS]:
        figures = _show_figures(row, _OPERATOR_FIGURES, 3)
        share = f"{float(row.energy_j) / float(p.energy_j):.1%}"
        operators.append((row.op, f"{row.count:,}", *figures, share))
    titles = ("operator", "calls", "time", "power", "energy", "share")
    pieces = [
        make_html_table(("module", "power", "share", "utilisation"), modules),
        make_html_table(titles, operators),
    ]
    if p.gpu_count > 1:
        whose = f"Of one of {p.gpu_count} GPUs, which are taken to do the same."
        pieces.insert(0, make_element("p", whose))
    if len(ranked) > MOST_REPORT_OPS:
        hidden = len(ranked) - MOST_REPORT_OPS
        pieces.append(make_element("p", f"{hidden} smaller operators are not listed."))
    return join_markup(*pieces)


def _show_figures(
    row: object,
    columns: Mapping[str, str],
    digits: int,
) -> list[str]:
    """Return some attributes of an object in their units."""
    return [show(float(getattr(row, name)), unit, digits) for name, unit in columns.items()]


def _write_others(
    main: ConfigurationView, others: Mapping[str, ConfigurationView | str]
) -> HtmlMarkup:
    """Compare the configurations by speed and energy; empty where there is one only."""
    if not others:
        return HtmlMarkup("")
    views = _list_views(main, others)
    predictions = [view.prediction for view in views]
    named = dict(zip(label_views(views), predictions, strict=True))
    titles = (
        *("", "GPUs", "speed", "energy each"),
        *("total power", "total energy", "latency", "clock", "memory", "coefficients"),
    )
    rows = [(label, *_compare_prediction(p)) for label, p in named.items()]
    pieces = [make_html_table(titles, rows)]
    reasons = [f"{name}: {why}" for name, why in others.items() if isinstance(why, str)]
    if reasons:
        pieces.append(_write_list(reasons))
    if len(views) > 1:
        points = {
            label: (1e3 * float(p.latency_s), float(p.total_energy_j)) for label, p in named.items()
        }
        has_several = any(p.gpu_count > 1 for p in predictions)
        energy = "Energy of all GPUs (J)" if has_several else "Energy (J)"
        figure = draw_pareto(
            points,
            "Latency (ms)",
            energy,
            main.prediction.name,
            "predicted",
        )
        pieces.append(embed_figure(figure, "by latency and energy"))
    return join_markup(*pieces)


def _compare_prediction(p: Prediction) -> list[str]:
    """Return the cells of a prediction that is compared with others."""
    unit, units_a_run = p.basis.graph.unit
    verdicts = {
        True: "fits",
        False: "does not fit",
        None: "unknown",
    }
    return [
        str(p.gpu_count),
        f"{round_number(units_a_run / float(p.latency_s), 4)} {unit}s/s",
        f"{show(float(p.total_energy_j) / units_a_run, 'J')}/{unit}",
        *_show_figures(p, _COMPARED, 4),
        verdicts[p.fits],
        p.status,
    ]


def _write_provenance(view: ConfigurationView, how: str) -> HtmlMarkup:
    """Say where the coefficients come from, and how the page was made."""
    p = view.prediction
    origins = {
        "coefficients": p.status,
        "source": p.provenance.source,
        "device": p.provenance.device,
        "date of the fit": p.provenance.date,
        "note": p.provenance.note,
        "GPU": f"{view.gpu.name}: {view.gpu.title}",
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Wattcast {__version__}",
        "made by": how,
    }
    pieces = []
    for name, value in origins.items():
        if value:
            pieces += [make_element("dt", name), make_element("dd", value)]
    return make_element("dl", *pieces)


def print_report(page: str, paper: str = "A4") -> bytes:
    """Print a page of ``build_report`` as PDF on A4 or Letter, through the Chromium or Chrome of
    this machine.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise MissingTool(
            "a PDF needs Chromium or Chrome, and neither is here. Write .html and print it "
            "elsewhere."
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
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if not printed.exists():
            raise MissingTool(f"{browser} printed nothing: {done.stderr.strip()[-200:]}")
        return printed.read_bytes()
