"""How long GPUs take to exchange data: alpha-beta laws of each algorithm and protocol a library
has.

A collective of S bytes over n GPUs takes s dependent steps and sends W = S·s/n bytes per GPU over
links of B bytes a second: s = 2(n-1) for all-reduce, n-1 for all-gather, reduce-scatter and
all-to-all [Thakur2005]. Each protocol of NCCL then takes

    LL      launch + s·α_LL + W/R_LL                          flags in every word: soonest, R_LL
    fixed by few channels LL128   launch + s·α_128 + W/(η_128·B) + (S/n)/(λ_128·B)   flags in every
    cache line Simple  launch + A + s·α_S + W/(η_S·B) + (S/n)/(λ_S·B)     fences between large
    chunks: highest rate NVLS    launch + A_N + S·(1 + 1/n)/(η_N·B)                 the switch adds
    up: all-reduce over three GPUs and more peers   launch + A_p + (n-1)·α_p + ...
    all-to-all and send: LL at a fixed rate, or Simple

and the library takes the fastest. (S/n)/λB is a GPU's own share, which passes through the same SMs.
Serving engines have all-reduce kernels of their own for buffers of a few MB: one-shot (every GPU
reads all others' buffers, (n-1)·S bytes) and two-shot (2·S·(n-1)/n bytes in two halves). Across
nodes every GPU sends through its own network card. Coefficients and where they come from:
``link_laws.yaml``; how well they do: docs/method/collectives.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from wattcast.core import Dtype, units
from wattcast.core.arrays import Array, Mask, Sweepable
from wattcast.core.errors import MissingSpecification
from wattcast.core.strict_files import read_shipped_yaml
from wattcast.hardware import Gpu, Node, node_of_gpu
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


@dataclass(frozen=True)
class SocketLaw:
    """Bytes a second between the sockets of a node, one direction."""

    gen3_byte_per_s: float
    later_byte_per_s: float

    def choose_rate(self, link_byte_per_s: Array) -> Array:
        """Return the rate beside cards whose PCIe links have a rate; 16 GB/s are Gen3."""
        is_gen3 = np.asarray(link_byte_per_s) < 20e9
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
    n = rows.gpus
    steps = rows.steps
    own_byte = rows.byte / n
    sent_byte = own_byte * steps
    own_crowd = (2.0 / np.maximum(n, 2.0)) ** law.crowding
    left: Array = own_crowd if crowd is None else np.asarray(crowd)
    rate = link_byte_per_s * left
    # a GPU's own share of the buffer, which passes through the same SMs; a send has none
    copied_byte = own_byte if rows.sends is None else np.where(rows.sends, 0.0, own_byte)

    ll = law.launch_s + steps * law.ll_step_s + sent_byte / (law.ll_byte_per_s * left)
    ll128 = law.launch_s + steps * law.ll128_step_s + sent_byte / (law.ll128_share * rate)
    ll128 = ll128 + copied_byte / (law.ll128_local * link_byte_per_s)
    simple = law.launch_s + law.simple_start_s + steps * law.simple_step_s
    simple = simple + sent_byte / (law.simple_share * rate)
    simple = simple + copied_byte / (law.simple_local * link_byte_per_s)

    peer_s = law.launch_s + (n - 1.0) * law.peer_step_s
    peer_ll = peer_s + law.peer_ll_start_s + own_byte / (law.peer_ll_byte_per_s * left)
    peer_simple = peer_s + law.peer_simple_start_s + sent_byte / (law.peer_simple_share * rate)
    peer_simple = peer_simple + copied_byte / (law.peer_simple_local * link_byte_per_s)

    nvls: Array = np.full(n.shape, np.inf)
    if law.nvls_start_s is not None and law.nvls_share is not None:
        added_s = rows.byte * (1.0 + 1.0 / n) / (law.nvls_share * rate)
        taken = law.launch_s + law.nvls_start_s + added_s
        nvls = np.where(rows.all_reduce & rows.multicast & (n > 2), taken, np.inf)
    never = np.full(n.shape, np.inf)
    ring = (ll, ll128, simple, nvls)
    peers = (peer_ll, peer_simple, never, never)
    shape = np.broadcast_shapes(*(np.shape(value) for value in ring))
    return np.stack(
        [
            np.broadcast_to(np.where(rows.peers, p, r), shape)
            for p, r in zip(peers, ring, strict=True)
        ]
    )


def pcie_crowd(
    rows: CollectiveRows, node: Node, link_byte_per_s: Sweepable, laws: CollectiveLaws
) -> Array:
    """Return the part of a card's PCIe rate that a collective has, ``(*sweep, row)``.

    A ring enters and leaves every switch and socket once, so that one stream each way crosses
    between two sockets: their link bounds it. Of an all-to-all over n cards, each of g cards below a
    switch sends (n - g)/(n - 1) of its bytes through the switch's one way up, and each of m cards of
    a socket (n - m)/(n - 1) of them to the other socket.
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


def engine_all_reduce_s(law: EngineLaw, rows: CollectiveRows, link_byte_per_s: Sweepable) -> Array:
    """Return the seconds of an engine's own all-reduce, ``(*sweep, row)``, the faster of one-shot
    and two-shot.
    """
    n = rows.gpus
    rate = law.share * np.asarray(link_byte_per_s)
    one = law.one_shot_start_s + (n - 1.0) * (law.one_shot_step_s + rows.byte / rate)
    two = law.two_shot_start_s + (n - 1.0) * (law.two_shot_step_s + 2.0 * rows.byte / n / rate)
    fits = rows.all_reduce & (rows.byte <= law.largest_byte)
    return np.where(fits, np.minimum(one, two), np.inf)


def collective_s(ops: Sequence[Collective], gpu: Gpu) -> Array:
    """Return the seconds of collectives among GPUs of a kind in their nodes, ``(*sweep,
    collective)``.
    """
    node = gpu.node or node_of_gpu(gpu.name)
    laws = load_laws()
    size, total, stride = np.array(
        [(op.bytes, op.gpus, op.stride) for op in ops], dtype=np.float64
    ).T
    kind = np.array([op.collective for op in ops])
    peers = (kind == "all_to_all") | (kind == "send")
    # a send is a peer's part of an all-to-all between two: S bytes go out, none stay
    sends = kind == "send"
    size = np.where(sends, 2.0 * size, size)
    total = np.where(sends, 2.0, total)
    together = np.minimum(np.maximum(node.gpu_count // stride, 1.0), total)
    wide = np.array([op.dtype not in (Dtype.INT8, Dtype.FP8) for op in ops])
    can_add_up = wide & node.multicast
    rows = CollectiveRows(size, together, kind == "all_reduce", peers, can_add_up, sends)
    taken_s = _within_node_s(
        rows, gpu, node, laws, np.array([op.software == "engine" for op in ops])
    )
    nodes = np.ceil(total / together)
    if (nodes > 1).any():
        taken_s = np.where(
            nodes > 1, _across_nodes_s(rows, total, nodes, taken_s, gpu, node, laws), taken_s
        )
    return taken_s


def _within_node_s(
    rows: CollectiveRows, gpu: Gpu, node: Node, laws: CollectiveLaws, engine: Mask
) -> Array:
    """Return the seconds of collectives of GPUs of one node, ``(*sweep, row)``; nothing where there
    is one GPU.
    """
    links = gpu.links
    bridged = node.fabric is Fabric.BRIDGE
    fast = links.nvlink_byte_per_s if node.fabric is not Fabric.PCIE else None
    slow = links.pcie_byte_per_s
    taken_s: Array = np.zeros(())
    if fast is not None:
        law = laws.link_law(gpu.architecture)
        rate = 0.5 * np.asarray(fast)
        if node.fabric is Fabric.MESH:
            rate = rate * (rows.gpus - 1.0) / (node.gpu_count - 1.0)
        taken_s = nccl_protocol_s(law, rows, np.maximum(rate, 1.0)).min(axis=0)
        own_s = engine_all_reduce_s(laws.engine, rows, np.maximum(rate, 1.0))
        taken_s = np.where(engine, np.minimum(taken_s, own_s), taken_s)
    if fast is None or (bridged and (rows.gpus > 2).any()):
        if slow is None:
            raise MissingSpecification(
                f"{gpu.name}: no link to other GPUs is known. Use one GPU, or give its links."
            )
        link = 0.5 * np.asarray(slow)
        crowd = None if node.is_timed else pcie_crowd(rows, node, link, laws)
        over_pcie_s = nccl_protocol_s(laws.pcie, rows, link[..., np.newaxis], crowd).min(axis=0)
        taken_s = over_pcie_s if fast is None else np.where(rows.gpus > 2, over_pcie_s, taken_s)
    return np.where(rows.gpus > 1, taken_s, 0.0)


def _across_nodes_s(
    rows: CollectiveRows,
    total: Array,
    nodes: Array,
    within_s: Array,
    gpu: Gpu,
    node: Node,
    laws: CollectiveLaws,
) -> Array:
    """Return the seconds of collectives that cross nodes, ``(*sweep, row)``.

    Rings of all local GPUs cross with one network card each, so W = S·s/N bytes of N GPUs leave a
    node through as many cards as it has members; small all-reduces go up and down a tree of nodes,
    others step from node to node. Peers send each share straight through the sender's card."""
    if node.network_byte_per_s is None:
        raise MissingSpecification(
            f"{node.name}: no network is known, and {int(total.max())} GPUs need more than one node of "
            f"{node.gpu_count}. Give a node with a network (--node hgx-h100, or your own file)."
        )
    law = laws.network
    card = laws.network.share * node.network_byte_per_s
    ring_byte = np.where(rows.all_reduce, 2.0, 1.0) * rows.byte * (total - 1.0) / total
    peer_byte = rows.byte * (total - rows.gpus) / total
    sent_s = np.where(rows.peers, peer_byte / card, ring_byte / (card * rows.gpus))
    depth = np.where(
        rows.all_reduce, 2.0 * np.ceil(np.log2(nodes)), np.where(rows.peers, 1.0, nodes - 1.0)
    )
    # chunks cross the network while others cross the links, so the slower of the two counts
    within_s = np.maximum(within_s, laws.link_law(gpu.architecture).launch_s)
    soon = depth * law.ll_step_s + np.maximum(within_s, 2.0 * sent_s)  # flags double the bytes
    return np.minimum(soon, depth * law.simple_step_s + np.maximum(within_s, sent_s))


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
    timed = replace(load_node(TIMED_NODE), gpu_count=node.gpu_count, fabric=node.fabric)
    timed = replace(timed, network_byte_per_s=node.network_byte_per_s)
    return collective_s(ops, replace(gpu, node=timed))


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
        f"collectives over PCIe: a law of PCIe generation, switches and sockets, {place}; in the one "
        f"node whose timings are public ({TIMED_NODE}) eight cards exchange 1.2 GB/s each, and the "
        f"interval reaches there; say how yours are joined with --node; {unmeasured}"
    )


def warn_of_slow_links(
    calls: Sequence[tuple[Collective, float]], collective_spent_s: float, other_s: float, gpu: Gpu
) -> str | None:
    """Say that half of the GPUs would be faster, where they would; None where they would not.

    ``calls`` are collectives and how often each runs, ``other_s`` is all other time. Half of the
    tensor-parallel GPUs take twice the other time, and exchange as many bytes.
    """
    largest = max(op.gpus for op, _ in calls)
    if largest < 2:
        return None
    halves = [(replace(op, gpus=op.gpus // 2), count) for op, count in calls if op.gpus == largest]
    half_s = 2.0 * other_s
    if largest > 2:
        each_s = np.max(np.atleast_2d(collective_s([op for op, _ in halves], gpu)), axis=0)
        half_s += float(each_s @ np.array([count for _, count in halves]))
    whole_s = collective_spent_s + other_s
    if whole_s <= 1.02 * half_s:
        return None
    node = gpu.node or node_of_gpu(gpu.name)
    return (
        f"careful: {largest} GPUs are slower than {largest // 2} would be (about "
        f"{units.show(half_s, 's')}), since they exchange data for "
        f"{collective_spent_s / whole_s:.0%} of the time over the links of the {node.name}: "
        "use fewer, or pipeline stages (--pp)"
    )


def overlapped_s(collective_s: Array, compute_s: Array, sm_share: Sweepable) -> Array:
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

    A collective issued in several places hides what it can hide in the worst of them.
    """
    each_s = compute_kernel_s(timeline.phases, np.asarray(gpu.clocks.max_hz))
    each_s = each_s.reshape(-1, each_s.shape[-1]).min(
        axis=0
    )  # of a sweep, what the fastest design hides
    ops = timeline.kernels.ops
    sm_share = float(np.max(COPYING_SMS / np.asarray(gpu.sm_count)))
    hidden = np.full(len(ops), np.inf)
    for segment in timeline.kernels.segments:
        spent_s = each_s[segment.rows] * segment.counts
        for place, row in enumerate(segment.rows.tolist()):
            op = ops[row]
            if isinstance(op, Collective) and op.overlaps:
                compute_s = spent_s[place + 1 : place + 1 + op.overlaps].sum()
                both_s = overlapped_s(each_s[row], compute_s, sm_share)
                hidden[row] = min(hidden[row], each_s[row] + compute_s - both_s)
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
        values = [value for law in laws if (value := getattr(law, item.name)) is not None]
        mean[item.name] = (
            float(np.exp(np.mean(np.log(values)))) if values and min(values) > 0 else 0.0
        )
    if mean["nvls_share"] == 0.0:
        mean |= {"nvls_share": None, "nvls_start_s": None}
    return LinkLaw(**mean)  # type: ignore[arg-type]  # only what may be None is None


@cache
def load_laws() -> CollectiveLaws:
    """Return the laws that ship."""
    return read_shipped_yaml(CollectiveLaws, "wattcast.predictor", "link_laws.yaml")
