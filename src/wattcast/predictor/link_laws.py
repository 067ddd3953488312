"""Compute how long GPUs take to exchange data, by laws of each algorithm and protocol of a library.

A collective of S bytes over n GPUs takes s dependent steps and sends W = S·s/n bytes per GPU over
links of B bytes a second: s = 2(n-1) for all-reduce, n-1 for all-gather, reduce-scatter and
all-to-all [Thakur2005]. Each protocol of NCCL then takes

    LL      launch + s·α_LL + W/R_LL                         flags in every word: starts soonest, at
                                                             a rate R_LL that few channels fix
    LL128   launch + s·α_128 + W/(η_128·B) + (S/n)/(λ_128·B)   flags in every cache line
    Simple  launch + A + s·α_S + W/(η_S·B) + (S/n)/(λ_S·B)     fences between large chunks: highest
                                                             rate
    NVLS    launch + A_N + S·(1 + 1/n)/(η_N·B)               the switch adds up: all-reduce over
                                                             three GPUs and more
    peers   launch + A_p + (n-1)·α_p + ...                   all-to-all and send: LL at a fixed
    rate,
                                                             or Simple

and the library takes the fastest. (S/n)/λB is a GPU's own share, which passes through the same SMs.
Serving engines have all-reduce kernels of their own for buffers of a few MB: one-shot (every GPU
reads all others' buffers, (n-1)·S bytes) and two-shot (2·S·(n-1)/n bytes in two halves). Across
nodes every GPU sends through its own network card. Coefficients and where they come from:
``link_laws.yaml``; how well they do: docs/method/collectives.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from functools import cache

import numpy as np

from wattcast.core import Dtype, units
from wattcast.core.arrays import (
    Array,
    Mask,
    Sweepable,
    sweep_values,
)
from wattcast.core.errors import MissingSpecification
from wattcast.core.strict_files import read_shipped_yaml
from wattcast.hardware import (
    Gpu,
    Node,
    node_of_gpu,
)
from wattcast.hardware.catalogue_reader import load_node
from wattcast.hardware.gpu import Fabric
from wattcast.kernels.families.collectives import COPYING_SMS
from wattcast.predictor.timeline import Timeline, compute_kernel_s
from wattcast.workload.operator_types import Collective


@dataclass(frozen=True)
class LinkLaw:
    """Coefficients of NCCL's protocols on one kind of link; ``share`` and ``local`` are parts of
    the link's rate.
    """

    launch_s: float
    ll_step_s: float
    ll_byte_per_s: float
    ll128_step_s: float
    ll128_share: float
    ll128_local: float
    simple_start_s: float
    simple_step_s: float
    simple_share: float
    simple_local: float
    peer_step_s: float
    peer_ll_start_s: float
    peer_ll_byte_per_s: float
    peer_simple_start_s: float
    peer_simple_share: float
    peer_simple_local: float
    nvls_start_s: float | None = None  # None: the switch does not add up
    nvls_share: float | None = None
    crowding: float = 0.0  # a link's rate falls with (2/n) to this power: PCIe through one host


@dataclass(frozen=True)
class EngineLaw:
    """Coefficients of serving engines' own all-reduce kernels, and the largest buffer they take."""

    one_shot_start_s: float
    one_shot_step_s: float
    two_shot_start_s: float
    two_shot_step_s: float
    share: float
    largest_byte: float


@dataclass(frozen=True)
class NetworkLaw:
    """Coefficients of steps between nodes."""

    ll_step_s: float
    simple_step_s: float
    share: float  # of a card's rate that large messages reach


_GEN4_BYTE_PER_S = 20e9  # from which a link of 16 lanes is no PCIe 3.0, which has 16 GB/s


@dataclass(frozen=True)
class SocketLaw:
    """Bytes a second between the sockets of a node, one direction."""

    gen3_byte_per_s: float
    later_byte_per_s: float

    def choose_rate(self, link_byte_per_s: Array) -> Array:
        """Return the rate beside cards whose PCIe links have a rate; 16 GB/s are Gen3."""
        is_gen3 = np.asarray(link_byte_per_s) < _GEN4_BYTE_PER_S
        return np.where(is_gen3, self.gen3_byte_per_s, self.later_byte_per_s)


@dataclass(frozen=True)
class CollectiveRows:
    """Collectives as columns, ``(row,)``; ``gpus`` are those within one node.

    A send is written as an exchange between two GPUs of twice its bytes, of which half go out.
    """

    byte: Array
    gpus: Array
    all_reduce: Mask
    peers: Mask  # all-to-all and send
    multicast: Mask  # the switch could add up this number format
    sends: Mask | None = None  # to one peer: no share of the buffer stays; None: none are

    @property
    def steps(self) -> Array:
        """Dependent steps of a ring."""
        return np.where(self.all_reduce, 2.0, 1.0) * (self.gpus - 1.0)

    @property
    def copied_byte(self) -> Array:
        """A GPU's own share of the buffer, which passes through the same SMs; a send has none."""
        own_byte = self.byte / self.gpus
        return own_byte if self.sends is None else np.where(self.sends, 0.0, own_byte)


def nccl_protocol_s(
    law: LinkLaw,
    rows: CollectiveRows,
    link_byte_per_s: Sweepable,
    crowd: Sweepable | None = None,
) -> Array:
    """Return the seconds of LL, LL128, Simple and NVLS, or of peers' LL and Simple, ``(protocol,
    *sweep, row)``.

    ``link_byte_per_s`` is one direction of all of a GPU's links, and ``crowd`` the part of it that
    is left where others use the same way, by the law's own rule if it is not given. What a
    collective cannot use is infinite.
    """
    if crowd is None:
        crowd = (2.0 / np.maximum(rows.gpus, 2.0)) ** law.crowding
    crowd = np.asarray(crowd)
    ring = _ring_protocol_s(law, rows, link_byte_per_s, crowd)
    peers = _peer_protocol_s(law, rows, link_byte_per_s, crowd)
    shape = np.broadcast_shapes(*(np.shape(seconds) for seconds in ring))
    protocols = []
    for ring_s, peer_s in zip(ring, peers, strict=True):
        protocols.append(np.broadcast_to(np.where(rows.peers, peer_s, ring_s), shape))
    return np.stack(protocols)


def _ring_protocol_s(
    law: LinkLaw,
    rows: CollectiveRows,
    link_byte_per_s: Sweepable,
    crowd: Array,
) -> tuple[Array, ...]:
    """Return the seconds of LL, LL128, Simple and NVLS."""
    n = rows.gpus
    steps = rows.steps
    sent_byte = rows.byte / n * steps
    rate = link_byte_per_s * crowd

    ll = law.launch_s + steps * law.ll_step_s + sent_byte / (law.ll_byte_per_s * crowd)

    ll128 = law.launch_s + steps * law.ll128_step_s + sent_byte / (law.ll128_share * rate)
    ll128 = ll128 + rows.copied_byte / (law.ll128_local * link_byte_per_s)

    simple = law.launch_s + law.simple_start_s + steps * law.simple_step_s
    simple = simple + sent_byte / (law.simple_share * rate)
    simple = simple + rows.copied_byte / (law.simple_local * link_byte_per_s)

    nvls: Array = np.full(n.shape, np.inf)
    if law.nvls_start_s is not None and law.nvls_share is not None:
        added_s = rows.byte * (1.0 + 1.0 / n) / (law.nvls_share * rate)
        switch_s = law.launch_s + law.nvls_start_s + added_s
        nvls = np.where(rows.all_reduce & rows.multicast & (n > 2), switch_s, np.inf)
    return ll, ll128, simple, nvls


def _peer_protocol_s(
    law: LinkLaw,
    rows: CollectiveRows,
    link_byte_per_s: Sweepable,
    crowd: Array,
) -> tuple[Array, ...]:
    """Return the seconds of peers' LL and Simple, and twice infinity for protocols they lack."""
    n = rows.gpus
    own_byte = rows.byte / n
    sent_byte = own_byte * rows.steps
    rate = link_byte_per_s * crowd
    peer_s = law.launch_s + (n - 1.0) * law.peer_step_s

    ll = peer_s + law.peer_ll_start_s + own_byte / (law.peer_ll_byte_per_s * crowd)

    simple = peer_s + law.peer_simple_start_s + sent_byte / (law.peer_simple_share * rate)
    simple = simple + rows.copied_byte / (law.peer_simple_local * link_byte_per_s)

    never = np.full(n.shape, np.inf)
    return ll, simple, never, never


def pcie_crowd(
    rows: CollectiveRows,
    node: Node,
    link_byte_per_s: Sweepable,
    laws: CollectiveLaws,
) -> Array:
    """Return the part of a card's PCIe rate that a collective has, ``(*sweep, row)``.

    A ring enters and leaves every switch and socket once, so that one stream each way crosses
    between two sockets: their link bounds it. Of an all-to-all over n cards, each of g cards below
    a switch sends (n - g)/(n - 1) of its bytes through the switch's one way up, and each of m cards
    of a socket (n - m)/(n - 1) of them to the other socket.
    """
    n = np.maximum(rows.gpus, 2.0)
    link = np.asarray(link_byte_per_s, dtype=float)[..., np.newaxis]
    reached = laws.pcie.simple_share * link  # of a link that is not shared
    crowd = np.ones(np.broadcast_shapes(link.shape, n.shape))

    below = np.minimum(float(node.switch_gpus), n)
    leaving = below * (n - below) / (n - 1.0)  # cards' worth of bytes on the way up
    shared = np.where(rows.peers & (below > 1.0), 1.0 / np.maximum(leaving, 1.0), 1.0)
    crowd = crowd * shared

    if node.socket_gpus is None:
        return crowd
    beside = np.minimum(float(node.socket_gpus), n)
    between = np.asarray(node.socket_byte_per_s or laws.sockets.choose_rate(link))
    streams = np.where(rows.peers, beside * (n - beside) / (n - 1.0), 1.0)
    across = np.minimum(1.0, between / (reached * np.maximum(streams, 1e-9)))
    return np.where(n > beside, np.minimum(crowd, across), crowd)


def engine_all_reduce_s(
    law: EngineLaw,
    rows: CollectiveRows,
    link_byte_per_s: Sweepable,
) -> Array:
    """Return the seconds of an engine's own all-reduce, ``(*sweep, row)``, the faster of one-shot
    and two-shot.
    """
    n = rows.gpus
    rate = law.share * np.asarray(link_byte_per_s)
    one_shot_step_s = law.one_shot_step_s + rows.byte / rate
    two_shot_step_s = law.two_shot_step_s + 2.0 * rows.byte / n / rate
    one_shot_s = law.one_shot_start_s + (n - 1.0) * one_shot_step_s
    two_shot_s = law.two_shot_start_s + (n - 1.0) * two_shot_step_s
    fits = rows.all_reduce & (rows.byte <= law.largest_byte)
    return np.where(fits, np.minimum(one_shot_s, two_shot_s), np.inf)


def collective_s(ops: Sequence[Collective], gpu: Gpu) -> Array:
    """Return the seconds of collectives among GPUs of a kind in their nodes, ``(*sweep,
    collective)``.
    """
    node = gpu.node or node_of_gpu(gpu.name)
    laws = load_laws()
    kind = np.array([op.collective for op in ops])
    # a send is a peer's part of an all-to-all between two: S bytes go out, none stay
    sends = kind == "send"
    byte = np.where(sends, 2.0, 1.0) * np.array([float(op.bytes) for op in ops])
    total_gpus = np.where(sends, 2.0, np.array([float(op.gpus) for op in ops]))
    stride = np.array([float(op.stride) for op in ops])
    gpus_in_node = np.minimum(np.maximum(node.gpu_count // stride, 1.0), total_gpus)
    can_add_up = np.array([op.dtype not in (Dtype.INT8, Dtype.FP8) for op in ops])
    rows = CollectiveRows(
        byte=byte,
        gpus=gpus_in_node,
        all_reduce=kind == "all_reduce",
        peers=(kind == "all_to_all") | sends,
        multicast=can_add_up & node.multicast,
        sends=sends,
    )
    by_engine = np.array([op.software == "engine" for op in ops])
    seconds = _within_node_s(
        rows,
        gpu,
        node,
        laws,
        by_engine,
    )
    nodes = np.ceil(total_gpus / gpus_in_node)
    if (nodes > 1).any():
        across_s = _across_nodes_s(
            rows,
            total_gpus,
            seconds,
            gpu,
            node,
            laws,
        )
        seconds = np.where(nodes > 1, across_s, seconds)
    return seconds


def _within_node_s(
    rows: CollectiveRows,
    gpu: Gpu,
    node: Node,
    laws: CollectiveLaws,
    by_engine: Mask,
) -> Array:
    """Return the seconds of collectives of GPUs of one node, ``(*sweep, row)``; nothing where there
    is one GPU.
    """
    nvlink = gpu.links.nvlink_byte_per_s
    if nvlink is None or node.fabric is Fabric.PCIE:
        seconds = _over_pcie_s(rows, gpu, node, laws)
    else:
        seconds = _over_nvlink_s(
            rows,
            0.5 * np.asarray(nvlink),
            gpu,
            node,
            laws,
            by_engine,
        )
        if node.fabric is Fabric.BRIDGE and (rows.gpus > 2).any():
            # a bridge joins two cards
            over_pcie_s = _over_pcie_s(rows, gpu, node, laws)
            seconds = np.where(rows.gpus > 2, over_pcie_s, seconds)
    return np.where(rows.gpus > 1, seconds, 0.0)


def _over_nvlink_s(
    rows: CollectiveRows,
    rate: Array,
    gpu: Gpu,
    node: Node,
    laws: CollectiveLaws,
    by_engine: Mask,
) -> Array:
    """Return the seconds over NVLink at a ``rate`` of all of a GPU's links, in one direction."""
    if node.fabric is Fabric.MESH:
        rate = rate * (rows.gpus - 1.0) / (node.gpu_count - 1.0)
    rate = np.maximum(rate, 1.0)
    nccl_s = nccl_protocol_s(laws.link_law(gpu.architecture), rows, rate).min(axis=0)
    engine_s = engine_all_reduce_s(laws.engine, rows, rate)
    return np.asarray(np.where(by_engine, np.minimum(nccl_s, engine_s), nccl_s))


def _over_pcie_s(
    rows: CollectiveRows,
    gpu: Gpu,
    node: Node,
    laws: CollectiveLaws,
) -> Array:
    pcie = gpu.links.pcie_byte_per_s
    if pcie is None:
        raise MissingSpecification(
            f"{gpu.name}: no link to other GPUs is known. Use one GPU, or give its links."
        )
    link = 0.5 * sweep_values(pcie)
    crowd = None if node.is_timed else pcie_crowd(rows, node, link, laws)
    seconds_by_protocol = nccl_protocol_s(laws.pcie, rows, link[..., np.newaxis], crowd)
    return np.asarray(seconds_by_protocol.min(axis=0))


def _across_nodes_s(
    rows: CollectiveRows,
    total_gpus: Array,
    within_s: Array,
    gpu: Gpu,
    node: Node,
    laws: CollectiveLaws,
) -> Array:
    """Return the seconds of collectives that cross nodes, ``(*sweep, row)``.

    Rings of all local GPUs cross with one network card each, so W = S·s/N bytes of N GPUs leave a
    node through as many cards as it has members; small all-reduces go up and down a tree of nodes,
    others step from node to node. Peers send each share straight through the sender's card.
    """
    if node.network_byte_per_s is None:
        raise MissingSpecification(
            f"{node.name}: no network is known, and {int(total_gpus.max())} GPUs need more than "
            f"one node of {node.gpu_count}. Give a node with a network (--node hgx-h100, or your "
            "own file)."
        )
    law = laws.network
    card = law.share * node.network_byte_per_s
    ring_passes = np.where(rows.all_reduce, 2.0, 1.0)
    ring_byte = ring_passes * rows.byte * (total_gpus - 1.0) / total_gpus
    peer_byte = rows.byte * (total_gpus - rows.gpus) / total_gpus
    sent_s = np.where(rows.peers, peer_byte / card, ring_byte / (card * rows.gpus))

    nodes = np.ceil(total_gpus / rows.gpus)
    ring_steps = np.where(rows.peers, 1.0, nodes - 1.0)
    tree_steps = 2.0 * np.ceil(np.log2(nodes))
    steps = np.where(rows.all_reduce, tree_steps, ring_steps)

    # chunks cross the network while others cross the links, so the slower of the two counts
    within_s = np.maximum(within_s, laws.link_law(gpu.architecture).launch_s)
    # flags double the bytes of LL
    ll_s = steps * law.ll_step_s + np.maximum(within_s, 2.0 * sent_s)
    simple_s = steps * law.simple_step_s + np.maximum(within_s, sent_s)
    return np.minimum(ll_s, simple_s)


NOTEWORTHY_SLOWDOWN = 1.02  # of all GPUs over half of them, to warn of it
TIMED_NODE = "l40s-box"  # the one node with PCIe cards alone whose collectives were published


def goes_over_pcie(gpu: Gpu, gpus: int) -> bool:
    """Whether groups of so many GPUs in a node exchange data over PCIe."""
    node = gpu.node or node_of_gpu(gpu.name)
    if node.fabric is Fabric.PCIE or gpu.links.nvlink_byte_per_s is None:
        return gpus > 1
    return node.fabric is Fabric.BRIDGE and gpus > 2


def timed_node_s(ops: Sequence[Collective], gpu: Gpu) -> Array:
    """Return the seconds of collectives if the cards stood in the node whose timings are public.

    Groups that leave a node take what they take.
    """
    node = gpu.node or node_of_gpu(gpu.name)
    timed_node = replace(
        load_node(TIMED_NODE),
        gpu_count=node.gpu_count,
        fabric=node.fabric,
        network_byte_per_s=node.network_byte_per_s,
    )
    return collective_s(ops, replace(gpu, node=timed_node))


def describe_links(gpu: Gpu, gpus: int) -> str:
    """Say which node the cards are taken to stand in, and where the law of its links comes from."""
    node = gpu.node or node_of_gpu(gpu.name)
    place = f"{node.gpu_count} GPUs to a node ({node.name})"
    unmeasured = "their power was never measured"
    if not goes_over_pcie(gpu, gpus):
        return f"collectives: laws of public NCCL timings, {place}; {unmeasured}"
    if node.is_timed:
        return f"collectives: public NCCL timings of this very node, {place}; {unmeasured}"
    return (
        f"collectives over PCIe: a law of PCIe generation, switches and sockets, {place}; "
        "in the one "
        f"node whose timings are public ({TIMED_NODE}) eight cards exchange 1.2 GB/s each, and the "
        f"interval reaches there; say how yours are joined with --node; {unmeasured}"
    )


def warn_of_slow_links(
    calls: Sequence[tuple[Collective, float]],
    collective_spent_s: float,
    other_s: float,
    gpu: Gpu,
) -> str | None:
    """Say that half of the GPUs would be faster, where they would; None where they would not.

    ``calls`` are collectives and how often each runs, ``other_s`` is all other time. Half of the
    tensor-parallel GPUs take twice the other time, and exchange as many bytes.
    """
    largest = max(op.gpus for op, _ in calls)
    if largest < 2:
        return None
    half_s = 2.0 * other_s
    if largest > 2:
        halves = [replace(op, gpus=op.gpus // 2) for op, _ in calls if op.gpus == largest]
        counts = np.array([count for op, count in calls if op.gpus == largest])
        call_s = np.max(np.atleast_2d(collective_s(halves, gpu)), axis=0)
        half_s += float(call_s @ counts)
    whole_s = collective_spent_s + other_s
    if whole_s <= NOTEWORTHY_SLOWDOWN * half_s:
        return None
    node = gpu.node or node_of_gpu(gpu.name)
    exchange_share = collective_spent_s / whole_s
    return (
        f"careful: {largest} GPUs are slower than {largest // 2} would be (about "
        f"{units.show(half_s, 's')}), since they exchange data for "
        f"{exchange_share:.0%} of the time over the links of the {node.name}: "
        "use fewer, or pipeline stages (--pp)"
    )


def overlapped_s(
    collective_s: Array,
    compute_s: Array,
    sm_share: Sweepable,
) -> Array:
    """Return the time of a collective of t seconds beside T seconds of compute: max(t, T + φ·t).

    The collective's SMs are a share φ of all, which compute does without as long as it runs. Memory
    that both want is not modelled.

    >>> float(overlapped_s(np.array(10e-6), np.array(40e-6), 0.25))
    4.25e-05
    """
    return np.asarray(np.maximum(collective_s, compute_s + sm_share * collective_s))


def hidden_s(timeline: Timeline, gpu: Gpu) -> Array:
    """Return the seconds of each collective that compute beside it hides, ``(kernel,)``, at the
    highest clock.

    A collective issued in several places hides what it can hide in the worst of them; in a sweep it
    hides what it can hide on the fastest design.
    """
    swept_s = compute_kernel_s(timeline.phases, np.asarray(gpu.clocks.max_hz))
    kernel_s = swept_s.reshape(-1, swept_s.shape[-1]).min(axis=0)
    ops = timeline.kernels.ops
    sm_share = float(np.max(COPYING_SMS / np.asarray(gpu.sm_count)))
    hidden = np.full(len(ops), np.inf)
    for segment in timeline.kernels.segments:
        spent_s = kernel_s[segment.rows] * segment.counts
        for place, row in enumerate(segment.rows.tolist()):
            op = ops[row]
            if isinstance(op, Collective) and op.overlaps:
                compute_s = spent_s[place + 1 : place + 1 + op.overlaps].sum()
                both_s = overlapped_s(kernel_s[row], compute_s, sm_share)
                hidden[row] = min(hidden[row], kernel_s[row] + compute_s - both_s)
    return np.where(np.isfinite(hidden), np.maximum(hidden, 0.0), 0.0)


@dataclass(frozen=True)
class CollectiveLaws:
    """All laws, as ``link_laws.yaml`` has them: of links by architecture, PCIe, engines' kernels
    and networks.
    """

    links: Mapping[str, LinkLaw]
    pcie: LinkLaw
    engine: EngineLaw
    network: NetworkLaw
    sockets: SocketLaw
    source: str

    def link_law(self, architecture: str) -> LinkLaw:
        """Return the law of an architecture's links; one never measured has the geometric mean of
        all others.
        """
        return self.links.get(architecture) or mean_law(list(self.links.values()))


def mean_law(laws: Sequence[LinkLaw]) -> LinkLaw:
    """Return the geometric mean of laws; what only some of them have is the mean of those."""
    mean: dict[str, float | None] = {}
    for item in fields(LinkLaw):
        values = [getattr(law, item.name) for law in laws]
        values = [value for value in values if value is not None]
        is_positive = bool(values) and min(values) > 0
        mean[item.name] = float(np.exp(np.mean(np.log(values)))) if is_positive else 0.0
    if mean["nvls_share"] == 0.0:
        mean |= {"nvls_share": None, "nvls_start_s": None}
    return LinkLaw(**mean)  # type: ignore[arg-type]  # only what may be None is None


@cache
def load_laws() -> CollectiveLaws:
    """Return the laws that ship."""
    return read_shipped_yaml(CollectiveLaws, "wattcast.predictor", "link_laws.yaml")
