"""The options of power over time: the file, its grid and its sensor, and the state of a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattcast.core import bad_value
from wattcast.core.option_declaration import Option

_PANEL = "Power over time"
SENSOR_KINDS = ("nvml", "instant", "average", "counter")


@dataclass(frozen=True)
class PowerOutput:
    """A file of power over time that a command writes beside its result."""

    power_out: Annotated[
        Path | None, Option("Save power over time (.csv, .parquet).", panel=_PANEL)
    ] = None
    grid_s: Annotated[
        float,
        Option(
            "Interval of --power-out: 20ms, 1s, 15min.",
            "grid",
            panel=_PANEL,
            unit="s",
            above=0,
        ),
    ] = 1.0
    power_span_s: Annotated[
        float | None,
        Option(
            "End --power-out after so long: 10min.",
            panel=_PANEL,
            unit="s",
            above=0,
        ),
    ] = None
    sensor: Annotated[
        str | None,
        Option(
            "Add a column of what a sensor shows: nvml|instant|average|counter.",
            panel=_PANEL,
            choices=SENSOR_KINDS,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.power_out is not None:
            return
        if self.sensor is not None or self.power_span_s is not None:
            expected = "--power-out FILE beside it"
            name = "--sensor" if self.sensor is not None else "--power-span"
            raise bad_value(name, expected, "none")


@dataclass(frozen=True)
class NodeConditions:
    """At which a server is asked for its power."""

    gpu_power_w: Annotated[
        float | None,
        Option("Power of each GPU, such as 650W; default: its limit.", unit="W", above=0),
    ] = None
    inlet_c: Annotated[
        float | None, Option("Temperature of the air at the inlet; default: 24C.", unit="C")
    ] = None
