"""Seconds of collectives among the GPUs of a cluster: over NVLink or PCIe inside a node, over the network between nodes.

A group of n GPUs that takes ``stride`` GPUs from one member to the next puts g = node / stride members into a node.
Inside one node the time is the predictor's own. Across nodes a ring sends the bytes over the network cards of the
members in a node, which work side by side:

    t = latency·steps + factor·S·(n-1)/n / (g·B)

with S the whole buffer, B the bandwidth of one GPU's network card in one direction and factor 2 for an all-reduce,
1 for the others. The slower of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import predict_graphs
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Collective

NETWORK_LATENCY_S = 5e-6  # one message between nodes
NETWORK_SHARE = 0.8  # of a network card's rate that large messages reach


@dataclass(frozen=True)
class ClusterLinks:
    """Links between GPUs: a node's own, as the predictor knows them, and one network card for each GPU."""

    gpu: Gpu
    at: OperatingPoint
    bundle: Bundle
    node_gpus: int
    network_byte_per_s: float  # of one GPU, in one direction
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def exchange_s(self, collective: str, byte: float, gpus: int, stride: int = 1) -> float:
        """Return the seconds of a collective over ``byte`` of every GPU's whole buffer."""
        if gpus <= 1 or byte <= 0:
            return 0.0
        members = max(min(self.node_gpus // stride, gpus), 1)  # of the group in one node
        inside_s = self._inside_s(collective, int(byte), members) if members > 1 else 0.0
        if members >= gpus:
            return inside_s
        sends = 2.0 if collective == "all_reduce" else 1.0
        share = 1.0 if collective == "send" else (gpus - 1) / gpus
        rate = self.network_byte_per_s * NETWORK_SHARE * (1 if collective == "send" else members)
        steps = log2(gpus / members) + 1.0
        return max(inside_s, sends * byte * share / rate + sends * steps * NETWORK_LATENCY_S)

    def _inside_s(self, collective: str, byte: int, gpus: int) -> float:
        key = (collective, byte, gpus)
        if key not in self._known:
            graph = Graph.from_operators(collective, [Collective(collective, byte, gpus)])
            top = OperatingPoint(clock_hz=self.gpu.clocks.max_hz)
            self._known[key] = float(predict_graphs([graph], self.gpu, top, self.bundle)[0].latency_s)
        return self._known[key]
