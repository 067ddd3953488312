"""Component models that come with Wattcast: fitted by us, with their source and their errors beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec

from wattcast.errors import unknown_name
from wattcast.files import from_yaml
from wattcast.power.component.model import KIND, ComponentPower


@dataclass(frozen=True)
class Shipped:
    """A model, where it came from, and how wrong it is."""

    name: str
    model: ComponentPower
    device: str
    source: str
    kernels: int
    mape: Mapping[str, float]  # in percent


class _File(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: str
    name: str
    device: str
    source: str
    kernels: int
    mape: dict[str, float]
    model: dict[str, Any]


def names() -> tuple[str, ...]:
    """Models there are."""
    folder = files("wattcast.power.component").joinpath("tables")
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load(name: str) -> Shipped:
    """One of them."""
    if name not in names():
        raise unknown_name("component model", name, names())
    where = f"{name}.yaml"
    data = files("wattcast.power.component").joinpath("tables", where).read_bytes()
    file = from_yaml(data, _File, where)
    model = KIND.from_plain(file.model)
    assert isinstance(model, ComponentPower)
    return Shipped(file.name, model, file.device, file.source, file.kernels, file.mape)
