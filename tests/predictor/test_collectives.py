"""Collectives: laws of links, nodes and networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.core.errors import BadInput, MissingSpecification
from wattcast.hardware import load_gpu
from wattcast.hardware.catalogue_reader import load_node, node_of_gpu, parse_node
from wattcast.hardware.gpu import Fabric
from wattcast.lab.validate.public_checks.collective_checks import (
    CARDS,
    collective_rows,
    newest_table,
    published_collective_rows,
    read_collective_table,
)
from wattcast.lab.validate.public_checks.newer_tables import collective_card_rows
from wattcast.lab.validate.public_checks.published_commands import amd_rows
from wattcast.predictor.link_laws import collective_s, load_laws, mean_law
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_types import Collective, Linear

H100 = load_gpu("h100-sxm")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def test_a_small_all_reduce_is_not_a_ring_of_slow_messages() -> None:
    """75 us were predicted over 8 GPUs and 35 over 4, as 5 us a message of a ring; 16 and 9.5 us
    are measured.
    """
    over_8, over_4 = collective_s([Collective("all_reduce", 4096, n) for n in (8, 4)], H100) * 1e6
    assert over_8 == pytest.approx(16, rel=0.1)
    assert over_4 == pytest.approx(9.5, rel=0.15)


@pytest.mark.parametrize(
    "gpu", ["a100-sxm-80gb", "h100-sxm", "b200", "l40s", "h100-pcie", "v100-sxm", "mi300x"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_time(kind: str, gpu: str) -> None:
    groups = (
        (2, 4) if gpu == "v100-sxm" else (2, 4, 8)
    )  # its node has four, and no network is known
    ops = [
        Collective(kind, 1 << k, 2 if kind == "send" else n) for n in groups for k in range(6, 31)
    ]
    times = collective_s(ops, load_gpu(gpu)).reshape(len(groups), -1)
    assert (np.diff(times, axis=1) >= 0).all()
    assert (times > 1e-6).all()


def test_engines_take_their_own_kernels_for_small_buffers_alone() -> None:
    small, large = (1 << 15, 1 << 26)
    ops = [
        Collective("all_reduce", byte, 8, software=name)
        for byte in (small, large)
        for name in ("nccl", "engine")
    ]
    nccl_small, own_small, nccl_large, own_large = collective_s(ops, H100)
    assert own_small < 0.5 * nccl_small
    assert own_large == nccl_large


def test_groups_that_leave_a_node_go_through_network_cards() -> None:
    byte = 1 << 26
    near = Collective("all_gather", byte, 8)
    far = Collective("all_gather", byte, 8, stride=8)
    both = Collective("all_reduce", 1 << 28, 16)
    near_s, far_s, both_s = collective_s([near, far, both], H100)
    card = 0.94 * 50e9
    assert near_s < far_s
    assert far_s == pytest.approx(byte * 7 / 8 / card + 7 * 9.6e-6, rel=0.01)
    # eight rails of each node carry the rings together: H100 clusters see 350 GB/s or so
    assert 2 * (15 / 16) * (1 << 28) / both_s == pytest.approx(370e9, rel=0.03)


def test_a_box_without_a_known_network_says_what_to_do() -> None:
    with pytest.raises(MissingSpecification, match="--node"):
        collective_s([Collective("all_reduce", 1024, 16)], load_gpu("l40s"))


def test_bridges_join_pairs_and_larger_groups_go_over_pcie() -> None:
    card = load_gpu("a100-pcie-40gb")
    pair, four = collective_s([Collective("all_gather", 1 << 26, n) for n in (2, 4)], card)
    assert four > 5 * pair  # 300 GB/s against 24


def test_links_may_be_swept() -> None:
    swept = H100.sweep(links__nvlink_byte_per_s=[450e9, 900e9])
    ops = [Collective("all_reduce", 1 << 28, 8), Collective("all_gather", 1 << 28, 4)]
    times = collective_s(ops, swept)
    assert times.shape == (2, 2)
    assert_allclose(times[1], collective_s(ops, H100))
    assert (times[0] > 1.5 * times[1]).all()


def test_every_gpu_has_a_node_and_a_mesh_uses_the_links_to_its_peers() -> None:
    assert node_of_gpu("h200").name == "hgx-h200"
    assert node_of_gpu("l40s").fabric is Fabric.BRIDGE
    assert not node_of_gpu("l40s").is_timed
    mesh = replace(load_node("hgx-h100"), fabric=Fabric.MESH)
    two, eight = (Collective("all_gather", 1 << 28, n) for n in (2, 8))
    two_s, eight_s = collective_s([two, eight], replace(H100, node=mesh))
    assert two_s > 2 * eight_s


@pytest.mark.parametrize("host_launch", ["0us", None])
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_every_doubling_of_gpus_makes_decode_faster(
    batch: int, dtype: str, host_launch: str | None
) -> None:
    """Llama-70B over 8 GPUs came out no faster than over 4."""
    options = {"phase": "decode", "batch": batch, "seq": 1024, "dtype": dtype, "stack": "engine"}
    runs = [("llama3-70b", {**options, "tp": tp}) for tp in (1, 2, 4, 8)]
    predictions = wattcast.predict_many(runs, H100, host_launch=host_launch, force=True)
    times = [float(p.latency_s) for p in predictions]
    assert times == sorted(times, reverse=True)
    if host_launch is not None:
        assert (np.array(times[:-1]) / times[1:] > 1.2).all()


def test_compute_beside_a_collective_hides_it_and_slows_down() -> None:
    alone, beside = (Collective("all_to_all", 1 << 22, 8, overlaps=n) for n in (0, 1))
    product = Linear(4096, 4096, 4096)
    both = [
        wattcast.predict(
            Graph("w", (Block((op, product), 1, "x"),)), gpu=H100, host_launch="0us", clock="1.5GHz"
        )
        for op in (alone, beside)
    ]
    exchange_s = float(collective_s([alone], H100)[0])
    saved_s = float(both[0].latency_s - both[1].latency_s)
    assert saved_s == pytest.approx(exchange_s * (1 - 24 / 132), rel=0.02)


def test_one_gpu_never_speaks_of_collectives() -> None:
    for gpu in ("h200", "h100-sxm", "l40s"):
        p = wattcast.predict("llama3-8b", gpu=gpu, phase="decode")
        assert not any("collective" in note for note in p.assumptions)
    assert any(
        "collective" in note for note in wattcast.predict("llama3-8b", gpu="h200", tp=2).assumptions
    )


def test_a_mean_of_one_law_is_that_law() -> None:
    for law in load_laws().links.values():
        mean = mean_law([law])
        assert_allclose(mean.simple_share, law.simple_share)
        assert mean.nvls_share == pytest.approx(law.nvls_share)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu_count: {value: 8, source: x}", "fabric"),
        ("gpu_count: {value: 0, source: x}\nfabric: {value: switch, source: x}", "gpu_count"),
        ("gpu_count: {value: 8, source: x}\nfabric: {value: torus, source: x}", "fabric"),
        ("gpu_count: {value: 8, source: y}\nfabric: {value: switch, source: x}", "source"),
    ],
)
def test_a_bad_node_file_names_the_key(text: str, problem: str) -> None:
    rest = "title: t\nsources: {x: somebody}\nmulticast: {value: false, source: x}\n"
    rest += "network: {unknown: none}\nnetwork_per_gpu: {unknown: none}\n"
    with pytest.raises(BadInput, match=problem):
        parse_node(f"{rest}{text}\n".encode(), "own", "own.yaml")


@pytest.mark.parametrize(
    ("gpu", "stride", "link_byte_per_s", "most_us"),
    [
        ("a100-sxm-80gb", 1, 300e9, 15),
        ("h100-sxm", 1, 450e9, 15),
        ("b200", 1, 900e9, 15),
        ("mi300x", 1, 64e9, 15),  # one of seven links joins a pair
        ("l40s", 1, 32e9, 15),
        ("t4", 1, 16e9, 15),
        ("h100-sxm", 8, 50e9, 15),  # through the network card of the GPU
        ("b200", 8, 50e9, 15),
    ],
)
def test_a_send_has_the_rate_of_its_link_and_the_latency_of_a_launch(
    gpu: str, stride: int, link_byte_per_s: float, most_us: float
) -> None:
    """Transfers between pipeline stages were timed as half of an all-to-all between two GPUs, and so
    paid for a copy of as many bytes within the GPU, which a send does not make: on a B200 it reached
    a third of its link.
    """
    small, middle, large, larger = collective_s(
        [Collective("send", 1 << k, 2, stride=stride) for k in (10, 20, 28, 29)], load_gpu(gpu)
    )
    assert small * 1e6 < most_us
    assert middle < 40e-6 + (1 << 20) / (0.6 * link_byte_per_s)
    slope_byte_per_s = (1 << 28) / (larger - large)
    assert 0.6 < slope_byte_per_s / link_byte_per_s < 0.95


def test_pairs_that_exchange_data_take_a_send_and_a_copy(reference: Path) -> None:
    """An all-to-all between two cards sends half of its buffer and copies the other half, so that a
    send of as many bytes takes no longer than what was timed, and not less than half of it.
    """
    for stem, name in CARDS.items():
        paths = sorted((reference / "aiconfigurator").glob(f"{stem}.nccl-*.csv"))
        timings = [
            row
            for row in read_collective_table(paths[-1])
            if row.kind == "all_to_all" and row.gpus == 2 and row.byte >= 1 << 21
        ]
        sends = [Collective("send", row.byte // 2, 2) for row in timings]
        ratio = collective_s(sends, load_gpu(name)) / [row.latency_s for row in timings]
        assert len(ratio) > 5
        assert 0.5 < np.median(ratio) < 1.1, name


def rate_of(gpu: str, node: str, gpus: int, kind: str = "all_gather") -> float:
    """Return the bytes a second that each card sends in a large collective."""
    card = replace(load_gpu(gpu), node=load_node(node))
    taken_s = float(collective_s([Collective(kind, 1 << 30, gpus)], card)[0])
    return (1 << 30) * (gpus - 1) / gpus / taken_s


def test_the_timings_of_one_node_do_not_stand_for_all_pcie_cards() -> None:
    """Eight L40S exchange 1.2 GB/s each in the one node whose timings are public, and every PCIe card,
    the A10 too, was predicted to do so: llama3-70b took 950 s on one L40S and 3,900 on eight.
    """
    assert rate_of("l40s", "l40s-box", 8) == pytest.approx(1.2e9, rel=0.2)
    assert rate_of("l40s", "l40s-box", 2) == pytest.approx(19.5e9, rel=0.1)
    for gpu in ("l40s", "a10"):
        assert rate_of(gpu, "pcie-box", 4) > 0.9 * rate_of(gpu, "pcie-box", 2)
        # two processors exchange 22 GB/s
        assert rate_of(gpu, "pcie-box", 8) == pytest.approx(22e9, rel=0.1)
    assert rate_of("t4", "pcie-box", 8) == pytest.approx(10e9, rel=0.15)  # older processors
    # eight cards of two sockets share the way between them; four of one socket do not
    box = rate_of("l40s", "pcie-box", 8, "all_to_all")
    assert box < 0.5 * rate_of("l40s", "pcie-one-socket", 4, "all_to_all")
    # a newer PCIe is faster as far as the processors let it
    assert rate_of("h100-pcie", "pcie-one-socket", 4) > 1.8 * rate_of("l40s", "pcie-one-socket", 4)


def test_a_pcie_switch_is_shared_by_its_cards() -> None:
    node = replace(load_node("pcie-one-socket"), switch_gpus=2)
    card = load_gpu("l40s")
    alone, shared = (
        float(collective_s([Collective("all_to_all", 1 << 28, 4)], replace(card, node=one))[0])
        for one in (load_node("pcie-one-socket"), node)
    )
    assert shared / alone == pytest.approx(4 / 3, rel=0.05)  # 2 cards, 2 of 3 shares go up


def test_the_interval_of_pcie_cards_holds_the_node_that_was_timed() -> None:
    asked = {"phase": "prefill", "batch": 8, "seq": 2048, "force": True}
    usual = wattcast.predict("llama3-70b", gpu="l40s", tp=8, **asked)
    timed = wattcast.predict("llama3-70b", gpu="l40s", node="l40s-box", tp=8, **asked)
    low_s, high_s = usual.interval.latency_s
    assert low_s < float(usual.latency_s) < float(timed.latency_s) <= high_s
    assert any("l40s-box" in note and "--node" in note for note in usual.assumptions)
    assert any("this very node" in note for note in timed.assumptions)
    assert not any(note.startswith("careful: ") for note in usual.assumptions)
    warning = [note for note in timed.assumptions if note.startswith("careful: ")]
    assert len(warning) == 1
    four = wattcast.predict("llama3-70b", gpu="l40s", node="l40s-box", tp=4, **asked)
    assert float(four.latency_s) < float(timed.latency_s)
    assert "8 GPUs are slower than 4" in warning[0]


def test_cards_that_no_law_was_fitted_to(reference: Path) -> None:
    """The H100 takes the H200's law and the GB200 the B200's; all rows judge."""
    rows = collective_card_rows(reference / "aiconfigurator")
    if not rows:
        pytest.skip("no NCCL tables of H100 and GB200 beside the others")
    assert len(rows) == 2
    for row in rows:
        assert row["n"] >= 100, row
        assert row["mape"] <= 10, row
        assert row["p90"] <= 40, row


def test_the_newest_table_of_a_card_is_read(tmp_path: Path) -> None:
    """Sorted as text, NCCL 2.9 came after 2.27, and compressed tables were not seen."""
    for version in ("2.9.1.csv", "2.27.3.csv.gz", "2.18.3.csv"):
        (tmp_path / f"l40s.nccl-{version}").touch()
    assert newest_table(tmp_path, "l40s") == tmp_path / "l40s.nccl-2.27.3.csv.gz"
    assert newest_table(tmp_path, "h200_sxm") is None


def test_held_out_rows_of_every_card_are_within_the_goal(reference: Path) -> None:
    rows = [row for row in collective_rows(reference) if "held-out" in row["quantity"]]
    assert len(rows) == 4
    for row in rows:
        assert row["mape"] <= 15
        assert row["p90"] <= 40


def test_published_figures_that_nothing_was_fitted_to() -> None:
    errors = {row["quantity"]: row["mape"] for row in published_collective_rows() + amd_rows()}
    assert len(errors) == 3
    for name, error in errors.items():
        assert error < 25, name
