"""Replicas that keep a power budget, Dynamo's annotation, and the plug-in of its planner."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from wattcast.cli.main import main
from wattcast.control.planner_power import PlannedTraffic, ReplicaPower
from wattcast.core.errors import BadInput
from wattcast.predictor.api import find_gpu
from wattcast.serving.deployment.dynamo_limits import (
    ANNOTATION,
    annotate_deployment,
    parse_limits,
)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TRAFFIC = PlannedTraffic(30.0, 1000, 200)
GRAPH = """
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
---
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: llama}
spec:
  components:
    - name: Frontend
    - name: VllmDecodeWorker
      type: decode
      podTemplate: {metadata: {annotations: {kept: "yes"}}}
    - name: VllmPrefillWorker
      type: prefill
"""


@pytest.fixture(scope="module")
def power() -> ReplicaPower:
    return ReplicaPower.predict("llama3-8b", find_gpu("h200"))


def test_watts_rise_with_replicas_that_share_the_same_traffic(power: ReplicaPower) -> None:
    watts = [power.sum_watts(TRAFFIC, count) for count in (1, 2, 3, 4, 8)]
    assert (np.diff(watts) > 0).all()
    limit_w = 700.0
    assert watts[0] <= limit_w * 1.01
    busier = PlannedTraffic(60.0, 1000, 200)
    assert power.sum_watts(busier, 8) > watts[-1]


def test_most_replicas_are_those_that_keep_the_budget(power: ReplicaPower) -> None:
    for budget_w in (1000.0, 2000.0, 3000.0):
        most, watts = power.count_most_replicas(TRAFFIC, budget_w, 10)
        assert watts == power.sum_watts(TRAFFIC, most) <= budget_w
        assert power.sum_watts(TRAFFIC, most + 1) > budget_w
    assert power.count_most_replicas(TRAFFIC, 1e6, 5)[0] == 5  # never more than proposed
    assert power.count_most_replicas(TRAFFIC, 1.0, 5)[0] == 1  # never none
    assert power.predict_watts(PlannedTraffic(0.0, 1000, 200)) > 0  # a replica that idles


def test_the_annotation_stands_on_the_pods_of_the_components_named() -> None:
    text = annotate_deployment(GRAPH, "graph.yaml", {"decode": 350.9, "VllmPrefillWorker": 500.0})
    other, graph = yaml.safe_load_all(text)
    assert other["kind"] == "ConfigMap"
    frontend, decode, prefill = graph["spec"]["components"]
    assert "podTemplate" not in frontend
    # Dynamo's planner takes positive whole watts, as text
    assert decode["podTemplate"]["metadata"]["annotations"] == {"kept": "yes", ANNOTATION: "350"}
    assert prefill["podTemplate"]["metadata"]["annotations"] == {ANNOTATION: "500"}
    assert ANNOTATION == "dynamo.nvidia.com/gpu-power-limit"


@pytest.mark.parametrize(
    ("text", "limits", "words"),
    [
        (GRAPH, {"decod": 300.0}, "VllmDecodeWorker"),
        ("kind: Pod\n", {"decode": 300.0}, "DynamoGraphDeployment"),
        ("a: [", {"decode": 300.0}, "YAML"),
        ("kind: DynamoGraphDeployment\nspec: {services: {}}\n", {"decode": 300.0}, "v1beta1"),
    ],
)
def test_a_manifest_that_cannot_be_annotated_is_refused(
    text: str, limits: dict[str, float], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        annotate_deployment(text, "graph.yaml", limits)


def test_the_command_writes_the_manifest(tmp_path: Path, capsys: Any) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text(GRAPH)
    assert main(["export", "dynamo", str(graph), "--limits", "decode=350W"]) == 0
    assert f"{ANNOTATION}: '350'" in capsys.readouterr().out
    out = tmp_path / "out.yaml"
    assert (
        main(["export", "dynamo", str(graph), "--limits", "decode=0.5kW", "--out", str(out)]) == 0
    )
    assert "'500'" in out.read_text()
    capsys.readouterr()
    for limits in ("decode", "decode=350", "decode=0W", "decode=1W,decode=2W"):
        assert main(["export", "dynamo", str(graph), "--limits", limits]) == 2
        assert "--limits" in capsys.readouterr().err
    assert parse_limits("a=1W, b=2W") == {"a": "1W", "b": "2W"}


@pytest.fixture(scope="module")
def messages() -> ModuleType:
    """The protobuf that the planner's own wheel ships."""
    return pytest.importorskip(
        "dynamo.planner.plugins.proto.v1.plugin_pb2",
        reason="no ai-dynamo: the workflow installs it",
    )


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    path = DEPLOY / "dynamo" / "wattcast_planner_plugin.py"
    spec = importlib.util.spec_from_file_location("wattcast_planner_plugin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_request(messages: ModuleType, decode: int | None, requests: float = 1800.0) -> Any:
    request = messages.ConstrainStageRequest()
    traffic = request.context.observations.traffic
    traffic.duration_s, traffic.num_req, traffic.isl, traffic.osl = 60.0, requests, 1000.0, 200.0
    if decode is not None:
        for name, count in (("prefill", 4), ("decode", decode)):
            target = request.context.proposal.targets.add()
            target.sub_component_type = name
            target.replicas = count
    return request


def test_the_plugin_allows_what_keeps_the_budget(
    plugin: ModuleType, messages: ModuleType, power: ReplicaPower
) -> None:
    answer = plugin.constrain(messages, make_request(messages, 10), power, 2000.0)
    again = messages.ConstrainStageResponse.FromString(answer.SerializeToString())
    assert again.WhichOneof("result") == "override"
    (target,) = again.override.targets
    assert (target.sub_component_type, target.type) == ("decode", messages.AT_MOST)
    assert target.replicas == power.count_most_replicas(TRAFFIC, 2000.0, 10)[0]
    assert "as predicted" in again.override.reason


def test_the_plugin_follows_what_is_predicted_of_the_next_interval(
    plugin: ModuleType, messages: ModuleType, power: ReplicaPower
) -> None:
    request = make_request(messages, 10)
    request.context.predictions.predicted_num_req = 60.0
    answer = plugin.constrain(messages, request, power, 2000.0)
    most = answer.override.targets[0].replicas
    assert most > power.count_most_replicas(TRAFFIC, 2000.0, 10)[0]  # less traffic, more replicas


def test_the_plugin_has_no_opinion_without_traffic_or_a_proposal(
    plugin: ModuleType, messages: ModuleType, power: ReplicaPower
) -> None:
    for request in (
        messages.ConstrainStageRequest(),
        make_request(messages, None),
        make_request(messages, 3, requests=0.0),
    ):
        answer = plugin.constrain(messages, request, power, 2000.0)
        assert answer.WhichOneof("result") == "accept"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--power", "banana"), "--power"),
        (("--power", "0W"), "above zero"),
        (("--power", "4kW", "--gpu", "h2000"), "h2000"),
        (("--power", "4kW", "--tp", "3"), "tp"),
    ],
)
def test_the_plugin_tells_a_wrong_option_in_a_sentence(
    plugin: ModuleType, options: tuple[str, ...], word: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["plugin", "--model", "llama3-8b", *options])
    with pytest.raises(SystemExit) as ending:
        plugin.main()
    text = capsys.readouterr().err
    assert ending.value.code == 2
    assert word in text
    assert len(text.splitlines()) == 1
