"""One prediction as a single HTML file to send to a colleague: no script, nothing fetched, everything escaped.

A content-security policy inside the file forbids scripts and every request, so that opening a report is safe
whatever the names in it are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from wattcast import __version__
from wattcast.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.report import predicted
from wattcast.report.draw import clocks_of, draw, labels
from wattcast.report.html import Html, drawing, join, table, tag
from wattcast.report.look import Look, Settings, look
from wattcast.units import show
from wattcast.workload.options import Options

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
MOST_OPS = 20


def report(
    workload: Any,
    gpus: Sequence[Gpu],
    options: Options = Options(),  # noqa: B008  (frozen)
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    how: str = "",
    now: datetime | None = None,
) -> str:
    """The page: the first GPU at length, the others beside it at their own clock and power limit.

    ``how`` is the command that made it.
    """
    main = look(workload, gpus[0], options, settings)
    others: dict[str, Look | str] = {}
    for gpu in gpus[1:]:
        try:
            others[gpu.name] = look(workload, gpu, options, replace(settings, clock=None, power_limit=None))
        except WattcastError as error:
            others[gpu.name] = str(error)
    return document(main, others, how, now or datetime.now(UTC))


def document(main: Look, others: Mapping[str, Look | str], how: str, now: datetime) -> str:
    """The page of what was seen; others are looks, or why there is none."""
    p = main.prediction
    title = f"{p.name} on {p.gpu}"
    sections = [
        ("Summary", _summary(main)),
        ("Does it fit?", _room(main)),
        ("Where the power goes", _breakdown(main)),
        ("Over time", drawing(draw("timeline", main), f"power over time of {title}")),
        ("Against the roof", _roofline(main)),
        ("Over the clock", drawing(draw("clocks", main), f"clock curves of {title}")),
        ("Beside others", _others(main, others)),
        ("How sure this is", _sure(main)),
        ("Assumed", tag("ul", *(tag("li", note) for note in p.assumptions))),
        ("Where it comes from", _provenance(main, how, now)),
    ]
    places = [f"s{i}" for i in range(len(sections))]
    links = [tag("a", name, href=f"#{at}") for at, (name, _) in zip(places, sections, strict=True)]
    body = [
        tag("section", tag("h2", name, id=at), inside)
        for at, (name, inside) in zip(places, sections, strict=True)
        if inside.text
    ]
    style = Html(files("wattcast.report").joinpath("report.css").read_text(encoding="utf-8"))
    head = join(
        [
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            tag("title", f"{title}: Wattcast"),
            tag("style", style),
        ]
    )
    page = tag("body", tag("header", tag("h1", title), tag("nav", *links)), tag("main", *body))
    return f'<!doctype html>\n<html lang="en"><head>{head.text}</head>{page.text}</html>\n'


def _summary(seen: Look) -> Html:
    p = seen.prediction
    ends = {"latency": (p.latency_s, p.interval.latency_s, "s"), "power": (p.power_w, p.interval.power_w, "W")}
    ends["energy"] = (p.energy_j, p.interval.energy_j, "J")
    tiles = [
        _tile(name, show(float(value), unit), f"{show(float(low), unit, 3)} to {show(float(high), unit, 3)}")
        for name, (value, (low, high), unit) in ends.items()
    ]
    held = "held down by the power limit" if bool(p.capped) else "as asked for"
    tiles.append(_tile("clock", show(float(p.clock_hz), "Hz"), held))
    waiting = 1.0 - float(p.busy_s) / float(p.latency_s)
    note = (
        f"{p.interval.level:.0%} intervals below the numbers. The GPU waits for the host {waiting:.1%} of the time."
    )
    return join([tag("div", *tiles, class_="tiles"), tag("p", note)])


def _tile(name: str, value: str, below: str) -> Html:
    return tag("div", tag("span", name, class_="name"), tag("strong", value), tag("span", below), class_="tile")


def _room(seen: Look) -> Html:
    room, p = seen.room, seen.prediction
    capacity = show(room.capacity_byte, "byte")
    if room.footprint is None:
        if p.memory_byte is None:
            return tag("p", f"A list of operators does not say what it holds; the {p.gpu} has {capacity}.")
        verdict = "Yes" if p.fits else "No"
        return tag("p", f"{verdict}: the list states {show(p.memory_byte, 'byte')}, the {p.gpu} has {capacity}.")
    held = room.footprint
    rows = [
        (name.removesuffix("_byte").replace("_", " "), show(float(value), "byte"))
        for name, value in vars(held).items()
        if value
    ]
    rows.append(("total", show(float(held.total_byte), "byte")))
    fits = held.fits(room.capacity_byte)
    answer = tag("strong", "Yes" if fits else "No", class_="yes" if fits else "no")
    many = "" if room.largest_batch is None else f" The largest batch that fits is {room.largest_batch:,}."
    said = f": {show(float(held.total_byte), 'byte')} of {capacity}. The CUDA context comes on top.{many}"
    return join([tag("p", answer, said), table(("held", "bytes"), rows)])


def _breakdown(seen: Look) -> Html:
    p = seen.prediction
    modules = [
        (
            m.name,
            show(float(m.power_w), "W", 3),
            f"{float(m.power_w) / float(p.power_w):.1%}",
            "" if m.utilisation is None else f"{float(m.utilisation):.1%}",
        )
        for m in p.modules
    ]
    ranked = sorted(p.ops, key=lambda o: -float(o.energy_j))
    ops = [
        (
            o.op,
            f"{o.count:,}",
            show(float(o.latency_s), "s", 3),
            show(float(o.power_w), "W", 3),
            show(float(o.energy_j), "J", 3),
            f"{float(o.energy_j) / float(p.energy_j):.1%}",
        )
        for o in ranked[:MOST_OPS]
    ]
    rest = f"{len(ranked) - MOST_OPS} smaller operators are not listed." if len(ranked) > MOST_OPS else ""
    return join(
        [
            drawing(draw("breakdown", seen), f"power breakdown of {p.name} on {p.gpu}"),
            table(("module", "power", "share", "utilisation"), modules),
            table(("operator", "calls", "time", "power", "energy", "share"), ops),
            tag("p", rest) if rest else "",
        ]
    )


def _roofline(seen: Look) -> Html:
    if not any(o.op.flop for o in seen.prediction.ops):
        return tag("p", "No operator of this workload does arithmetic.")
    return drawing(draw("roofline", seen), f"roofline of {seen.prediction.name} on {seen.prediction.gpu}")


def _others(main: Look, others: Mapping[str, Look | str]) -> Html:
    if not others:
        return Html("")
    seen = [main, *(o for o in others.values() if isinstance(o, Look))]
    named = dict(zip(labels(seen), seen, strict=True))
    rows = [
        (
            label,
            show(float(s.prediction.latency_s), "s"),
            show(float(s.prediction.power_w), "W"),
            show(float(s.prediction.energy_j), "J"),
            show(float(s.prediction.clock_hz), "Hz"),
            {True: "fits", False: "does not fit", None: "unknown"}[s.prediction.fits],
            s.prediction.status,
        )
        for label, s in named.items()
    ]
    points = {k: (1e3 * float(s.prediction.latency_s), float(s.prediction.energy_j)) for k, s in named.items()}
    refused = [tag("li", f"{name}: {why}") for name, why in others.items() if isinstance(why, str)]
    pieces = [
        table(("", "latency", "power", "energy", "clock", "memory", "coefficients"), rows),
        tag("ul", *refused) if refused else "",
    ]
    if len(seen) > 1:
        figure = predicted.pareto(points, "Latency (ms)", "Energy (J)", main.prediction.name, "predicted")
        pieces += [drawing(figure, "by latency and energy"), drawing(clocks_of(seen[:8]), "clock curves compared")]
    return join(pieces)


def _sure(seen: Look) -> Html:
    p = seen.prediction
    rows = [
        (name, show(float(value), unit), show(float(low), unit), show(float(high), unit))
        for name, value, (low, high), unit in (
            ("latency", p.latency_s, p.interval.latency_s, "s"),
            ("power", p.power_w, p.interval.power_w, "W"),
            ("energy", p.energy_j, p.interval.energy_j, "J"),
        )
    ]
    inside = "Inside" if p.support.inside else "Outside"
    return join(
        [
            table(("", "predicted", "low", "high"), rows, f"{p.interval.level:.0%} intervals"),
            tag("p", f"{inside} what was measured: {p.support.reason}."),
        ]
    )


def _provenance(seen: Look, how: str, now: datetime) -> Html:
    p = seen.prediction
    said = {
        "coefficients": p.status,
        "source": p.provenance.source,
        "device": p.provenance.device,
        "date of the fit": p.provenance.date,
        "note": p.provenance.note,
        "GPU": f"{seen.gpu.name}: {seen.gpu.title}",
        "written": f"{now:%Y-%m-%d %H:%M} UTC by Wattcast {__version__}",
        "made by": how,
    }
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in said.items() if value))
