"""``--factor NAME=VALUE`` on the command line -> efficiency factors."""

from __future__ import annotations

from collections.abc import Sequence

from wattcast.errors import bad_value


def factors_of(given: Sequence[str]) -> dict[str, float]:
    """``["compute=0.9"]`` -> ``{"compute": 0.9}``; names and ranges are checked where they are applied."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            number = float(value.removesuffix("W").strip())
        except ValueError:
            equals = ""
            number = 0.0
        if not equals or not name.strip():
            raise bad_value("--factor", "NAME=VALUE, such as compute=0.9", text)
        if name.strip() in found:
            raise bad_value("--factor", f"one value of {name.strip()}", "two")
        found[name.strip()] = number
    return found
