"""The options of a prediction beside those of its model: settings of the card, and prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from wattcast.core.errors import bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse_amount
from wattcast.options.run_options import ModelOptions
from wattcast.options.verb_options import VerbOptions, part_of

if TYPE_CHECKING:
    from wattcast.core.arrays import Sweepable
    from wattcast.hardware import Node
    from wattcast.predictor.bundle.bundle_file import Bundle

CARDS = ("another", "this")
OPERANDS = ("cold", "warm")
ENGINES = ("vllm", "sglang", "trtllm")  # whose kernels are in public tables
VLLM_OF_2025 = "vllm-2025"  # up to 0.11, which ran experts in fp8 by DeepGEMM on Blackwell
SCHEDULING = ("async", "sync")
DATA = ("random", "zeros", "ones", "relu")
SUSTAINED = "sustained"
MOST_FACTOR = 10.0  # of a host or a card over the usual one
_CONDITION_PANEL = "Conditions"
_COEFFICIENT_PANEL = "Coefficients and intervals"
_PRICE_PANEL = "Cost and carbon"


def parse_duration(value: Any, where: str) -> float | None:
    """Return the seconds of a burst, or None for work that goes on until the governor has
    settled.
    """
    if value == SUSTAINED:
        return None
    return parse_amount(value, "s", where, inclusive=False) if isinstance(value, str) else value


@dataclass(frozen=True)
class SettingOptions:
    """How the card is set, what is known of it, and what the operands hold.

    ``clock``, ``power_limit``, ``temperature`` and ``host_launch`` may be arrays."""

    clock_hz: Annotated[Sweepable | None, Option("Lock the clock, such as 1830MHz.", unit="Hz")] = (
        None
    )
    power_limit_w: Annotated[
        Sweepable | None, Option("Board power limit, such as 500W.", unit="W")
    ] = None
    host_launch_s: Annotated[
        Sweepable | None,
        Option("Host time per operator, such as 12us.", unit="s", panel=_CONDITION_PANEL),
    ] = None
    temperature_c: Annotated[
        Sweepable | None,
        Option("Die temperature, such as 60C.", unit="C", panel=_CONDITION_PANEL),
    ] = None
    duration_s: Annotated[
        float | None,
        Option(
            "Duration of a burst, such as 5ms; default: sustained.",
            unit="s",
            panel=_CONDITION_PANEL,
            parse=parse_duration,
        ),
    ] = None
    data: Annotated[
        str,
        Option("Operands hold random|zeros|ones|relu.", choices=DATA, panel=_CONDITION_PANEL),
    ] = "random"
    operands: Annotated[
        str | None,
        Option(
            "Where operands of a list lie: cold (memory) or warm (L2).",
            choices=OPERANDS,
            panel=_COEFFICIENT_PANEL,
        ),
    ] = None
    bundle: Annotated[
        Bundle | str | Path | None,
        Option("Folder that `calibrate` saved.", panel=_COEFFICIENT_PANEL),
    ] = None
    factors: Annotated[
        Mapping[str, float] | None,
        Option("A factor of your own, such as compute=0.9.", "factor", panel=_COEFFICIENT_PANEL),
    ] = None
    card: Annotated[
        str,
        Option(
            "Give intervals for another card or for this card: another|this.",
            choices=CARDS,
            panel=_COEFFICIENT_PANEL,
        ),
    ] = "another"
    engine: Annotated[
        str | None,
        Option(
            "Engine whose kernels run: vllm|vllm-2025|sglang|trtllm; default: vllm.",
            choices=(*ENGINES, VLLM_OF_2025),
            panel=_COEFFICIENT_PANEL,
        ),
    ] = None
    scheduling: Annotated[
        str,
        Option(
            "When an engine prepares its next step: async (meanwhile) or sync (after).",
            choices=SCHEDULING,
            panel=_CONDITION_PANEL,
        ),
    ] = "async"
    node: Annotated[
        Node | str | Path | None,
        Option("Node of the GPUs: a name of `gpus nodes`, or YAML.", panel="Several GPUs"),
    ] = None
    force: Annotated[bool, Option("Answer even where it cannot run.")] = False

    def read_number(self, name: str) -> float | None:
        """Return a setting where one number is taken, not an array."""
        value = getattr(self, name)
        if value is None or isinstance(value, int | float):
            return value
        raise bad_value(name.rpartition("_")[0], "one number", value)


@dataclass(frozen=True)
class MachineOptions:
    """How a host and a card differ from the usual ones.

    None: as ``wattcast doctor --card`` measured this machine, else 1.
    """

    host_factor: Annotated[
        float | None,
        Option(
            "Time your host takes for a step, over the usual: 0.7.",
            panel=_COEFFICIENT_PANEL,
            unit="",
            above=0,
            most=MOST_FACTOR,
        ),
    ] = None
    power_factor: Annotated[
        float | None,
        Option(
            "Watts your card draws at work, over the usual: 1.05.",
            panel=_COEFFICIENT_PANEL,
            unit="",
            above=0,
            most=MOST_FACTOR,
        ),
    ] = None


USUAL_MACHINE = MachineOptions(host_factor=1.0, power_factor=1.0)


@dataclass(frozen=True)
class PriceOptions:
    """What energy and GPU time cost; ``parse_prices`` reads them."""

    price: Annotated[
        str | Sequence[str] | None,
        Option("Rent of a GPU an hour: 2.50, or h200=3.50USD,b200=5USD.", panel=_PRICE_PANEL),
    ] = None
    electricity: Annotated[
        str | None, Option("Price of energy, such as 0.12/kWh.", panel=_PRICE_PANEL)
    ] = None
    carbon: Annotated[
        str | None,
        Option("Carbon intensity, such as 400g/kWh, or a region: us.", panel=_PRICE_PANEL),
    ] = None
    pue: Annotated[
        float, Option("Energy at the meter over energy of the GPUs (PUE).", panel=_PRICE_PANEL)
    ] = 1.0


CARD_SETTINGS = ("clock", "power_limit")
POINT_SETTINGS = (*CARD_SETTINGS, "host_launch", "temperature", "duration", "data")

PREDICT = VerbOptions("predict", ModelOptions, SettingOptions, MachineOptions, PriceOptions)
REPORT = VerbOptions("report", ModelOptions, part_of(SettingOptions, *POINT_SETTINGS, "force"))
COMPARE = VerbOptions("compare", ModelOptions, part_of(SettingOptions, *POINT_SETTINGS))
