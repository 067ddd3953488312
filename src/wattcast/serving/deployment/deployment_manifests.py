"""Write manifests of a plan: Kubernetes, and NVIDIA Dynamo where prompts have engines of their own.

The Kubernetes file is a Deployment and a Service. The Dynamo file is a ``DynamoGraphDeployment``
(``nvidia.com/v1alpha1``), whose fields are those of Dynamo's published examples for vLLM.
"""

from __future__ import annotations

import re
from typing import Any

from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.serving.deployment.engine_command import (
    ENGINE_IMAGE,
    PORT,
    EngineCommand,
)
from wattcast.serving.plan_options import PlanOption

Manifest = dict[str, Any]
DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:VERSION"
_GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
_CALM_PROBE_S, _BUSY_PROBE_S = 10, 5  # between two probes
_UNREADY_PROBES, _DEAD_PROBES = 3, 6  # that fail in a row
_START_CHECKS = 180  # of ten seconds each: half an hour to load weights and capture graphs


def name_service(model: str) -> str:
    """Return a name of a model that Kubernetes takes: lower case, digits and dashes.

    >>> name_service("meta-llama/Llama-3.1-8B")
    'llama-3-1-8b'
    """
    last = model.rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return plain[:50].strip("-") or "model"


def fits_a_node(option: PlanOption) -> bool:
    """Say whether an engine fits into one node, so that one pod runs it."""
    node = option.gpu.node or node_of_gpu(option.gpu.name)
    return option.shared.gpu_count <= node.gpu_count


def make_kubernetes_manifests(
    option: PlanOption,
    command: EngineCommand,
    replicas: int,
) -> list[Manifest]:
    """Return a Deployment with a pod a replica, and the Service in front of them.

    The Service spreads connections by chance. Routing by load or by prefix needs a gateway.
    """
    name = name_service(command.model)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "engine"}
    container = {
        "name": "engine",
        "image": ENGINE_IMAGE,
        "args": [command.model, *command.arguments],
        "env": [_make_token_variable()],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {_gpu_resource(option): str(option.shared.gpu_count)}},
        "startupProbe": _make_probe(_CALM_PROBE_S, _START_CHECKS),
        "readinessProbe": _make_probe(_BUSY_PROBE_S, _UNREADY_PROBES),
        "livenessProbe": _make_probe(_CALM_PROBE_S, _DEAD_PROBES),
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  (what NCCL uses)
            {"name": "models", "mountPath": "/root/.cache/huggingface"},
        ],
    }
    volumes = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "models", "emptyDir": {}},
    ]
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(PORT),
        "prometheus.io/path": "/metrics",
        "wattcast/gpu": option.gpu.name,
        "wattcast/setting": option.setting,
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
                "spec": {"containers": [container], "volumes": volumes},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": labels,
            "ports": [
                {
                    "name": "http",
                    "port": PORT,
                    "targetPort": "http",
                }
            ],
        },
    }
    return [deployment, service]


def make_dynamo_manifest(
    option: PlanOption,
    commands: dict[str, EngineCommand],
    replicas: int,
) -> Manifest:
    """Return a Dynamo graph: a front end, and workers that decode, with those for prompts apart.

    ``commands`` are by role: ``prefill`` and ``decode``, or one without a role that does both.
    """
    model = next(iter(commands.values())).model
    counts = {
        "": replicas,
        "prefill": 0,
        "decode": 0,
    }
    if option.pools[0]:
        counts["prefill"] = replicas * option.pools[0]
        counts["decode"] = replicas * option.pools[1]
    front_end = {"image": DYNAMO_IMAGE}
    services: Manifest = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": front_end},
        }
    }
    for role, command in commands.items():
        services[f"Vllm{role.title()}Worker"] = _make_dynamo_worker(
            option, command, role, counts[role]
        )
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name_service(model)},
        "spec": {"services": services},
    }


def _make_dynamo_worker(
    option: PlanOption,
    command: EngineCommand,
    role: str,
    replicas: int,
) -> Manifest:
    """Return the workers of one role. Dynamo's runtime has its own port, so none is given."""
    arguments = list(command.arguments)
    place = arguments.index("--port")
    del arguments[place : place + 2]
    if role:
        arguments.append(f"--is-{role}-worker")
    container = {
        "image": DYNAMO_IMAGE,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", command.model, *arguments],
    }
    worker: Manifest = {
        "envFromSecret": "hugging-face-token",
        "componentType": "worker",
        "replicas": replicas,
        "resources": {"limits": {"gpu": str(option.shared.gpu_count)}},
        "extraPodSpec": {"mainContainer": container},
    }
    if role:
        worker["subComponentType"] = role
    return worker


def _gpu_resource(option: PlanOption) -> str:
    """Return what the device plugin of the GPU's vendor calls a GPU."""
    return _GPU_RESOURCES.get(option.gpu.vendor, _GPU_RESOURCES["NVIDIA"])


def _make_token_variable() -> Manifest:
    """Return the access token of the hub, which only gated models need."""
    secret = {
        "name": "hugging-face-token",
        "key": "HF_TOKEN",
        "optional": True,
    }
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _make_probe(period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
    }
