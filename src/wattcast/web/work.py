"""Requests answered: bytes in, bytes out, in a process that may be ended at any time.

Nothing here opens a file that a request names. Parsed uploads and whole answers are remembered, a few of each.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import PurePath

import msgspec

from wattcast import hardware
from wattcast.errors import BadInput, WattcastError, bad_value, clip
from wattcast.fitted import Bundle, bundle_for
from wattcast.hardware import Gpu
from wattcast.report.draw import clocks_of, draw
from wattcast.report.figure import encoded
from wattcast.report.look import Look, Room, Settings, look, room
from wattcast.report.page import document
from wattcast.report.plain import predictions_out
from wattcast.web import tell
from wattcast.web.ask import Configuration, Figure, Several, check_shape, read
from wattcast.workload import from_huggingface, from_json, from_profiler, models
from wattcast.workload.graph import Graph
from wattcast.workload.models import Model
from wattcast.workload.options import Options

JSON, CSV, HTML = "application/json", "text/csv; charset=utf-8", "text/html; charset=utf-8"
TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
MOST_OPERATORS = 20_000  # entries of an uploaded list, repeats not counted
REMEMBERED, REMEMBERED_BYTE = 256, 64 << 20


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    type: str
    body: bytes


def answer(kind: str, body: bytes) -> Answer:
    """The answer to a request; never raises, and never tells of the inside."""
    try:
        return KINDS[kind](body)
    except WattcastError as error:
        return _refusal(422, str(error))
    except (RecursionError, MemoryError):
        return _refusal(422, "the request asks for more than this server gives one request.")
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return _refusal(500, "internal error; the server's log says more.")


def _refusal(status: int, text: str) -> Answer:
    return Answer(status, JSON, msgspec.json.encode(tell.ErrorOut(clip(text, 2000))))


def _catalogue(body: bytes) -> Answer:
    return Answer(200, JSON, msgspec.json.encode(tell.catalogue()))


def _predict(body: bytes) -> Answer:
    asked: Several = read(body, Several)
    seen = [_look(c) for c in asked.configurations]
    return Answer(200, JSON, msgspec.json.encode(predictions_out([look.prediction for look in seen])))


def _view(body: bytes) -> Answer:
    return Answer(200, JSON, msgspec.json.encode(tell.view(_look(read(body, Configuration)))))


def _room(body: bytes) -> Answer:
    asked: Configuration = read(body, Configuration)
    return Answer(200, JSON, msgspec.json.encode(tell.room(_held(asked))))


def _csv(body: bytes) -> Answer:
    asked: Several = read(body, Several)
    return Answer(200, CSV, tell.operators_csv([_look(c) for c in asked.configurations]))


def _figure(body: bytes) -> Answer:
    asked: Figure = read(body, Figure)
    if asked.format not in TYPES:
        raise bad_value("format", f"one of {', '.join(TYPES)}", asked.format)
    if asked.figure == "clocks":
        drawn = clocks_of([_look(c) for c in asked.configurations])
    else:
        drawn = draw(asked.figure, _look(asked.configurations[0]))
    return Answer(200, TYPES[asked.format], encoded(drawn, asked.format))


def _report(body: bytes) -> Answer:
    asked: Several = read(body, Several)
    first = asked.configurations[0]
    main = replace(_look(first), room=_held(first))
    others: dict[str, Look | str] = {
        f"{index}: {c.gpu}": _look(c) for index, c in enumerate(asked.configurations[1:], start=2)
    }
    page = document(main, others, "wattcast serve", datetime.now(UTC))
    return Answer(200, HTML, page.encode())


def _look(asked: Configuration) -> Look:
    settings = Settings(asked.clock_hz, asked.power_limit_w, asked.host_launch_s, asked.temperature_c, asked.data)
    work = _workload(asked)
    options = Options() if isinstance(work, Graph) else asked.options()
    gpu, fitted = _card(asked.gpu)
    return look(work, gpu, options, settings, sized=False, fitted=fitted)


def _held(asked: Configuration) -> Room:
    work = _workload(asked)
    return room(work if isinstance(work, Model) else None, _card(asked.gpu)[0], asked.options())


@lru_cache(maxsize=64)
def _card(name: str) -> tuple[Gpu, Bundle]:
    """A catalogue GPU, never a file, and its coefficients."""
    gpu = hardware.load(name)
    return gpu, bundle_for(gpu)


def _workload(asked: Configuration) -> Model | Graph:
    if (asked.model is None) == (asked.file is None):
        raise bad_value("request", "either a model or a file", "both" if asked.model else "neither")
    if asked.model is not None:
        return models.load(asked.model)
    assert asked.file is not None
    content = bytes(asked.file.content)
    label = clip(PurePath(asked.file.name.replace("\\", "/")).name or "upload", 60)
    return _uploaded(hashlib.sha256(content).digest(), label, content)


_uploads: OrderedDict[tuple[bytes, str], Model | Graph] = OrderedDict()


def _uploaded(digest: bytes, label: str, content: bytes) -> Model | Graph:
    """An upload, parsed once."""
    key = (digest, label)
    if key not in _uploads:
        _uploads[key] = parse_upload(label, content)
        while len(_uploads) > 16:
            _uploads.popitem(last=False)
    _uploads.move_to_end(key)
    return _uploads[key]


def parse_upload(label: str, content: bytes) -> Model | Graph:
    """JSON that a user dropped on the page: a Hugging Face configuration, a profiler trace, a list of operators."""
    check_shape(content, label)
    plain = msgspec.json.decode(content)
    if not isinstance(plain, (dict, list)):
        raise bad_value(label, "a JSON object or list", type(plain).__name__)
    keys = set(plain) if isinstance(plain, dict) else set()
    if keys & {"model_type", "architectures"}:
        return from_huggingface.parse(content, label, label.removesuffix(".json"))
    graph = from_profiler.parse(content, label).graph if "traceEvents" in keys else from_json.parse(content, label)
    count = sum(len(block.ops) for block in graph.blocks)
    if count > MOST_OPERATORS:
        raise BadInput(f"{label}: {count:,} operators; over HTTP at most {MOST_OPERATORS:,}. Use the command line.")
    return graph


KINDS: dict[str, Callable[[bytes], Answer]] = {
    "catalogue": _catalogue,
    "predict": _predict,
    "view": _view,
    "room": _room,
    "csv": _csv,
    "figure": _figure,
    "report": _report,
}


class Remembering:
    """Answers kept by request, within a number of bytes: the same question costs nothing the second time."""

    def __init__(self, most: int = REMEMBERED, most_byte: int = REMEMBERED_BYTE) -> None:
        self._most, self._most_byte = most, most_byte
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()
        self._byte = 0

    def __call__(self, kind: str, body: bytes) -> Answer:
        key = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = answer(kind, body)
        if found.status == 200 and kind != "report":  # a report carries the time it was written
            self._kept[key] = found
            self._byte += len(found.body)
            while self._kept and (len(self._kept) > self._most or self._byte > self._most_byte):
                _, dropped = self._kept.popitem(last=False)
                self._byte -= len(dropped.body)
        return found


def warm(names: Sequence[str] = ("h200",)) -> None:
    """Make the first request as quick as later ones."""
    for name in names:
        answer("view", msgspec.json.encode({"gpu": name, "model": "gpt2", "seq": 128}))
