"""What operators deploy: manifests, Prometheus rules and Slurm's prolog and epilog."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from standin_node import PATIENCE_S, USUAL, Client, Node

from wattcast import __version__

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "wattcast.yaml").read_text()))
RULES = DEPLOY / "prometheus" / "wattcast-rules.yaml"
SETS = {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == "DaemonSet"}


def find_container(name: str) -> Any:
    (container,) = SETS[name]["spec"]["template"]["spec"]["containers"]
    return container


def test_kubernetes_takes_the_manifests() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: pip install 'wattcast[dev]'"
    )
    assert len(MANIFESTS) == 3
    for manifest in MANIFESTS:
        for version in ("1.30", validate.latest_version()):
            validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", ["wattcast-exporter", "wattcast-daemon"])
def test_commands_in_the_manifests_exist_with_their_options(name: str, call: Any) -> None:
    arguments = find_container(name)["args"]
    words = [word for word in arguments if not word.startswith("-")][:2]
    shown = call(*words, "--help")
    assert shown.code == 0
    options = {word for word in arguments if word.startswith("--")}
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", shown.out))


def test_the_exporter_needs_no_privilege_and_the_daemon_keeps_its_notes() -> None:
    exporter = find_container("wattcast-exporter")["securityContext"]
    assert exporter["runAsNonRoot"]
    assert exporter["capabilities"] == {"drop": ["ALL"]}
    daemon = SETS["wattcast-daemon"]["spec"]["template"]["spec"]
    (mount,) = find_container("wattcast-daemon")["volumeMounts"]
    (volume,) = daemon["volumes"]
    assert mount["mountPath"] == volume["hostPath"]["path"] == "/run/wattcast"
    assert daemon["terminationGracePeriodSeconds"] >= 30


def test_rules_use_metrics_that_the_exporter_has(call: Any, tmp_path: Path) -> None:
    line = "export prometheus --workload gpt2 --gpu h200 --seq 64 --source none --once --jobs"
    exported = set(re.findall(r"^# TYPE (\S+)", call(*line.split(), str(tmp_path)).out, re.M))
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    asked = set()
    for rule in rules:
        asked |= set(re.findall(r"\b[a-z_:]*wattcast[a-z_:0-9]*", rule["expr"]))
    assert len(asked - recorded) >= 5
    assert asked - recorded <= exported


def test_promtool_takes_the_rules_and_alerts_fire_when_they_are_to() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)
    tests = RULES.with_name("wattcast-rules-test.yaml")
    done = subprocess.run([promtool, "test", "rules", str(tests)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


CHART = DEPLOY / "helm" / "wattcast"


def render_chart(*values: str) -> list[Any]:
    """Return the manifests of the chart with some values set."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("no helm: https://helm.sh/docs/intro/install")
    settings = [part for value in values for part in ("--set", value)]
    done = subprocess.run(
        [helm, "template", "gpus", str(CHART), "--namespace", "watts", *settings],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@pytest.mark.parametrize("labels", ["true", "false"])
def test_the_chart_renders_manifests_that_kubernetes_takes(labels: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    manifests = render_chart(
        "daemon.enabled=true", "daemon.clocks=900MHz:1980MHz", f"exporter.podLabels={labels}"
    )
    assert [each["kind"] for each in manifests] == ["DaemonSet", "DaemonSet"]
    for manifest in manifests:
        validate.validate(manifest, "1.30", strict=True)
        assert manifest["metadata"]["namespace"] == "watts"
    (rules,) = [
        each for each in render_chart("rules.enabled=true") if each["kind"] == "PrometheusRule"
    ]
    assert rules["spec"] == yaml.safe_load(RULES.read_text())


def test_the_chart_has_the_rules_and_the_version_of_the_package() -> None:
    assert (CHART / "rules" / RULES.name).read_bytes() == RULES.read_bytes()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_options_in_the_chart_exist(call: Any) -> None:
    """Templates are read as text here; what they render needs Helm."""
    for name, words in (("exporter", "export prometheus"), ("daemon", "manage daemon")):
        template = (CHART / "templates" / f"{name}.yaml").read_text()
        options = set(re.findall(r"^ +- (--[a-z-]+)$", template, re.M))
        assert len(options) >= 2
        assert options <= set(re.findall(r"--[a-z-]+", call(*words.split(), "--help").out))


def test_a_slurm_job_is_charged_its_joules_and_leaves_no_card_changed(node: Node) -> None:
    """Two cards of the node, of which the job has the second one; its card was left set."""
    node.standin.follow(USUAL, "devices 2")
    program = node.folder / "wattcast"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m wattcast "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    jobs = node.folder / "jobs"
    environment = {
        **node.environment,
        "PATH": f"{node.folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "53",
        "SLURM_JOB_GPUS": "1",
        "WATTCAST_JOBS": str(jobs),
        "WATTCAST_SOCKET": str(node.socket),
    }
    script = DEPLOY / "slurm" / "wattcast-slurm.sh"

    def run(context: str) -> None:
        subprocess.run(
            ["sh", str(script)],
            env={**environment, "SLURM_SCRIPT_CONTEXT": context},
            check=True,
            timeout=2 * PATIENCE_S,
        )

    node.serve()
    begun_s = time.monotonic()
    run("prolog_slurmd")
    with Client(node) as left:
        uuid = f"{node.uuid}-1"
        left.node.uuid, first = uuid, node.uuid
        assert left.ask("claim")["ok"]
        assert left.ask("set", core_hz=1.2e9)["ok"]
        time.sleep(2.0)
        run("epilog_slurmd")
        node.uuid = first
    longest_s = time.monotonic() - begun_s
    assert (node.folder / "card.1").read_text().split()[:2] == ["0", "0"]
    header, line = (jobs / "53.csv").read_text().splitlines()
    assert header == "job,gpu,uuid,energy_j"
    job, gpu, charged, energy_j = line.split(",")
    assert (job, gpu, charged) == ("53", "1", uuid)
    assert 300.0 * 2.0 <= float(energy_j) <= 300.0 * (longest_s + 1.0)
    assert [path.name for path in jobs.iterdir()] == ["53.csv"]


def test_a_job_without_gpus_is_not_charged(node: Node) -> None:
    jobs = node.folder / "jobs"
    environment = {**os.environ, "SLURM_JOB_ID": "54", "WATTCAST_JOBS": str(jobs)}
    for context in ("prolog_slurmd", "epilog_slurmd"):
        script = str(DEPLOY / "slurm" / "wattcast-slurm.sh")
        subprocess.run(
            ["sh", script], env={**environment, "SLURM_SCRIPT_CONTEXT": context}, check=True
        )
    assert not (jobs / "54.csv").exists()
