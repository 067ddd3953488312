"""The Grafana dashboard, as far as it can be checked without a Grafana server.

That the file fits Grafana's own types (``Dashboard`` of the npm package ``@grafana/schema``,
compiled with ``tsc --strict``) was checked once by hand, docs/how-to/operators.md; what can break
with our own metrics is checked here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import parser
from test_metrics_exporter import Clock, FakeSource, card

from wattcast.predictor import api
from wattcast.web.metrics_exporter import model_workload, write_metrics

SELECTOR = re.compile(r"(wattcast_\w+)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
LABEL_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")
VARIABLE = re.compile(r"\$\{?([a-z]\w*)")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(files("wattcast.web").joinpath("grafana.json").read_bytes())


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample names of a real exposition, of a card that tells everything and one workload, with
    their labels.
    """
    source, clock = FakeSource(), Clock()
    source.throttle = 4.0
    options = {"batch": 1, "seq": 128}
    p = api.predict("gpt2", "h200", **options)
    model = model_workload("gpt2", api.find_gpu("h200"), p, "5%", **options)
    text = write_metrics([card(source, clock)], [model]).decode()
    found: dict[str, set[str]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def targets(board: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel, target


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def test_every_metric_and_label_is_one_the_exporter_gives(board, exported) -> None:
    asked = 0
    for panel, target in targets(board):
        selectors = SELECTOR.findall(target["expr"])
        assert selectors, target["expr"]
        for metric, matchers in selectors:
            assert metric in exported, (panel["title"], metric)
            assert matchers.count('"') == 2 * len(MATCHER.findall(matchers))
            assert set(MATCHER.findall(matchers)) <= exported[metric], (panel["title"], matchers)
            asked += 1
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
        assert shown <= exported[selectors[0][0]], (panel["title"], target["legendFormat"])
    assert asked >= len(board["panels"])


def test_variables_are_defined_used_and_filled_from_labels_there_are(board, exported) -> None:
    known = variables(board)
    assert (
        known["datasource"] | {"type": "datasource", "query": "prometheus"} == known["datasource"]
    )
    used = set(
        VARIABLE.findall(json.dumps([board["panels"], list(known.values())]).replace("$__all", ""))
    )
    assert used == set(known)
    for name, variable in known.items():
        if variable["type"] == "query":
            ((metric, label),) = LABEL_VALUES.findall(variable["query"])
            assert label in exported[metric], name


def test_every_panel_and_query_reads_from_the_chosen_data_source(board) -> None:
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for panel, target in targets(board):
        assert panel["datasource"] == target["datasource"] == wanted, panel["title"]


def test_numbers_are_unique_and_panels_do_not_overlap(board) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]
        box = panel["gridPos"]
        assert box["x"] >= 0 < box["w"], panel["title"]
        assert box["x"] + box["w"] <= 24, panel["title"]
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one["title"], other["title"])


def test_only_counters_are_differenced(board) -> None:
    for _, target in targets(board):
        for metric in re.findall(r"(?:rate|increase)\((\w+)", target["expr"]):
            assert metric.endswith("_total")
        bare = re.sub(r"(?:rate|increase)\([^)]*\)", "", target["expr"])
        assert "_total" not in bare, "a counter's level since the driver was loaded says nothing"


def test_every_query_is_promql(board) -> None:
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for _, target in targets(board):
        promql.parse(VARIABLE.sub(".*", target["expr"]))
