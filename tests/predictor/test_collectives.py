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
from wattcast.lab.validate.public_checks.collective_checks import collective_rows, public_rows
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
    assert four > 10 * pair


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
    times = [
        float(
            wattcast.predict(
                "llama3-70b", gpu=H100, tp=tp, host_launch=host_launch, force=True, **options
            ).latency_s
        )
        for tp in (1, 2, 4, 8)
    ]
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


def test_held_out_rows_of_every_card_are_within_the_goal(reference: Path) -> None:
    rows = [row for row in collective_rows(reference) if "held-out" in row["quantity"]]
    assert len(rows) == 4
    for row in rows:
        assert row["mape"] <= 15
        assert row["p90"] <= 40


def test_published_figures_that_nothing_was_fitted_to() -> None:
    errors = {row["quantity"]: row["mape"] for row in public_rows()}
    assert len(errors) == 3
    for name, error in errors.items():
        assert error < 25, name
