"""What can be varied: names as the catalogue's YAML writes them -> fields of a Gpu, settings of a card.

A field's column name ends in its unit, as everywhere; for a field of the chip it is the dotted path of
:class:`~wattcast.hardware.Gpu`, so that a column can be put back into ``Gpu.with_fields``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wattcast import naming
from wattcast.dtypes import Dtype
from wattcast.errors import bad_value, unknown_name
from wattcast.hardware import Gpu
from wattcast.hardware.gpu import numbers


class Kind(StrEnum):
    """What a field belongs to."""

    CHIP = "chip"  # a number of the Gpu, at its dotted path
    SETTING = "setting"  # of the OperatingPoint
    SCALE = "scale"  # a factor on several numbers of the chip or its bundle


@dataclass(frozen=True)
class Field:
    """One thing that can be varied."""

    name: str
    unit: str
    kind: Kind
    column: str
    whole: bool = False  # only whole numbers make sense

    @property
    def shown_unit(self) -> str:
        """The unit in words."""
        return self.unit or "a pure number"


_SETTINGS = (
    Field("clock", "Hz", Kind.SETTING, "asked_clock_hz"),
    Field("power_limit", "W", Kind.SETTING, "asked_power_limit_w"),
    Field("temperature", "C", Kind.SETTING, "temperature_c"),
)
_SCALES = (
    Field("voltage", "", Kind.SCALE, "voltage_scale"),
    Field("tensor", "", Kind.SCALE, "tensor_scale"),
)
_CHIP = (
    Field("sm_count", "", Kind.CHIP, "sm_count", whole=True),
    Field("memory.bandwidth", "byte/s", Kind.CHIP, "memory.byte_per_s"),
    Field("memory.capacity", "byte", Kind.CHIP, "memory.capacity_byte"),
    Field("l2.capacity", "byte", Kind.CHIP, "l2.capacity_byte"),
    Field("l2.per_cycle", "byte/cycle", Kind.CHIP, "l2.byte_per_cycle"),
    Field("sm.shared_capacity", "byte", Kind.CHIP, "sm.shared_byte"),
    Field("sm.shared_per_cycle", "byte/cycle", Kind.CHIP, "sm.shared_byte_per_cycle"),
    Field("pipes.int32_per_cycle_sm", "op/cycle", Kind.CHIP, "pipes.int32_op_per_cycle"),
    Field("pipes.sfu_per_cycle_sm", "op/cycle", Kind.CHIP, "pipes.sfu_op_per_cycle"),
    Field("links.nvlink", "byte/s", Kind.CHIP, "links.nvlink_byte_per_s"),
    Field("links.pcie", "byte/s", Kind.CHIP, "links.pcie_byte_per_s"),
    Field("clocks.max", "Hz", Kind.CHIP, "clocks.max_hz"),
)
_ALIASES = {
    "bandwidth": "memory.bandwidth",
    "sms": "sm_count",
    "l2": "l2.capacity",
    "tdp": "power_limit",
    "nvlink": "links.nvlink",
    "core_clock": "clock",
}
# axes of the workload, which `explore algorithms` varies
WORKLOAD = ("batch", "seq", "tokens", "dtype", "attention", "stack", "phase", "head", "tp", "pp", "dp")


def fields_of(gpu: Gpu) -> dict[str, Field]:
    """Every field that can be varied on this GPU, by name."""
    per_dtype = [
        Field(f"{head}_per_cycle_sm.{dtype}", _rate_unit(dtype), Kind.CHIP, f"{head}_flop_per_cycle.{dtype}")
        for head, rates in (
            ("pipes.tensor", gpu.pipes.tensor_flop_per_cycle),
            ("pipes.cuda", gpu.pipes.cuda_flop_per_cycle),
        )
        for dtype in rates
    ]
    return {field.name: field for field in (*_SETTINGS, *_SCALES, *_CHIP, *per_dtype)}


def find(name: str, gpu: Gpu) -> Field:
    """The field called ``name``: as the catalogue writes it, its column, or a short name."""
    known = fields_of(gpu)
    table = {naming.fold(key): key for key in known}
    table |= {naming.fold(field.column): key for key, field in known.items()}
    table |= {naming.fold(short): key for short, key in _ALIASES.items()}
    if (key := table.get(naming.fold(name))) is not None:
        return _published(known[key], gpu)
    if naming.fold(name) in WORKLOAD:
        raise bad_value("vary", "a field of the GPU or a setting", name, "`explore algorithms` varies the workload.")
    raise unknown_name("field", name, [*known, *_ALIASES], f"Known: {', '.join(known)}.")


def _published(field: Field, gpu: Gpu) -> Field:
    """Varying what nobody published is allowed; varying what the chip does not have is not."""
    if field.name == "tensor" and not gpu.pipes.tensor_flop_per_cycle:
        raise bad_value("vary tensor", "a GPU with tensor cores", gpu.name)
    return field


def base_value(field: Field, gpu: Gpu) -> float | None:
    """What the field is on the GPU itself; None where unknown or left to the governor."""
    if field.kind is Kind.SCALE:
        return 1.0
    if field.kind is Kind.SETTING:
        return None
    return next((float(value) for path, value in numbers(gpu) if path == field.column), None)


def _rate_unit(dtype: Dtype) -> str:
    return "op/cycle" if dtype.startswith("int") else "flop/cycle"
