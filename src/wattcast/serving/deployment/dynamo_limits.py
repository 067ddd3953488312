"""Tell Dynamo's power agent the power limit of each worker's GPUs.

NVIDIA Dynamo (ai-dynamo 1.6) reads one annotation of a worker's pods, whole watts per GPU. It is
written on the components of a ``DynamoGraphDeployment`` (v1beta1), below ``podTemplate.metadata``;
the operator puts it on pods, the power agent of each node sets the limit, and the planner counts
its power budget by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from wattcast.core import bad_value

ANNOTATION = "dynamo.nvidia.com/gpu-power-limit"
KIND = "DynamoGraphDeployment"


def parse_limits(text: str) -> dict[str, str]:
    """Return the texts of limits by component: ``decode=350W,prefill=500W``.

    >>> parse_limits("decode=350W,prefill=500W")
    {'decode': '350W', 'prefill': '500W'}
    """
    limits = {}
    for part in text.split(","):
        name, sign, limit = part.strip().partition("=")
        if not (name and sign and limit) or name in limits:
            raise bad_value("--limits", "COMPONENT=WATTS, such as decode=350W,prefill=500W", text)
        limits[name] = limit
    return limits


def annotate_deployment(
    text: str,
    where: str,
    limits_w: Mapping[str, float],
) -> str:
    """Return a manifest whose components, by name or type, have the annotation.

    Other documents of the file are left as they are. A name that fits no component is an error: a
    worker without a limit would be left out of the planner's budget without a word."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        raise bad_value(where, "a YAML manifest", "another text") from None
    graphs = [each for each in documents if isinstance(each, dict) and each.get("kind") == KIND]
    if not graphs:
        raise bad_value(where, f"a {KIND}", "none")
    unused = dict(limits_w)
    for graph in graphs:
        for component in _list_components(graph, where):
            for key in (str(component.get("name")), str(component.get("type"))):
                if key in limits_w:
                    _annotate(component, limits_w[key])
                    unused.pop(key, None)
                    break
    if unused:
        names = ", ".join(
            str(component.get("name"))
            for graph in graphs
            for component in _list_components(graph, where)
        )
        raise bad_value("--limits", f"components of {where} ({names})", ", ".join(unused))
    return yaml.safe_dump_all(documents, sort_keys=False)


def _list_components(graph: dict[str, Any], where: str) -> list[dict[str, Any]]:
    spec = graph.get("spec")
    components = spec.get("components") if isinstance(spec, dict) else None
    if not isinstance(components, list) or not all(isinstance(each, dict) for each in components):
        raise bad_value(f"{where}: spec.components", "a list, as in nvidia.com/v1beta1", "none")
    return components


def _annotate(component: dict[str, Any], limit_w: float) -> None:
    """Write the limit in whole watts, rounded down: a budget is kept."""
    place = component
    for key in ("podTemplate", "metadata", "annotations"):
        inner = place.get(key)
        if not isinstance(inner, dict):
            inner = {}
            place[key] = inner
        place = inner
    place[ANNOTATION] = str(int(limit_w))
