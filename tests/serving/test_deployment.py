"""What a plan writes: an engine's command, manifests, alarms; each held against its schema."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from wattcast.hardware import load_gpu
from wattcast.serving.capacity_plan import plan
from wattcast.serving.deployment.deployment_manifests import (
    fits_a_node,
    make_dynamo_manifest,
    make_kubernetes_manifests,
    name_service,
)
from wattcast.serving.deployment.engine_command import EngineCommand, make_engine_command
from wattcast.serving.deployment.write_deployment import write_deployment
from wattcast.serving.plan_options import ONE_POOL, PlanOption
from wattcast.serving.plan_search import ServingPlan
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="no kubernetes-validate: pip install 'wattcast[dev]'"
)

ARGUMENTS_FILE = Path(__file__).with_name("vllm_arguments.txt")
VLLM_ARGUMENTS = {
    line for line in ARGUMENTS_FILE.read_text(encoding="utf-8").splitlines() if line[:2] == "--"
}
# Fields of a service in Dynamo's published examples for vLLM, agg.yaml and disagg.yaml
DYNAMO_FIELDS = {
    *("componentType", "subComponentType", "replicas", "envFromSecret", "resources"),
    "extraPodSpec",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tp": 4},
    "stages": {"tp": 2, "pp": 2},
    "experts": {"tp": 1, "dp": 8, "ep": 8},
    "fp8": {"quantization": "fp8", "kv_dtype": "fp8"},
    "block": {"quantization": "fp8-block"},
    "awq": {"quantization": "awq"},
    "half": {"dtype": "fp16"},
    "adapters": {"lora": 12, "adapters": 4},
}


def make_option(layout: str = "one", gpu: str = "h200", **changes: Any) -> PlanOption:
    shared = ModelOptions.from_names(**LAYOUTS[layout], stack="engine")
    chip = load_gpu(gpu)
    option = PlanOption(chip, shared, 700.0, 1.98e9, 128, 8192, ONE_POOL)
    return replace(option, **changes)


def make_command(option: PlanOption, role: str = "") -> EngineCommand:
    return make_engine_command(option, "llama3-8b", load_model("llama3-8b"), role)


@pytest.fixture(scope="module")
def small_plan() -> ServingPlan:
    """A plan of one replica, searched among few options."""
    found = plan(
        "llama3-8b", "h200", rate="6/s", prompt=512, output=64, tpot="50ms", tp=(1,), requests=100
    )
    return found.best


@pytest.fixture(scope="module")
def written(small_plan: ServingPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "new"
    paths, _ = write_deployment(small_plan, "llama3-8b", folder)
    names = {path.name for path in paths}
    assert names == {"serve.sh", "kubernetes.yaml", "dynamo.yaml", "expected.json", "alerts.yaml"}
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["", "prefill"])
def test_every_argument_is_one_of_the_engine(layout: str, role: str) -> None:
    command = make_command(make_option(layout), role)
    names = [word for word in command.arguments if word.startswith("--")]
    assert set(names) <= VLLM_ARGUMENTS
    assert len(names) == len(set(names))


def test_an_unknown_argument_is_noticed() -> None:
    """The list holds what the parser takes, and nothing that looks like it."""
    assert len(VLLM_ARGUMENTS) > 200
    assert "--max-batched-tokens" not in VLLM_ARGUMENTS  # our own name
    assert "--max-num-batched-tokens" in VLLM_ARGUMENTS


def test_the_command_says_what_was_simulated() -> None:
    words = make_command(make_option("stages", max_seqs=64, max_tokens=1024)).words
    asked = dict(itertools.pairwise(words))
    assert words[:3] == ("vllm", "serve", "meta-llama/Meta-Llama-3-8B")
    assert asked["--tensor-parallel-size"] == "2"
    assert asked["--pipeline-parallel-size"] == "2"
    assert asked["--max-num-seqs"] == "64"
    assert asked["--max-num-batched-tokens"] == "1024"
    assert asked["--gpu-memory-utilization"] == "0.9"


def test_formats_are_made_while_loading_or_have_to_be_in_the_checkpoint() -> None:
    made = make_command(make_option("fp8"))
    assert dict(zip(made.words, made.words[1:], strict=False))["--quantization"] == "fp8"
    assert made.notes == ()
    packed = make_command(make_option("awq"))
    assert "--quantization" not in packed.words
    assert "checkpoint in awq" in packed.notes[0]
    adapters = make_command(make_option("adapters")).words
    asked = dict(itertools.pairwise(adapters))
    assert asked["--max-lora-rank"] == "16"  # vLLM knows no rank of 12
    assert asked["--max-loras"] == "4"


def test_a_request_that_the_cache_cannot_hold_limits_the_context(small_plan: ServingPlan) -> None:
    """An engine whose cache holds no request of the model's length refuses to start."""
    option = small_plan.option
    assert option.costs is not None
    small = replace(option, costs=replace(option.costs, cache_tokens=4000))
    spec = load_model("llama3-8b")
    command = make_engine_command(small, "llama3-8b", spec)
    asked = dict(zip(command.words, command.words[1:], strict=False))
    most = int(asked["--max-model-len"])
    assert 3900 < most <= 4000
    roomy = make_engine_command(option, "llama3-8b", spec)
    assert "--max-model-len" not in roomy.arguments


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
    ],
)
def test_a_model_has_its_name_on_the_hub(asked: str, name: str) -> None:
    assert make_engine_command(make_option(), asked, load_model(asked)).model == name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_kubernetes_takes_the_manifests(layout: str, gpu: str) -> None:
    option = make_option(layout, gpu)
    for manifest in make_kubernetes_manifests(option, make_command(option), 3):
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_validation_notices_a_wrong_field() -> None:
    option = make_option()
    deployment, _ = make_kubernetes_manifests(option, make_command(option), 3)
    deployment["spec"]["replica"] = deployment["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.30", strict=True)


def test_a_pod_asks_for_the_gpus_of_an_engine() -> None:
    option = make_option("stages")
    deployment, service = make_kubernetes_manifests(option, make_command(option), 3)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert deployment["spec"]["replicas"] == 3
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    amd = make_option(gpu="mi300x")
    deployment, _ = make_kubernetes_manifests(amd, make_command(amd), 1)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "1"}


@pytest.mark.parametrize("pools", [ONE_POOL, (1, 2)])
def test_a_dynamo_graph_has_the_fields_of_published_examples(pools: tuple[int, int]) -> None:
    """The schema of the custom resource is not at hand: fields are those of Dynamo's examples, and
    containers are checked as Kubernetes' own."""
    option = make_option("tensor", pools=pools)
    roles = ("prefill", "decode") if pools[0] else ("",)
    commands = {role: make_command(option, role) for role in roles}
    graph = make_dynamo_manifest(option, commands, 3)
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1alpha1", "DynamoGraphDeployment")
    services = graph["spec"]["services"]
    counts = {name: service["replicas"] for name, service in services.items()}
    if pools[0]:
        assert counts == {"Frontend": 1, "VllmPrefillWorker": 3, "VllmDecodeWorker": 6}
    else:
        assert counts == {"Frontend": 1, "VllmWorker": 3}
    for service in services.values():
        assert set(service) <= DYNAMO_FIELDS
        container = {"name": "main", **service["extraPodSpec"]["mainContainer"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "worker"},
            "spec": {"containers": [container]},
        }
        kubernetes_validate.validate(pod, "1.30", strict=True)
        assert "--port" not in container.get("args", ())


def test_the_written_script_is_a_shell_script(written: Path) -> None:
    script = written / "serve.sh"
    done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = script.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("vllm ")]
    assert shlex.split(line)[:2] == ["vllm", "serve"]


def test_written_manifests_are_valid_once_read_again(written: Path) -> None:
    documents = list(yaml.safe_load_all((written / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)
    assert "&id" not in (written / "kubernetes.yaml").read_text()


def test_alarms_are_rules_that_prometheus_parses(written: Path) -> None:
    rules = yaml.safe_load((written / "alerts.yaml").read_text())
    (group,) = rules["groups"]
    expected = json.loads((written / "expected.json").read_text())
    assert len(group["rules"]) == 3 * len(expected["levels"]) + 1
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        promql_parser.parse(rule["expr"])


def test_alarms_are_raised_at_the_upper_end_of_the_load(written: Path) -> None:
    (group,) = yaml.safe_load((written / "alerts.yaml").read_text())["groups"]
    levels = json.loads((written / "expected.json").read_text())["levels"]
    rules = [rule for rule in group["rules"] if rule["alert"] == "TimePerTokenAboveExpected"]
    for rule, level in zip(rules, levels, strict=True):
        most = level["figures"]["tpot_mean_s"]["high"]
        assert f"> {most:.6g} and" in rule["expr"]


def test_settings_of_the_card_are_written_where_they_are_not_its_own(
    small_plan: ServingPlan, tmp_path: Path
) -> None:
    option = replace(small_plan.option, clock_hz=1.2e9, power_limit_w=500.0)
    write_deployment(replace(small_plan, option=option), "llama3-8b", tmp_path)
    script = (tmp_path / "serve.sh").read_text()
    assert ",1200" in script
    assert "--lock-gpu-clocks=" in script
    assert "--power-limit=500" in script


def test_an_engine_of_several_nodes_has_no_pod() -> None:
    assert not fits_a_node(make_option("experts", "l40s", shared=ModelOptions(tp=8, pp=4)))
    assert fits_a_node(make_option("tensor"))


def test_names_of_services_are_labels_of_kubernetes() -> None:
    assert name_service("Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"
    assert len(name_service("x" * 90)) <= 50


def test_the_command_writes_the_files(call: Any, tmp_path: Path) -> None:
    words = "plan llama3-8b --gpu h200 --rate 6/s --prompt 512 --output 64 --tp 1 --requests 50"
    done = call(*words.split(), "--write", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert "written: " in done.err
    assert (tmp_path / "out" / "expected.json").exists()
