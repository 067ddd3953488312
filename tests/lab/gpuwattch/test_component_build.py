"""The component model: voltage, clock, gating, static power by lanes, your own components."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from wattcast.core.errors import BadInput, MissingSpecification, UnknownName
from wattcast.hardware import OperatingPoint
from wattcast.lab.gpuwattch.component_build import build_component_model
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.energy_table import (
    format_energy_table,
    read_energies,
    with_coalescer,
)
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, TraceSampling, open_metric_trace
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.component_power import (
    EVENTS,
    STATIC_NAMES,
    ComponentPower,
    Drive,
    LaneStatic,
    Leakage,
    Part,
    Term,
)
from wattcast.power.power_model import VoltageCurve, power_model_kind

MODEL = ComponentPower(
    (
        Term("l1_read_hit", "DCP", 1e-9, Drive.COUNT),
        Term("dram_read_access", "DRAMP", 2e-8, Drive.COUNT),
        Term("pipe_duty", "PIPEP", 10.0, Drive.DUTY),
        Term("idle_sm", "IDLEP", 0.5, Drive.MEAN),
    ),
    (
        Part("DCP", 2),
        Part("DRAMP", 0),
        Part("PIPEP", 2),
        Part("IDLEP", 1),
        Part("CONSTP", 2, 4.0, clocked=True),
    ),
    1e9,
)


def activity(clock_hz: float = 1e9, **values: float) -> Activity:
    events = {
        "l1_read_hit": 1000.0,
        "dram_read_access": 100.0,
        "pipe_duty": 0.5,
        "idle_sm": 2.0,
    } | values
    at = OperatingPoint(clock_hz=clock_hz)
    return Activity(
        np.array([1e-6]),
        np.array([list(events.values())]),
        tuple(events),
        at,
        ActivitySource.SIMULATED,
    )


def watts(model: ComponentPower, seen: Activity) -> dict[str, float]:
    return dict(zip(model.parts, model.power(seen).part_w[0].tolist(), strict=True))


def test_energy_times_rate_plus_constants() -> None:
    assert watts(MODEL, activity()) == pytest.approx(
        {"DCP": 1.0, "DRAMP": 2.0, "PIPEP": 5.0, "IDLEP": 1.0, "CONSTP": 4.0}
    )


def test_voltage_reaches_each_rail_by_its_law() -> None:
    low = watts(MODEL, activity(core_voltage=0.5))
    assert low == pytest.approx(
        {"DCP": 0.25, "DRAMP": 2.0, "PIPEP": 1.25, "IDLEP": 0.5, "CONSTP": 1.0}
    )


def test_duties_and_clock_power_follow_the_clock() -> None:
    half = watts(MODEL, activity(clock_hz=0.5e9))
    assert half["PIPEP"] == pytest.approx(2.5)
    assert half["CONSTP"] == pytest.approx(2.0)
    assert half["DCP"] == pytest.approx(1.0)  # counts over the same time


def test_a_voltage_curve_speaks_where_the_activity_does_not() -> None:
    curve = VoltageCurve(np.array([0.5e9, 1e9]), np.array([0.5, 1.0]))
    model = replace(MODEL, voltage=curve)
    assert watts(model, activity(clock_hz=0.5e9))["DCP"] == pytest.approx(0.25)
    assert watts(model, activity(clock_hz=0.5e9, core_voltage=1.0))["DCP"] == pytest.approx(1.0)


def test_gated_idle_sms_do_not_leak() -> None:
    leak = Leakage(8.0, 2.0, 8.0)
    assert watts(replace(MODEL, leakage=leak), activity())["LEAKAGEP"] == pytest.approx(10.0)
    gated = replace(MODEL, leakage=replace(leak, gated=True))
    assert watts(gated, activity())["LEAKAGEP"] == pytest.approx(8.0)  # two of eight SMs are off
    assert watts(gated, activity(core_voltage=0.5))["LEAKAGEP"] == pytest.approx(4.0)


def test_the_duty_is_cut_only_where_the_original_cuts_it() -> None:
    assert watts(MODEL, activity(pipe_duty=0.95))["PIPEP"] == pytest.approx(9.5)
    assert watts(replace(MODEL, duty_cap=0.8), activity(pipe_duty=0.95))["PIPEP"] == pytest.approx(
        8.0
    )


def test_accelwattchs_total_forgets_the_voltage() -> None:
    """Its components are scaled, its total only where static and constant power are added last."""
    seen = activity(core_voltage=0.5)
    power = MODEL.power(seen)
    total = MODEL.original_total_w(power, seen, ("CONSTP",))[0]
    assert total == pytest.approx(1.0 + 2.0 + 5.0 + 1.0 + 1.0)
    assert power.total_w[0] == pytest.approx(0.25 + 2.0 + 1.25 + 0.5 + 1.0)


def test_what_a_source_cannot_see_is_left_out_and_named() -> None:
    model, lost, partial = MODEL.seen_by(["l1_read_hit", "pipe_duty", "idle_sm"])
    assert lost == ("DRAMP",)
    assert partial == ()
    assert model.parts == ("DCP", "PIPEP", "IDLEP", "CONSTP")


STATIC = {name: float(i + 1) for i, name in enumerate(STATIC_NAMES)}


def lane_activity(thread: float | None, **counts: float) -> Activity:
    events = dict.fromkeys(EVENTS, 0.0) | counts
    if thread is not None:
        events["active_thread"] = thread
    at = OperatingPoint(clock_hz=1e9)
    return Activity(
        np.array([1e-6]),
        np.array([list(events.values())]),
        tuple(events),
        at,
        ActivitySource.SIMULATED,
    )


@pytest.mark.parametrize(
    ("mix", "counts"),
    [
        ("cat1", {"int_access": 1, "int_mul_access": 1}),
        ("intadd", {"int_access": 1}),
        ("intmul", {"int_mul32_access": 1}),
        ("cat2", {"int_access": 1, "fpu_access": 1}),
        ("cat3", {"int_access": 1, "fp_mul_access": 1, "dpu_access": 1}),
        ("cat4", {"int_access": 1, "fpu_access": 1, "fp_exp_access": 1}),
        ("cat5", {"int_access": 1, "fpu_access": 1, "texture_access": 1}),
        ("cat6", {"int_access": 1, "fpu_access": 1, "tensor_access": 1}),
        ("geomean", {"fpu_access": 1}),
        ("geomean", {"int_access": 1, "fpu_access": 1, "dpu_access": 1, "tensor_access": 1}),
    ],
)
def test_static_power_by_mix_lanes_and_active_sms(mix: str, counts: dict[str, float]) -> None:
    model = LaneStatic(STATIC, 8.0)
    first, more = STATIC[f"static_{mix}_flane"], STATIC[f"static_{mix}_addlane"]
    assert model.at(lane_activity(10.0, **counts, idle_sm=2.0))[0] == pytest.approx(
        (first + 9 * more) * 6 / 8
    )
    assert model.at(lane_activity(9.3, **counts))[0] == pytest.approx(
        first + 9 * more
    )  # whole lanes, upwards
    assert model.at(lane_activity(None, **counts))[0] == pytest.approx(
        first + 31 * more
    )  # full warps


def test_static_power_of_memory_alone() -> None:
    model, old = LaneStatic(STATIC, 8.0), LaneStatic(STATIC, 8.0, compat=True)
    for name, counts in (
        ("l1", {"l1_read_hit": 1.0, "shared_access": 1.0}),
        ("shared", {"shared_access": 1.0, "l2_read_hit": 1.0}),
        ("l2", {"l2_write_miss": 1.0}),
        ("light", {}),
    ):
        assert model.at(lane_activity(0.0, **counts))[0] == STATIC[f"static_{name}_flane"]
        assert (
            old.at(lane_activity(0.0, **counts))[0] == STATIC["static_l1_flane"]
        )  # the original never gets further


def test_accelwattch_takes_every_mix_for_one_with_additions() -> None:
    """It asks whether an addition's energy is zero, not whether there were any."""
    seen = lane_activity(1.0, int_mul_access=1.0)
    assert LaneStatic(STATIC, 8.0).at(seen)[0] == STATIC["static_intmul_flane"]
    assert LaneStatic(STATIC, 8.0, compat=True).at(seen)[0] == STATIC["static_cat1_flane"]


def test_coalescer_is_booked_to_the_controller_only_in_compatibility_mode(write_trace) -> None:
    from gpuwattch.conftest import sample_rows

    trace = open_metric_trace(write_trace(sample_rows(6)), SimulatorDialect.GPUWATTCH)
    seen = trace.activity(next(iter(trace.blocks())), TraceSampling(500, 1e9))
    power = {}
    for compat in (False, True):
        components = read_component_set(SimulatorDialect.GPUWATTCH, compat)
        built = build_component_model(
            demo_architecture(), replace(demo_energies(), leakage=None), components, capped=False
        )
        power[compat] = built.model.power(seen)
    assert power[False].part_power_w("COALP") + power[False].part_power_w("MCP") == pytest.approx(
        power[True].part_power_w("MCP")
    )
    assert power[False].total_w == pytest.approx(power[True].total_w)
    assert "COALP" not in power[True].parts


def test_a_new_component_is_an_entry_in_a_file(tmp_path: Path, write_trace) -> None:
    from gpuwattch.conftest import COLUMNS, sample_rows

    path = tmp_path / "ray.yaml"
    path.write_text(
        "components:\n"
        "  - {name: RAYP, title: ray units, terms: {RAY_ACC: 2 nJ}}\n"
        "  - {name: FANP, rail: own, constant: 3 W}\n"
    )
    components = read_component_set(SimulatorDialect.GPUWATTCH, more=[path])
    model = build_component_model(demo_architecture(), demo_energies(), components).model
    rows = np.column_stack([sample_rows(3), [0.0, 1000.0, 500.0]])
    trace = open_metric_trace(
        write_trace(rows, [*COLUMNS, "RAY_ACC"]),
        SimulatorDialect.GPUWATTCH,
        custom=components.custom,
    )
    power = model.power(trace.activity(next(iter(trace.blocks())), TraceSampling(500, 1e9)))
    assert power.part_power_w("RAYP") == pytest.approx([0.0, 4.0, 2.0])
    assert power.part_power_w("FANP") == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("components: [{name: IBP, terms: {TOT_INST: [TOT_INST]}}]", "is there already"),
        ("components: [{name: XP}]", "nothing drives"),
        ("components: [{name: XP, terms: {RAY: 2 W}}]", "quantity in J"),
        ("components: [{name: XP, term: {RAY: 2 nJ}}]", "unknown field"),
        ("components: [{name: XP, rail: moon, constant: 1 W}]", "rail"),
        ("wattcast: energies\ncomponents: []", "wattcast"),
        (
            "components: [{name: XP, terms: {" + ", ".join(f"C{i}: 1 nJ" for i in range(9)) + "}}]",
            "at most 8",
        ),
    ],
)
def test_bad_component_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=complaint):
        read_component_set(SimulatorDialect.GPUWATTCH, more=[path])


def test_an_energy_that_is_not_there_is_named(tmp_path: Path) -> None:
    table = demo_energies()
    poorer = replace(table, energy_j={k: v for k, v in table.energy_j.items() if k != "SHRD_ACC"})
    with pytest.raises(MissingSpecification, match=r"no energy for SHRD_ACC, which SHRDP needs"):
        build_component_model(
            demo_architecture(), poorer, read_component_set(SimulatorDialect.GPUWATTCH)
        )
    path = tmp_path / "x.yaml"
    path.write_text("components: [{name: XP, terms: {TOT_INST: [coalescer_raed]}}]")
    with pytest.raises(UnknownName, match="coalescer_read"):
        build_component_model(
            demo_architecture(), table, read_component_set(SimulatorDialect.GPUWATTCH, more=[path])
        )


def test_energy_tables_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_bytes(format_energy_table(demo_energies()))
    assert read_energies(path) == replace(demo_energies(), source="made up")


def test_a_table_without_a_coalescer_takes_the_nodes_or_says_it_estimates() -> None:
    bare = replace(demo_energies(), coalescer_read_j=None, coalescer_write_j=None)
    known, said = with_coalescer(bare, 40.0)
    assert known.coalescer_read_j == pytest.approx(1.587e-11, rel=1e-3)
    assert "derived from a run" in said
    guessed, said = with_coalescer(
        replace(bare, energy_j=dict(bare.energy_j) | {"TOT_INST": 4e-12}), 65.0
    )
    assert 1.6e-11 < guessed.coalescer_read_j < 6e-11
    assert "estimate" in said
    assert with_coalescer(demo_energies(), 40.0) == (demo_energies(), "")


CSV = """counter,mcpat_energy_J_per_count,xml_scaling_factor,effective_energy_J_per_count
TOT_INST,1.8070524e-12,2,3.6141049e-12
PIPE_A,7.0e-06,2.57,1.8e-05
#executionTime_s(sample),7.14285714e-07
#mcpat_const_dynamic_W (in MCP),1.25
"""


def test_a_dumped_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    table = read_energies(path, 500, 700e6)
    assert table.reference_clock_hz == 700e6  # the file's 7.14285714e-07 s is 500 cycles of it
    assert table.duty_w == pytest.approx(7e-6 / (500 / 700e6))
    assert table.mc_constant_w == 1.25
    assert table.energy_j["TOT_INST"] == pytest.approx(
        1.80705243e-12, rel=1e-8
    )  # both prints agree on more digits


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("counter,", "name,", "starts with counter"),
        ("1.8070524e-12", "much", "line 2: TOT_INST: expected a number"),
        ("1.8070524e-12,2,3.6141049e-12", "-1e-12,,", "zero or more"),
        ("TOT_INST", "TOT_INTS", "Closest: TOT_INST"),
        ("#executionTime_s", "#time", "executionTime_s"),
        ("7.14285714e-07", "0", "seconds above zero"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV.replace(old, new))
    with pytest.raises(BadInput, match=complaint):
        read_energies(path)


def test_a_built_model_survives_yaml(reference: Path) -> None:
    from wattcast.lab.gpuwattch.architecture import read_architecture

    architecture = read_architecture(reference / "accelwattch" / "xml" / "accelwattch_sass_sim.xml")
    table = read_energies(
        reference / "accelwattch" / "coefficients" / "accelwattch_sass_sim.csv", 500, 1132e6
    )
    model = build_component_model(
        architecture, table, read_component_set(SimulatorDialect.ACCELWATTCH), sm_count=80
    ).model
    back = power_model_kind("component").from_plain(
        yaml.safe_load(yaml.safe_dump(model.to_plain()))
    )
    assert back == model


def test_every_public_table_builds_a_model(reference: Path) -> None:
    from wattcast.lab.gpuwattch.architecture import read_architecture

    for file in sorted((reference / "accelwattch" / "coefficients").glob("*.csv")):
        name = file.stem.removesuffix("_PLACEHOLDER")
        architecture = read_architecture(reference / "accelwattch" / "xml" / f"{name}.xml")
        components = read_component_set(architecture.dialect, compat=True)
        built = build_component_model(architecture, read_energies(file), components, sm_count=80)
        assert len(built.model.parts) == (
            18 if architecture.dialect is SimulatorDialect.GPUWATTCH else 33
        )
