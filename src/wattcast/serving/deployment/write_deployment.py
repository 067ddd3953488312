"""Write the files of a plan: what to run, what to expect of it, and when to raise an alarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core import units
from wattcast.core.strict_files import encode_json
from wattcast.core.whole_files import write_whole
from wattcast.serving.deployment.alert_rules import make_alert_rules
from wattcast.serving.deployment.deployment_manifests import (
    Manifest,
    fits_a_node,
    make_dynamo_manifest,
    make_kubernetes_manifests,
    name_service,
)
from wattcast.serving.deployment.engine_command import EngineCommand, make_engine_command
from wattcast.serving.deployment.expected_service import ExpectedService, expect_service
from wattcast.serving.plan_options import PlanOption
from wattcast.serving.plan_search import ServingPlan

ENGINE_FILE = "serve.sh"
KUBERNETES_FILE = "kubernetes.yaml"
DYNAMO_FILE = "dynamo.yaml"
EXPECTED_FILE = "expected.json"
ALERTS_FILE = "alerts.yaml"


def write_deployment(
    plan: ServingPlan,
    model: str | Path,
    folder: Path,
) -> tuple[list[Path], list[str]]:
    """Write the files of a plan into a folder; return them, and what has to be known about them."""
    option = plan.option
    commands = make_commands(plan, model)
    first = next(iter(commands.values()))
    notes = list(dict.fromkeys(note for one in commands.values() for note in one.notes))
    if option.gpu.vendor != "NVIDIA":
        notes.append(f"images and card settings are those of NVIDIA GPUs, not of {option.gpu.name}")
    notes.append("add a node selector for your nodes with this card; the plan knows no node names")

    folder.mkdir(parents=True, exist_ok=True)
    expected = expect_service(plan, model)
    texts = {ENGINE_FILE: write_script(plan, commands)}
    header = write_header(plan, notes)
    if option.pools[0]:
        notes.append(f"engines for prompts and decoding need a router: {DYNAMO_FILE} has one")
    elif fits_a_node(option):
        manifests = make_kubernetes_manifests(option, first, plan.replicas)
        texts[KUBERNETES_FILE] = header + dump_yaml(manifests)
    else:
        notes.append(f"{KUBERNETES_FILE} is not written: an engine spans several nodes")
    if fits_a_node(option):
        graph = make_dynamo_manifest(option, commands, plan.replicas)
        texts[DYNAMO_FILE] = header + dump_yaml([graph])
        notes.append(
            f"{DYNAMO_FILE} follows Dynamo's examples (nvidia.com/v1alpha1): set VERSION "
            "of its image"
        )
    else:
        notes.append(f"{DYNAMO_FILE} is not written: an engine spans several nodes")
    texts[EXPECTED_FILE] = write_expected(expected)
    name = name_service(first.model)
    texts[ALERTS_FILE] = header + dump_yaml([make_alert_rules(expected, name)])

    paths = []
    for file, text in texts.items():
        path = folder / file
        write_whole(path, text.encode())
        paths.append(path)
    return paths, notes


def make_commands(plan: ServingPlan, model: str | Path) -> dict[str, EngineCommand]:
    """Return the commands of a replica's engines by role; one engine that does both has none."""
    roles = ("prefill", "decode") if plan.option.pools[0] else ("",)
    spec = plan.demand.model
    return {role: make_engine_command(plan.option, model, spec, role) for role in roles}


def write_script(plan: ServingPlan, commands: dict[str, EngineCommand]) -> str:
    """Return a shell script that sets the cards and starts an engine."""
    lines = ["#!/bin/sh", *_write_comments(plan), *_write_card_settings(plan.option)]
    for role, command in commands.items():
        if role:
            engines = plan.option.pools[role == "decode"]
            lines.append(f"# {engines} of a replica's engines: {role}. Start one a machine.")
        lines += [f"# {note}" for note in command.notes]
        lines += [command.show(), ""]
    return "\n".join(lines)


def write_header(plan: ServingPlan, notes: Sequence[str]) -> str:
    """Return the comments that manifests begin with."""
    settings = [f"# on the node: {line}" for line in _write_card_settings(plan.option)]
    lines = [*_write_comments(plan), *settings, *(f"# {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _write_comments(plan: ServingPlan) -> list[str]:
    demand = plan.demand
    rate = f"{demand.rate_per_s:g} requests/s, {demand.prompt} + {demand.output} tokens"
    return [
        f"# {demand.model.name} at {rate}: {plan.replicas} x {plan.option}",
        f"# at most {plan.option.max_seqs} sequences a step; {plan.gpus} GPUs in all",
    ]


def _write_card_settings(option: PlanOption) -> list[str]:
    """Return the commands that set power limit and highest clock, where they are not the card's."""
    chip = option.gpu
    if chip.vendor != "NVIDIA":
        return []
    lines = []
    top_hz = float(np.max(chip.clocks.max_hz))
    if option.clock_hz < top_hz:
        low = round(float(np.min(chip.clocks.lowest_hz)) / 1e6)
        lines.append(
            f"nvidia-smi --lock-gpu-clocks={low},{round(option.clock_hz / 1e6)}"
            f"  # at most {units.show(option.clock_hz, 'Hz')}"
        )
    if option.power_limit_w < float(np.mean(chip.power.limit_w)):
        lines.append(f"nvidia-smi --power-limit={option.power_limit_w:.0f}")
    return lines


def write_expected(expected: ExpectedService) -> str:
    """Return the text of ``expected.json``."""
    return encode_json(expected).decode() + "\n"


def dump_yaml(documents: Sequence[Manifest | dict[str, Any]]) -> str:
    """Return YAML documents, in the order of their fields."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        """Write what stands twice in full: people edit these files."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    several = len(documents) > 1
    return yaml.dump_all(
        documents,
        Dumper=PlainDumper,
        sort_keys=False,
        explicit_start=several,
    )
