"""Forms that people in sustainability and compliance hand in, filled from predictions.

- ``sci``: Software Carbon Intensity (ISO/IEC 21031:2024), SCI = (E·I + M) per R, with the energy E
of
  a functional unit R, the carbon intensity I of electricity, and the embodied emissions
  M = TE·TS·RS: those of the hardware (TE), by the share of its life (TS) and of it (RS) that is
  used.
- ``ghg``: a year or another period by the scopes of the Greenhouse Gas Protocol: purchased
  electricity is scope 2, hardware that was bought is category 2 of scope 3.
- ``eu-ai-act``: compute, training time and energy of a general-purpose model, as Annex XI,
  section 1, points 2 (d) and (e) of Regulation (EU) 2024/1689 ask.

A figure that nobody gave stays null, and ``missing`` names it: a sum without it is no total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core import bad_value
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prices import parse_prices

FORMS = ("sci", "ghg", "eu-ai-act")
JOULE_PER_KWH = 3.6e6
HOURS_PER_YEAR = 8766.0  # of 365.25 days
TOKENS_OF_A_UNIT = 1000  # of the functional unit of a language model


class Estimate(msgspec.Struct):
    """A figure and the ends of its 90 % interval."""

    value: float
    low: float
    high: float


class SciForm(msgspec.Struct, kw_only=True):
    """Software Carbon Intensity of one functional unit."""

    standard: str = "ISO/IEC 21031:2024"
    software: str
    boundary: str
    functional_unit: str
    energy_kwh: Estimate  # E of a functional unit, at the meter
    carbon_g_per_kwh: float  # I
    carbon_source: str
    operational_g: Estimate  # E·I
    embodied_g: float | None  # M of a functional unit
    sci_g: Estimate | None  # null where embodied emissions are missing
    missing: list[str]
    method: str


class GhgForm(msgspec.Struct, kw_only=True):
    """Emissions of a period by the scopes of the Greenhouse Gas Protocol."""

    standard: str = "GHG Protocol Corporate Standard and Scope 2 Guidance"
    activity: str
    period_h: float
    gpus: int
    energy_kwh: Estimate
    carbon_g_per_kwh: float
    carbon_source: str
    scope_1_kg: float  # no fuel is burnt by GPUs
    scope_2_location_based_kg: Estimate
    scope_2_market_based_kg: Estimate | None  # contracts of the site are not known
    scope_3_category_2_kg: float | None  # the hardware, by the share of its life
    missing: list[str]
    method: str


class AiActForm(msgspec.Struct, kw_only=True):
    """Annex XI, section 1, points 2 (d) and (e) of Regulation (EU) 2024/1689."""

    regulation: str = "Regulation (EU) 2024/1689, Annex XI, section 1, points 2 (d) and (e)"
    model: str
    training_tokens: float
    training_flop: float
    hardware: str
    training_time_h: Estimate
    gpu_hours: Estimate
    energy_kwh: Estimate  # of the GPUs
    site_energy_kwh: Estimate  # with hosts and the site's overhead
    energy_is: str  # known or estimated
    carbon_kg: Estimate | None
    carbon_source: str | None
    missing: list[str]
    method: str


FORM_TYPES: dict[str, type] = {
    "sci": SciForm,
    "ghg": GhgForm,
    "eu-ai-act": AiActForm,
}


@dataclass(frozen=True)
class CarbonInputs:
    """What a form needs beyond a prediction."""

    carbon: str | None = None  # 400g/kWh, or a region
    pue: float = 1.0
    embodied_g: float | None = None  # of one GPU with its share of the server
    lifetime_h: float | None = None
    period_h: float = HOURS_PER_YEAR

    def read_intensity(self) -> tuple[float, str]:
        """Return grams per kWh at the meter and where they come from."""
        if self.carbon is None:
            do = "Give --carbon 400g/kWh, or a region such as france."
            raise bad_value("carbon", "the carbon intensity of the site's electricity", "none", do)
        prices = parse_prices(carbon=self.carbon, pue=self.pue)
        assert prices.carbon_g_per_j is not None
        source = next((note for note in prices.notes if note.startswith("carbon")), "")
        return prices.carbon_g_per_j * JOULE_PER_KWH, source or "given by the user"

    def embodied_g_of(self, gpu_h: float) -> float | None:
        """Return M = TE·TS of so many GPU hours; None where it is not known."""
        if self.embodied_g is None or self.lifetime_h is None:
            return None
        return self.embodied_g * gpu_h / self.lifetime_h

    def list_missing(self) -> list[str]:
        """Name the figures that nobody gave."""
        missing = []
        if self.embodied_g is None:
            missing.append("embodied emissions of a GPU (--embodied)")
        if self.lifetime_h is None:
            missing.append("lifetime of the hardware (--lifetime)")
        if self.pue == 1.0:
            missing.append("overhead of the site (--pue): energy is that of the GPUs' boards")
        return missing


def _scale(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def _add(estimate: Estimate, amount: float) -> Estimate:
    return Estimate(estimate.value + amount, estimate.low + amount, estimate.high + amount)


def _check_single(p: Prediction) -> None:
    if np.ndim(p.latency_s):
        raise bad_value("form", "a prediction of one configuration", f"a sweep of {p.name}")


def fill_sci(p: Prediction, given: CarbonInputs) -> SciForm:
    """Fill the form of one functional unit: a thousand tokens, a picture, or a run."""
    _check_single(p)
    per_kwh_g, source = given.read_intensity()
    if p.tokens is not None:
        units = p.tokens / TOKENS_OF_A_UNIT
        unit = f"{TOKENS_OF_A_UNIT} tokens"
    elif p.items is not None:
        units = float(p.items)
        unit = f"one {p.basis.graph.item}"
    else:
        units = 1.0
        unit = "one run"

    # E: joules of all GPUs at the meter, over the functional units of a run
    low_j, high_j = (float(end) for end in p.interval.energy_j)
    run_j = Estimate(float(p.energy_j), low_j, high_j)
    energy = _scale(run_j, p.gpu_count * given.pue / JOULE_PER_KWH / units)
    operational = _scale(energy, per_kwh_g)  # E·I
    gpu_h = p.gpu_count * float(p.latency_s) / 3600.0 / units
    embodied_g = given.embodied_g_of(gpu_h)  # M
    return SciForm(
        software=p.name,
        boundary=f"{p.gpu_count} x {p.gpu}: the boards of the GPUs, no host, no network",
        functional_unit=unit,
        energy_kwh=energy,
        carbon_g_per_kwh=per_kwh_g,
        carbon_source=source,
        operational_g=operational,
        embodied_g=embodied_g,
        sci_g=None if embodied_g is None else _add(operational, embodied_g),
        missing=given.list_missing(),
        method=_describe_method(str(p.status)),
    )


def fill_ghg(p: Prediction, given: CarbonInputs) -> GhgForm:
    """Fill the form of a period in which the workload runs without pause."""
    _check_single(p)
    per_kwh_g, source = given.read_intensity()
    low_w, high_w = (float(end) for end in p.interval.power_w)
    power_w = Estimate(float(p.power_w), low_w, high_w)
    energy = _scale(power_w, p.gpu_count * given.pue * given.period_h / 1000.0)
    embodied_g = given.embodied_g_of(p.gpu_count * given.period_h)
    return GhgForm(
        activity=f"{p.name} on {p.gpu_count} x {p.gpu}, without pause",
        period_h=given.period_h,
        gpus=p.gpu_count,
        energy_kwh=energy,
        carbon_g_per_kwh=per_kwh_g,
        carbon_source=source,
        scope_1_kg=0.0,
        scope_2_location_based_kg=_scale(energy, per_kwh_g / 1000.0),
        scope_2_market_based_kg=None,
        scope_3_category_2_kg=None if embodied_g is None else embodied_g / 1000.0,
        missing=[*given.list_missing(), "contracts for electricity (market-based scope 2)"],
        method=_describe_method(str(p.status)),
    )


def fill_ai_act(
    job: Mapping[str, Any],
    flop_per_token: float,
    given: CarbonInputs,
) -> AiActForm:
    """Fill the form of a training job from its plain data (``TrainingResult.to_dict()``)."""
    low, high = (end / job["hours"] for end in job["interval"]["hours"])

    def spread(value: float) -> Estimate:
        return Estimate(value, value * low, value * high)

    carbon = source = None
    site_kwh = spread(job["site_energy_kwh"])
    if given.carbon is not None:
        per_kwh_g, source = given.read_intensity()
        carbon = _scale(site_kwh, per_kwh_g / 1000.0)
    missing = [] if carbon is not None else ["carbon intensity (--carbon)"]
    return AiActForm(
        model=job["model"],
        training_tokens=job["tokens"],
        training_flop=flop_per_token * job["tokens"],
        hardware=f"{job['gpus']} x {job['gpu']}",
        training_time_h=spread(job["hours"]),
        gpu_hours=spread(job["gpu_hours"]),
        energy_kwh=spread(job["energy_kwh"]),
        site_energy_kwh=site_kwh,
        energy_is="estimated",
        carbon_kg=carbon,
        carbon_source=source,
        missing=[*missing, "energy of experiments, data preparation and failed runs"],
        method=_describe_method("the GPU's"),
    )


def _describe_method(status: str) -> str:
    return f"predicted by Wattcast {__version__} with {status} coefficients; intervals of 90 %"


def make_schema(form: str) -> dict[str, Any]:
    """Return the JSON schema of a form."""
    return msgspec.json.schema(FORM_TYPES[form])


def encode_form(form: SciForm | GhgForm | AiActForm) -> bytes:
    """Return a form as JSON text."""
    return msgspec.json.format(msgspec.json.encode(form), indent=1) + b"\n"
