"""Architecture files: both dialects, our YAML, conversions, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from wattcast.core.errors import BadInput
from wattcast.lab.gpuwattch.architecture import (
    format_xml_architecture,
    known_parameters,
    parse_xml_architecture,
    read_architecture,
    write_architecture,
)
from wattcast.lab.gpuwattch.component_build import demo_architecture
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect

DEMO = format_xml_architecture(demo_architecture())


def test_the_manuals_36_parameters_are_all_there() -> None:
    indexed = [p for p in known_parameters().values() if p.index is not None]
    assert sorted(p.index for p in indexed) == list(range(1, 37))
    assert {p.name for p in indexed} <= set(demo_architecture().parameters)


def test_xml_and_yaml_there_and_back(tmp_path: Path) -> None:
    demo = demo_architecture()
    for suffix in (".xml", ".yaml"):
        path = tmp_path / f"demo{suffix}"
        write_architecture(demo, path)
        back = read_architecture(path)
        assert back.parameters == demo.parameters
        assert back.scaling == demo.scaling


def test_the_manuals_spellings_will_do_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    write_architecture(demo_architecture(), path)
    path.write_text(
        path.read_text().replace("pipelines_per_core", "pipeline_per_core").replace("temp", "Temp")
    )
    assert read_architecture(path).parameters == demo_architecture().parameters


def test_every_public_file_survives_both_conversions(reference: Path, tmp_path: Path) -> None:
    files = sorted((reference / "accelwattch" / "xml").glob("*.xml"))
    assert len(files) == 10
    for file in files:
        first = read_architecture(file)
        assert first.dialect is (
            SimulatorDialect.ACCELWATTCH
            if "accelwattch" in file.name
            else SimulatorDialect.GPUWATTCH
        )
        write_architecture(first, tmp_path / "a.yaml")
        second = read_architecture(tmp_path / "a.yaml")
        assert second == first
        assert parse_xml_architecture(format_xml_architecture(second), first.name) == first


def test_numbers_written_for_c_are_read() -> None:
    text = DEMO.replace(b'"1e-08"', b'"1.0e-8f"')
    assert text != DEMO
    assert parse_xml_architecture(text, "c.xml").number("dram_rd_coeff") == 1e-8


@pytest.mark.parametrize("name", sorted(p.name for p in known_parameters().values() if p.needed))
def test_each_missing_parameter_is_named(name: str) -> None:
    text = re.sub(rb'\s*<param name="%s" [^>]*/>' % name.encode(), b"", DEMO)
    assert text != DEMO
    with pytest.raises(BadInput, match=rf"{name} .*is missing"):
        parse_xml_architecture(text, "gpu.xml")


def test_a_missing_scaling_factor_is_named() -> None:
    with pytest.raises(BadInput, match="scaling factor SHRD_ACC is missing"):
        parse_xml_architecture(re.sub(rb'<param name="SHRD_ACC" [^>]*/>', b"", DEMO), "gpu.xml")


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("number_of_cores", "0", "1 to 1024"),
        ("number_of_cores", "eight", "whole number"),
        ("number_of_cores", "8.5", "whole number"),
        ("core_tech_node", "-40", "1 to 250 nm"),
        ("temperature", "85", "200 to 450 K"),
        ("idle_core_power", "nan", "a number"),
        ("target_core_clockrate", "1e9", "1 to 10000 MHz"),
        ("dcache_config", "16384,128,4", "8 whole numbers"),
        ("dcache_config", "1000,128,4,1,1,3,8,0", "do not hold whole sets"),
        ("dcache_config", "0,128,4,1,1,3,8,0", "above zero"),
        ("pipelines_per_core", "1,x", "2 whole numbers"),
        ("TOT_INST", "-2", "zero or more"),
        ("TOT_INST", "two", "a number"),
        ("dram_rd_coeff", "7.7", "0 to 1 J"),
    ],
)
def test_each_senseless_parameter_is_named(name: str, value: str, complaint: str) -> None:
    text = re.sub(
        rb'<param name="%s" value="[^"]*"' % name.encode(),
        f'<param name="{name}" value="{value}"'.encode(),
        DEMO,
    )
    with pytest.raises(BadInput, match=complaint) as caught:
        parse_xml_architecture(text, "gpu.xml")
    assert name in str(caught.value)


def test_several_complaints_come_together() -> None:
    broken = re.sub(rb'\s*<param name="(warp_size|rf_banks|simd_width)" [^>]*/>', b"", DEMO)
    with pytest.raises(BadInput, match=r"warp_size.*missing") as caught:
        parse_xml_architecture(broken, "gpu.xml")
    assert "rf_banks" in str(caught.value)
    assert "simd_width" in str(caught.value)


BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">]>
<component id="root" name="&c;"/>"""


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (BOMB, "document types are not read"),
        (
            b'<?xml version="1.0"?><!DOCTYPE x SYSTEM "file:///etc/passwd"><component id="root"/>',
            "are not read",
        ),
        (b'<component id="a">' * 100 + b"</component>" * 100, "at most 32 levels"),
        (
            b'<component id="root">' + b'<param name="a" value="1"/>' * 30_000 + b"</component>",
            "elements",
        ),
        (DEMO[: len(DEMO) // 2], "not valid XML"),
        (b"", "not valid XML"),
        (b"\xff\xfe\x00", "not valid XML"),
        (b'<component id="root" name="root"></component>', "component 'system'"),
        (b'<component id="system"><param name="x"/></component>', "'value'"),
        (b'<component id="system"><script/></component>', "params and stats"),
        (
            b'<component id="system"><param name="x" value="1"/><param name="x" value="2"/></component>',
            "1 and 2",
        ),
    ],
)
def test_hostile_xml_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        parse_xml_architecture(data, "gpu.xml")


def test_a_file_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.xml"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(BadInput, match="at most"):
        read_architecture(path)


def test_bad_yaml_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    write_architecture(demo_architecture(), path)
    good = path.read_text()
    for old, new, complaint in (
        ("40 nm", "40 MHz", "parameters.core_tech_node: expected a quantity in m"),
        ("warp_size: 32", "warp_sizes: 32", "parameters.warp_sizes"),
        ("dialect: gpuwattch", "dialect: accelwattch", "dialect"),
        ("wattcast: architecture", "wattcast: energies", "wattcast"),
        ("scaling:", "scalings:", "scalings"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(BadInput, match=re.escape(complaint)):
            read_architecture(path)


def test_accelwattch_needs_its_static_powers(reference: Path) -> None:
    file = read_architecture(reference / "accelwattch" / "xml" / "accelwattch_sass_sim.xml")
    static = {name: value for name, value in file.static.items() if name != "static_cat6_flane"}
    with pytest.raises(BadInput, match="static_cat6_flane is missing"):
        replace(file, static=static)
