from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.core import units
from wattcast.core.errors import UnitError


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4.8 TB/s", "byte/s", 4.8e12),
        ("1830MHz", "Hz", 1.83e9),
        ("1.7 GHz", "Hz", 1.7e9),
        ("50 MiB", "byte", 50 * 2**20),
        ("12us", "s", 12e-6),
        ("12 µs", "s", 12e-6),
        ("0us", "s", 0.0),
        ("989.4 TFLOPS", "flop/s", 989.4e12),
        ("989.4 TFLOP/s", "flop/s", 989.4e12),
        ("3.9 pJ/bit", "J/byte", 31.2e-12),
        ("1 kWh", "J", 3.6e6),
        ("128 B/cycle", "byte/cycle", 128.0),
        ("60 °C", "C", 60.0),
        ("1e3 W", "W", 1000.0),
        (7, "", 7.0),
        ("15 %", "", 0.15),
    ],
)
def test_parse_reads_what_datasheets_write(text: object, unit: str, value: float) -> None:
    assert units.parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *[
            ("50 MHz", "byte"),
            ("1830", "Hz"),
            (1830, "Hz"),
            ("W", "W"),
            ("", "W"),
            ("nan W", "W"),
            ("inf W", "W"),
        ],
        *[
            ("1e400 W", "W"),
            ("5 w", "W"),
            ("5 W W", "W"),
            ("--5 W", "W"),
            (None, "W"),
            (True, ""),
            (float("nan"), ""),
        ],
        *[
            ("4,8 TB/s", "byte/s"),
            ("1/0 W", "W"),
            ("9" * 200 + " W", "W"),
            ([1], "W"),
            (float("nan"), ""),
        ],
    ],
)
def test_parse_refuses_what_is_not_that_quantity(text: object, unit: str) -> None:
    with pytest.raises(UnitError, match="expected a"):
        units.parse(text, unit, "here")


@given(
    st.floats(1e-12, 1e15), st.sampled_from(["byte/s", "Hz", "W", "J", "s", "byte", "flop/s", "V"])
)
def test_what_is_shown_parses_back(value: float, unit: str) -> None:
    assert units.parse(units.show(value, unit, digits=12), unit) == pytest.approx(value, rel=1e-11)


@given(st.floats(1.0, 1e9))
def test_shown_numbers_have_a_readable_size(value: float) -> None:
    number = float(units.show(value, "Hz").split()[0])
    assert 0.999 <= number <= 1000.0
