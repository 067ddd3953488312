"""Compute what energy and GPU time cost, and the carbon that they cause.

Unknown prices stay unknown: nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from wattcast.core import (
    BadInput,
    bad_value,
    check_names,
    errors,
    units,
    unknown_name,
)
from wattcast.core.arrays import Array
from wattcast.core.option_declaration import list_declared
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware.catalogue_reader import resolve_gpu_name, strip_board
from wattcast.options.setting_options import PriceOptions

CURRENCIES = ("USD", "EUR", "")  # "": a number without a currency, which is then shown without one
MOST_PUE = 10.0  # beyond it, somebody's finger slipped
BOARD_ENERGY = "energy at the GPU's board: PUE 1, no host"
ANY_GPU = ""  # in ``rent_per_s``: every GPU that is not named
_SIGNS = {"$": "USD", "€": "EUR"}
_Amount = TypeVar("_Amount", float, Array)
_REGION_ALIASES = {"us": "united-states", "usa": "united-states"}


@dataclass(frozen=True)
class Prices:
    """Tariff, carbon intensity, rent of GPUs, and the site's overhead."""

    per_j: float | None = None  # currency per joule at the meter
    currency: str = ""
    carbon_g_per_j: float | None = None
    # GPU -> currency per second of one GPU
    rent_per_s: Mapping[str, float] = field(default_factory=dict)
    pue: float = 1.0  # joules at the meter per joule of the GPU
    notes: tuple[str, ...] = ()

    def cost(
        self,
        gpu: str,
        energy_j: _Amount,
        gpu_s: _Amount,
    ) -> _Amount | None:
        """Return the money for ``energy_j`` drawn by GPUs over ``gpu_s`` GPU seconds; None where no
        price is known.

        cost = E·PUE·tariff + t·rent. Where only one of tariff and rent is given, that one alone is
        counted; where GPUs have rents, one without has an unknown cost.
        """
        rent = self._find_rent(gpu)
        if rent is None and (self.per_j is None or self.rent_per_s):
            return None
        return energy_j * self.pue * (self.per_j or 0.0) + gpu_s * (rent or 0.0)

    def _find_rent(self, gpu: str) -> float | None:
        for name in (gpu, strip_board(gpu), ANY_GPU):
            if name in self.rent_per_s:
                return self.rent_per_s[name]
        return None

    def carbon_g(self, energy_j: _Amount) -> _Amount | None:
        """Return the grams of CO2 equivalent for ``energy_j`` drawn by GPUs; None where the
        intensity is unknown.
        """
        if self.carbon_g_per_j is None:
            return None
        return energy_j * self.pue * self.carbon_g_per_j


def parse_prices(
    price: str | Sequence[str] | None = None,
    electricity: str | None = None,
    carbon: str | None = None,
    pue: float = 1.0,
    **unknown: object,
) -> Prices:
    """Read prices as people write them.

    ``price`` is the rent of a GPU, ``2.50/h`` or ``h200=3.50USD/h`` for one kind, or several of
    them, in a list or with commas between; an amount without a time is for an hour;
    ``electricity`` a tariff, ``0.12USD/kWh``; ``carbon`` an intensity, ``400g/kWh``, or a region,
    ``us``; ``pue`` the energy at the meter per energy of the GPU. ``unknown`` are options of
    whichever function takes prices beside its own.
    """
    names = [option.keyword for option in list_declared(PriceOptions)]
    check_names("option", unknown, names, f"Prices: {', '.join(names)}.")
    if not 1.0 <= pue <= MOST_PUE:
        raise bad_value("pue", f"a number from 1 to {MOST_PUE:g}", pue)

    tariff_per_j = None
    currency = ""
    if electricity is not None:
        tariff_per_j, currency = _read_money(electricity, "J", "electricity", "0.12USD/kWh")
    rents = {}
    for text in _split_prices(price):
        gpu, rent_per_s, rent_currency = _read_rent(text)
        if currency and rent_currency and rent_currency != currency:
            raise bad_value("price", f"one currency, {currency}", text)
        currency = currency or rent_currency
        rents[gpu] = rent_per_s

    carbon_g_per_j = None
    notes: list[str] = []
    if carbon is not None:
        carbon_g_per_j, notes = _read_carbon(carbon)
    if pue == 1.0 and (rents or electricity or carbon):
        notes.append(BOARD_ENERGY)
    return Prices(
        tariff_per_j,
        currency,
        carbon_g_per_j,
        rents,
        pue,
        tuple(notes),
    )


def _read_rent(text: str) -> tuple[str, float, str]:
    """Return the GPU of a rent, the rent per second, and its currency."""
    name, equals, amount = text.rpartition("=")
    if not equals:
        example = "3.50USD/h, or h200=3.50USD/h"
        return ANY_GPU, *_read_money(_add_hour(amount), "s", "price", example)
    gpu = resolve_gpu_name(name.strip())
    return gpu, *_read_money(_add_hour(amount), "s", f"price {gpu}", "3.50USD/h")


def read_prices(options: PriceOptions) -> Prices:
    """Return the prices of a group of options."""
    return parse_prices(options.price, options.electricity, options.carbon, options.pue)


def _split_prices(price: str | Sequence[str] | None) -> list[str]:
    """Return rents one by one, of a list or of text with commas between."""
    texts = [price] if isinstance(price, str) else price or ()
    return [part.strip() for text in texts for part in text.split(",")]


def _add_hour(amount: str) -> str:
    """Return a rent with its time: an hour, where none is written.

    >>> _add_hour("2.50 USD")
    '2.50 USD/h'
    """
    if "/" in amount or not amount.strip():
        return amount
    return f"{amount}/h"


@cache
def carbon_regions() -> dict[str, tuple[float, str]]:
    """Return the grams of CO2 equivalent per kWh by region, with the year and the source."""
    regions = {}
    for row in read_shipped_table("wattcast.predictor", "carbon.csv"):
        source = f"{row['year']}, {row['source']}"
        regions[row["region"]] = (float(row["g_per_kwh"]), source)
    return regions


def _read_money(
    text: str,
    per: str,
    where: str,
    example: str,
) -> tuple[float, str]:
    """Return an amount of money per unit, and its currency."""
    sign = text.strip()[:1]
    if sign in _SIGNS:  # $2/h is read as 2 USD/h
        text = text.replace(sign, "", 1).replace("/", f" {_SIGNS[sign]}/", 1)
    for currency in CURRENCIES:
        try:
            value = units.parse(text, f"{currency}/{per}", where)
        except BadInput:
            continue
        if value < 0:
            raise bad_value(where, "zero or more", text)
        return value, currency
    raise bad_value(where, f"money such as {example}, in USD, EUR or without a currency", text)


def _read_carbon(text: str) -> tuple[float, list[str]]:
    """Return the grams of CO2 equivalent per joule, and a note where they are those of a region."""
    if text[:1].isdigit() or text[:1] in ".+-":
        value = units.parse(text, "g/J", "carbon")
        if value < 0:
            raise bad_value("carbon", "zero or more", text)
        return value, []
    table = carbon_regions()
    folded = {errors.fold_name(region): region for region in table}
    folded |= _REGION_ALIASES
    if errors.fold_name(text) not in folded:
        do = f"Known: {', '.join(table)}. Or give a number, such as 400g/kWh."
        raise unknown_name("region of carbon intensity", text, table, do)
    region = folded[errors.fold_name(text)]
    per_kwh, source = table[region]
    return per_kwh / 3.6e6, [f"carbon intensity of {region}: {per_kwh:g} g/kWh ({source})"]
