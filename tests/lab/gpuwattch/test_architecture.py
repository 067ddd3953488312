"""Architecture files of both dialects are read, written back and, where they make no sense, refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture

from wattcast.core.errors import BadInput
from wattcast.lab.gpuwattch.architecture import (
    format_xml_architecture,
    known_parameters,
    parse_xml_architecture,
    read_architecture,
    write_architecture,
)
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect

DEMO = format_xml_architecture(demo_architecture())


def test_the_manuals_36_parameters_are_all_there() -> None:
    indexed = [p for p in known_parameters().values() if p.index is not None]
    assert sorted(p.index for p in indexed) == list(range(1, 37))
    assert {p.name for p in indexed} <= set(demo_architecture().parameters)


def test_a_written_file_reads_as_the_architecture_it_was_written_from(tmp_path: Path) -> None:
    demo = demo_architecture()
    write_architecture(demo, tmp_path / "demo.xml")
    back = read_architecture(tmp_path / "demo.xml")
    assert back.parameters == demo.parameters
    assert back.scaling == demo.scaling


def test_an_architecture_is_written_as_xml_alone(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in \.xml"):
        write_architecture(demo_architecture(), tmp_path / "demo.yaml")
    assert not list(tmp_path.iterdir())


def test_every_public_file_survives_writing(reference: Path) -> None:
    files = sorted((reference / "accelwattch" / "xml").glob("*.xml"))
    assert len(files) == 10
    for file in files:
        first = read_architecture(file)
        assert first.dialect is (
            SimulatorDialect.ACCELWATTCH
            if "accelwattch" in file.name
            else SimulatorDialect.GPUWATTCH
        )
        assert parse_xml_architecture(format_xml_architecture(first), first.name) == first


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


def test_accelwattch_needs_its_static_powers(reference: Path) -> None:
    file = read_architecture(reference / "accelwattch" / "xml" / "accelwattch_sass_sim.xml")
    static = {name: value for name, value in file.static.items() if name != "static_cat6_flane"}
    with pytest.raises(BadInput, match="static_cat6_flane is missing"):
        replace(file, static=static)
