"""Designs obey physics: more of a resource never slows a fixed clock down, parts add up, and an
axis without effect is said to have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.explore.design_cases import WORKLOADS, build_laws_study, draw_designs

from wattcast.core.arrays import as_sweep
from wattcast.explore import explorations
from wattcast.explore.search_space import list_fields
from wattcast.explore.study import (
    Study,
    analyse_points,
    configure_points,
    evaluate_points,
    find_unused_fields,
)
from wattcast.hardware import load_gpu
from wattcast.predictor.pipeline import detail_at_clock, total_at_clock
from wattcast.workload.readers.one_operator import graph_of_operator

SLACK = 1.0 + 1e-9


def name_case(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *map(str, case[1].values())])


def check_more_is_never_slower(study: Study, count: int, seed: int) -> None:
    """Raise every resource of every design by a drawn factor, one at a time."""
    designs = draw_designs(study, count, seed)
    before_s = evaluate_points(study, designs)["latency_s"]
    random = np.random.default_rng(seed + 1)
    for axis in study.space.axes:
        column = axis.field.column
        raised = designs[column] * np.exp(random.uniform(0.0, 1.5, count))
        if axis.field.whole:
            raised = np.round(raised)
        if axis.field.name in ("clock", "sparsity"):
            raised = np.minimum(raised, axis.values.max())
        after_s = evaluate_points(study, designs | {column: raised})["latency_s"]
        worst = int(np.argmax(after_s / before_s))
        assert after_s[worst] <= SLACK * before_s[worst], (
            axis.field.name,
            after_s[worst] / before_s[worst],
            {name: float(values[worst]) for name, values in designs.items()},
            float(raised[worst]),
        )


@pytest.mark.parametrize("case", WORKLOADS[:4], ids=name_case)
@pytest.mark.parametrize("l2_width", [True], ids=["l2-width-varied"])
def test_more_of_a_resource_is_never_slower(
    case: tuple[str, dict[str, Any]], l2_width: bool
) -> None:
    """With one axis of SMs, 126 of them were once slower in decode than 112, and 264 slower in a
    prompt than 132.
    """
    check_more_is_never_slower(build_laws_study(case[0], case[1], l2_width=l2_width), 100, seed=11)


@pytest.mark.slow
@pytest.mark.parametrize("case", WORKLOADS, ids=name_case)
@pytest.mark.parametrize("l2_width", [True, False], ids=["l2-width-varied", "l2-width-follows"])
def test_more_of_a_resource_is_never_slower_on_2000_designs(
    case: tuple[str, dict[str, Any]], l2_width: bool
) -> None:
    check_more_is_never_slower(build_laws_study(case[0], case[1], l2_width=l2_width), 2000, seed=5)


def check_energy_is_the_sum_of_its_parts(study: Study, count: int, seed: int) -> None:
    designs = draw_designs(study, count, seed)
    chip, at, bundle = configure_points(study, designs)
    timeline = analyse_points(study, designs, chip, at, bundle)
    totals = total_at_clock(timeline, at, bundle)
    detail = detail_at_clock(timeline, at, bundle)
    assert np.allclose(detail.part_j.sum(axis=-1), totals.energy_j, rtol=1e-9)
    # the same byte costs the same energy in every design, however many there are
    dram_byte = sum(
        np.broadcast_to(timeline.weighted[..., timeline.events.index(event)], (count,))
        for event in ("dram_read_byte", "dram_write_byte")
    )
    dram_j = detail.part_j[..., detail.parts.index("dram")]
    moves = dram_byte > 1e-3 * dram_byte.max()
    level = bundle.power.voltage.level_at(np.ravel(at.clock_hz))[moves]
    on_core = bundle.power.memory_on_core
    per_byte = dram_j[moves] / dram_byte[moves] / (1.0 - on_core + on_core * level**2)
    assert per_byte.max() / per_byte.min() < 1.35  # reads and writes cost differently


@pytest.mark.parametrize("case", WORKLOADS[:4], ids=name_case)
def test_energy_is_the_sum_of_its_parts(case: tuple[str, dict[str, Any]]) -> None:
    check_energy_is_the_sum_of_its_parts(build_laws_study(*case, l2_width=True), 40, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", WORKLOADS, ids=name_case)
def test_energy_is_the_sum_of_its_parts_on_2000_designs(case: tuple[str, dict[str, Any]]) -> None:
    check_energy_is_the_sum_of_its_parts(build_laws_study(*case, l2_width=True), 2000, seed=4)


def test_an_infinite_memory_is_the_roofline_without_it() -> None:
    """With endless bandwidth what is left is the time of the work on chip, phase by phase."""
    study = build_laws_study(*WORKLOADS[1], l2_width=True)
    designs = draw_designs(study, 30, seed=8)
    endless = designs | {"memory.byte_per_s": np.full(30, 1e30)}
    chip, at, bundle = configure_points(study, endless)
    timeline = analyse_points(study, endless, chip, at, bundle)
    on_chip = [np.zeros(()) if p.cycles is None else p.cycles for p in timeline.phases]
    clock_hz = as_sweep(endless["asked_clock_hz"])
    longest_s = sum(np.max(c / clock_hz, axis=-1) for c in map(np.atleast_2d, on_chip[1:]))
    latency_s = total_at_clock(timeline, at, bundle).latency_s
    assert (latency_s <= evaluate_points(study, designs)["latency_s"] * SLACK).all()
    assert (latency_s >= longest_s).all()
    without = [replace(p, seconds=None) for p in timeline.phases[1:]]
    roofline = replace(timeline, phases=(timeline.phases[0], *without))
    assert np.allclose(latency_s, total_at_clock(roofline, at, bundle).latency_s, rtol=1e-9)


def test_the_base_is_what_predict_says() -> None:
    """A design with the base's own sizes gives the base's own prediction, whatever may vary."""
    from wattcast.predictor.prediction import predict_graph

    study = explorations.build_study(
        "llama3-8b",
        "h200",
        ["sm_count=66,132", "l2=20MB,62914560B", "registers=32768,65536", "clock=1GHz,1980MHz"],
        batch=2,
        seq=512,
    )
    columns = study.space.points(0, study.space.size)
    found = evaluate_points(study, columns)
    is_base = (columns["sm_count"] == 132) & (columns["l2.capacity_byte"] == 62914560)
    is_base &= columns["sm.register_count"] == 65536
    assert is_base.sum() == 2
    for number in np.flatnonzero(is_base).tolist():
        one = {name: values[number] for name, values in columns.items()}
        at = configure_points(study, one)[1]
        alone = predict_graph(study.graph, study.gpu, at, study.bundle)
        for name in ("latency_s", "power_w", "energy_j"):
            assert found[name][number] == pytest.approx(float(getattr(alone, name)), rel=1e-9)


# An axis and a workload that it binds
BINDING = {
    "sm_count": ("llama3-8b", {"batch": 4, "seq": 512}, "64,132"),
    "l2.capacity": ("llama3-8b", {"phase": "decode", "batch": 8}, "62MB,40GB"),
    "l2.per_cycle": ("llama3-8b", {"batch": 4, "seq": 512}, "1000B/cycle,5120B/cycle"),
    "memory.bandwidth": ("llama3-8b", {"phase": "decode", "batch": 8}, "2TB/s,4.8TB/s"),
    "sm.shared_capacity": ("llama3-8b", {"batch": 4, "seq": 512}, "32KiB,256KiB"),
    "sm.registers": ("llama3-8b", {"batch": 4, "seq": 512}, "16384,65536"),
    "sm.threads": ("gpt2", {"stack": "eager", "batch": 16, "seq": 256}, "256,2048"),
    "sm.shared_per_cycle": ("llama3-8b", {"batch": 4, "seq": 512}, "32B/cycle,128B/cycle"),
    "pipes.int32_per_cycle_sm": (
        "gpt2",
        {"stack": "eager", "attention": "eager", "batch": 16, "seq": 256},
        "4OP/cycle,64OP/cycle",
    ),
    "pipes.sfu_per_cycle_sm": ("llama3-8b", {"batch": 1, "seq": 16384}, "1OP/cycle,16OP/cycle"),
    "pipes.tensor_per_cycle_sm.bf16": (
        "llama3-8b",
        {"batch": 4, "seq": 512},
        "2048FLOP/cycle,4096FLOP/cycle",
    ),
    "pipes.cuda_per_cycle_sm.fp32": (
        "bert-base",
        {"batch": 8, "seq": 512, "dtype": "fp32"},
        "128FLOP/cycle,256FLOP/cycle",
    ),
    "tensor": ("llama3-8b", {"batch": 4, "seq": 512}, "0.5,1"),
    "sparsity": ("llama3-8b", {"phase": "decode", "batch": 8}, "1,2"),
    "die_link": ("llama3-8b", {"batch": 4, "seq": 512}, "10GB/s,10TB/s"),
    "clocks.max": ("llama3-8b", {"batch": 4, "seq": 512}, "1.2GHz,1.98GHz"),
    "links.nvlink": ("llama3-70b", {"batch": 4, "seq": 512, "tp": 4}, "100GB/s,900GB/s"),
    "clock": ("llama3-8b", {"batch": 4, "seq": 512}, "1GHz,1.9GHz"),
}
# An axis that moves another column than latency: the workload, the values and the column
BINDING_OTHERS = {
    "power_limit": ("llama3-8b", {"batch": 4, "seq": 512}, "300W,500W", "clock_hz"),
    "temperature": ("llama3-8b", {"batch": 4, "seq": 512}, "30C,80C", "power_w"),
    "voltage": ("llama3-8b", {"batch": 4, "seq": 512}, "0.9,1.0", "power_w"),
    "memory.capacity": ("llama3-8b", {"batch": 4, "seq": 512}, "8GB,141GB", "fits"),
    "memory.kind": ("llama3-8b", {"phase": "decode", "batch": 8}, "HBM3e,GDDR7", "power_w"),
    "dies": ("llama3-8b", {"batch": 4, "seq": 512}, "1,4", "energy_j"),
}
PRODUCT = "4096x4096x4096"
TENSOR_FORMATS = ("bf16", "fp16", "tf32", "fp8", "int8", "fp64")
OTHER_PIPES = {
    "pipes.cuda_per_cycle_sm.fp64": ("softmax", "65536x1024", "fp64"),
    **{f"pipes.tensor_per_cycle_sm.{d}": ("linear", PRODUCT, d) for d in TENSOR_FORMATS},
}
# An axis that binds nothing on an H200, which has NVLink
BINDING_ELSEWHERE = {
    "links.pcie": ("llama3-8b", "l40s", {"batch": 4, "seq": 512, "tp": 2}, "16GB/s,64GB/s"),
    "pipes.tensor_per_cycle_sm.fp4": (
        graph_of_operator("linear", PRODUCT, "fp4"),
        "b200",
        {},
        "4096FLOP/cycle,32768FLOP/cycle",
    ),
}


@pytest.mark.parametrize("name", BINDING)
def test_every_axis_moves_a_workload_that_it_binds(name: str) -> None:
    workload, options, values = BINDING[name]
    words = [f"{name}={values}"]
    if name == "die_link":
        words.append("dies=2,4")
    study = explorations.build_study(
        workload, "h200", words, power_limit="100000W", clock=None, **options
    )
    latency_s = evaluate_points(study, study.space.points(0, study.space.size))["latency_s"]
    assert latency_s.max() > 1.001 * latency_s.min()
    assert name not in find_unused_fields(study)


@pytest.mark.parametrize("name", BINDING_OTHERS)
def test_every_other_axis_moves_what_it_binds(name: str) -> None:
    workload, options, values, column = BINDING_OTHERS[name]
    study = explorations.build_study(workload, "h200", [f"{name}={values}"], **options)
    results = evaluate_points(study, study.space.points(0, study.space.size))
    assert len(set(results[column].tolist())) == 2


@pytest.mark.parametrize("name", OTHER_PIPES)
def test_the_rate_of_every_format_moves_its_kernels(name: str) -> None:
    operator, sizes, dtype = OTHER_PIPES[name]
    unit = "OP" if dtype == "int8" else "FLOP"
    low, high = (1, 64) if operator == "softmax" else (32, 512)
    study = explorations.build_study(
        graph_of_operator(operator, sizes, dtype),
        "h200",
        [f"{name}={low}{unit}/cycle,{high}{unit}/cycle"],
        power_limit="100000W",
    )
    latency_s = evaluate_points(study, study.space.points(0, study.space.size))["latency_s"]
    assert latency_s.max() > 1.001 * latency_s.min()


@pytest.mark.parametrize("name", BINDING_ELSEWHERE)
def test_an_axis_of_other_cards_moves_what_it_binds_there(name: str) -> None:
    """The rate of PCIe, where GPUs have no other link, once ended in an error."""
    workload, gpu, options, values = BINDING_ELSEWHERE[name]
    study = explorations.build_study(
        workload, gpu, [f"{name}={values}"], power_limit="100000W", **options
    )
    latency_s = evaluate_points(study, study.space.points(0, study.space.size))["latency_s"]
    assert latency_s.max() > 1.001 * latency_s.min()


def test_every_axis_that_may_vary_has_a_workload_that_it_binds() -> None:
    tried = {*BINDING, *BINDING_OTHERS, *OTHER_PIPES, *BINDING_ELSEWHERE}
    for gpu in ("h200", "b200"):
        assert set(list_fields(load_gpu(gpu))) <= tried


def test_an_axis_that_binds_nothing_is_named() -> None:
    study = explorations.build_study(
        "gpt2", "h200", ["links.pcie=64GB/s,128GB/s", "clock=1GHz,1.9GHz"], batch=4, seq=128
    )
    assert find_unused_fields(study) == ["links.pcie"]
