"""Pods and Slurm jobs on metrics, and metrics for OpenTelemetry."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_kubelet import FakeKubelet, encode_pods

from wattcast.core.errors import BadInput, MissingTool
from wattcast.measure.energy_sources import DeviceIdentity, SlowReadings
from wattcast.web import otlp_metrics
from wattcast.web.card_holders import CardHolder, HolderSources
from wattcast.web.kubelet_pods import list_pod_devices
from wattcast.web.metrics_exporter import WatchedCard, write_metrics
from wattcast.web.otlp_metrics import EngineTokens, build_request, push_metrics

PODS = {
    ("serving", "llama-0", "engine"): ["GPU-a", "GPU-b::1"],
    ("default", "shared", "main"): ["GPU-b::2"],
    ("kube-system", "other", "main"): ["0000:3b:00.0"],
}
VLLM = """
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{le="100.0",model_name="m"} 3
vllm:request_prompt_tokens_bucket{le="1000.0",model_name="m"} 8
vllm:request_prompt_tokens_bucket{le="+Inf",model_name="m"} 10
vllm:request_prompt_tokens_sum{model_name="m"} 5000
vllm:request_prompt_tokens_count{model_name="m"} 10
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{le="100.0",model_name="m"} 10
vllm:request_generation_tokens_bucket{le="+Inf",model_name="m"} 10
vllm:request_generation_tokens_sum{model_name="m"} 700
vllm:request_generation_tokens_count{model_name="m"} 10
"""


class Source:
    """A card that tells 300 W and 1000 J, and no temperature."""

    energy_range_j = None

    def energy_j(self) -> float:
        return 1000.0

    def sm_clock_hz(self) -> float:
        return 1e9

    def slow(self) -> SlowReadings:
        return SlowReadings(instant_w=300.0)

    def close(self) -> None:
        pass


def make_cards() -> list[WatchedCard]:
    cards = []
    for index, uuid in enumerate(("GPU-a", "GPU-b")):
        identity = DeviceIdentity(name="NVIDIA H200", uuid=uuid)
        cards.append(WatchedCard(index, Source(), identity))  # type: ignore[arg-type]
    return cards


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    made = FakeKubelet(tmp_path / "kubelet.sock", encode_pods(PODS), piece=7)
    yield made
    made.close()


def test_devices_of_all_pods_are_listed(kubelet: FakeKubelet, tmp_path: Path) -> None:
    devices = list_pod_devices(tmp_path / "kubelet.sock")
    assert [(d.uuid, d.namespace, d.pod, d.container) for d in devices] == [
        ("GPU-a", "serving", "llama-0", "engine"),
        ("GPU-b", "serving", "llama-0", "engine"),
        ("GPU-b", "default", "shared", "main"),
        ("0000:3b:00.0", "kube-system", "other", "main"),
    ]
    assert {d.resource for d in devices} == {"nvidia.com/gpu"}
    (headers,) = kubelet.asked
    assert b"/v1.PodResourcesLister/List" in headers
    assert b"application/grpc" in headers


def test_a_kubelet_that_refuses_or_is_away_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match="does not tell its pods"):
        list_pod_devices(tmp_path / "nothing.sock")
    kubelet = FakeKubelet(tmp_path / "kubelet.sock", None)
    with pytest.raises(MissingTool, match="refused the call"):
        list_pod_devices(tmp_path / "kubelet.sock")
    kubelet.close()


@pytest.mark.parametrize("torn", [b"\x0a\x7f", b"\x0b", b"\xff" * 20, encode_pods(PODS)[:-3]])
def test_a_torn_answer_is_refused_in_a_sentence(tmp_path: Path, torn: bytes) -> None:
    kubelet = FakeKubelet(tmp_path / "kubelet.sock", torn)
    with pytest.raises(BadInput, match="the kubelet's answer"):
        list_pod_devices(tmp_path / "kubelet.sock")
    kubelet.close()


def test_no_pods_are_no_error(tmp_path: Path) -> None:
    kubelet = FakeKubelet(tmp_path / "kubelet.sock", b"")
    assert list_pod_devices(tmp_path / "kubelet.sock") == []
    kubelet.close()


def test_pods_and_jobs_stand_beside_the_metrics(kubelet: FakeKubelet, tmp_path: Path) -> None:
    (tmp_path / "53.before").write_text("1 GPU-b 123.4\n7 GPU-elsewhere 1\n")
    (tmp_path / "54.before").write_bytes(b"\xff\xfe")
    sources = HolderSources(tmp_path / "kubelet.sock", tmp_path)
    text = write_metrics(make_cards(), [], sources).decode()
    held = [line for line in text.splitlines() if line.startswith("wattcast_held_info{")]
    assert len(held) == 4
    assert any('uuid="GPU-a"' in line and 'pod="llama-0"' in line for line in held)
    assert any('uuid="GPU-b"' in line and 'slurm_job="53"' in line for line in held)
    assert "wattcast_holders_known 1.0" in text
    assert "elsewhere" not in text
    kubelet.close()
    (tmp_path / "kubelet.sock").unlink()
    text = write_metrics(make_cards(), [], sources).decode()
    assert "wattcast_holders_known 0.0" in text
    assert 'slurm_job="53"' in text
    assert "wattcast_held" not in write_metrics(make_cards(), []).decode()


def test_a_job_that_ended_holds_nothing(tmp_path: Path) -> None:
    assert HolderSources(jobs=tmp_path).list_holders() == ([], True)
    assert HolderSources(jobs=tmp_path / "gone").list_holders() == ([], False)
    (tmp_path / "9.before").write_text("0 GPU-a 1\n")
    assert HolderSources(jobs=tmp_path).list_holders() == (
        [CardHolder("GPU-a", slurm_job="9")],
        True,
    )


class Collector(BaseHTTPRequestHandler):
    """An OTLP collector that keeps what it is sent, and an engine's metrics."""

    kept: ClassVar[list[tuple[str, str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.kept.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(VLLM.encode() if self.path == "/metrics" else b"up 1\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.kept.clear()
    Collector.status = 200
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_collector_gets_power_energy_and_tokens(collector: str) -> None:
    """The request is read by OpenTelemetry's own messages, and names are those of its conventions."""
    tokens = EngineTokens(f"{collector}/metrics", "llama3-8b")
    assert push_metrics(collector, make_cards(), 0.0, print, 2, tokens) == 2
    path, kind, plain = Collector.kept[-1]
    assert (path, kind) == ("/v1/metrics", "application/json")
    service = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
        reason="no opentelemetry-proto: pip install 'wattcast[dev]'",
    )
    from google.protobuf.json_format import ParseDict
    from opentelemetry.semconv._incubating.metrics import gen_ai_metrics, hw_metrics

    request = ParseDict(plain, service.ExportMetricsServiceRequest())
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    usage = gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE
    assert set(metrics) == {hw_metrics.HW_POWER, hw_metrics.HW_ENERGY, usage}
    power = metrics["hw.power"]
    assert power.unit == "W"
    assert [point.as_double for point in power.gauge.data_points] == [300.0, 300.0]
    attributes = {a.key: a.value.string_value for a in power.gauge.data_points[1].attributes}
    assert attributes == {"hw.id": "GPU-b", "hw.type": "gpu", "hw.name": "NVIDIA H200"}
    energy = metrics["hw.energy"]
    assert (energy.unit, energy.sum.is_monotonic, energy.sum.aggregation_temporality) == (
        "J",
        True,
        2,
    )
    assert energy.sum.data_points[0].as_double == 1000.0
    assert (
        energy.sum.data_points[0].time_unix_nano >= energy.sum.data_points[0].start_time_unix_nano
    )

    by_type = {}
    for point in metrics[usage].histogram.data_points:
        named = {a.key: a.value.string_value for a in point.attributes}
        by_type[named["gen_ai.token.type"]] = point
        assert named["gen_ai.request.model"] == "llama3-8b"
    assert (by_type["input"].count, by_type["input"].sum) == (10, 5000.0)
    assert list(by_type["input"].bucket_counts) == [3, 5, 2]
    assert list(by_type["input"].explicit_bounds) == [100.0, 1000.0]
    assert (by_type["output"].count, by_type["output"].sum) == (10, 700.0)


def test_what_a_card_does_not_tell_is_left_out() -> None:
    (resource,) = build_request(make_cards(), 0)["resourceMetrics"]
    names = [metric["name"] for metric in resource["scopeMetrics"][0]["metrics"]]
    assert names == ["hw.power", "hw.energy"]  # no temperature: absent is not zero
    assert not math.isfinite(SlowReadings().temperature_c)


def test_a_collector_that_refuses_or_is_away_is_told_once(collector: str) -> None:
    said: list[str] = []
    Collector.status = 503
    assert push_metrics(collector, make_cards(), 0.0, said.append, 3) == 0
    assert len(said) == 1
    assert "HTTP 503" in said[0]
    with pytest.raises(MissingTool, match="no collector takes metrics"):
        otlp_metrics.send_request("http://127.0.0.1:9", {})
    with pytest.raises(BadInput, match="--endpoint"):
        otlp_metrics.send_request("localhost:4318", {})
    with pytest.raises(MissingTool, match="histograms of tokens"):
        EngineTokens(f"{collector}/other", "m").read()
