"""Forms of carbon and energy: each against its schema, and against an example worked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import wattcast
from wattcast.core.errors import BadInput
from wattcast.report import sustainability_forms as forms
from wattcast.report.sustainability_forms import CarbonInputs

YEAR_H = 8766.0


@pytest.fixture(scope="module")
def decode() -> wattcast.Prediction:
    return wattcast.predict("llama3-8b", gpu="h200", phase="decode", batch=32, seq=1024, tp=2)


def hold(estimate: forms.Estimate, value: float, low: float, high: float) -> bool:
    ends = (estimate.value, estimate.low, estimate.high)
    return bool(np.allclose(ends, (value, low, high), rtol=1e-9))


class Made:
    """A prediction with round figures: 2 GPUs, 3600 J each in 10 s, 10,000 tokens."""

    name = "example"
    gpu = "h200"
    gpu_count = 2
    tokens = 10_000
    items = None
    latency_s = 10.0
    energy_j = 3600.0
    power_w = 360.0
    status = "measured"

    class interval:
        energy_j = np.array([3240.0, 3960.0])
        power_w = np.array([324.0, 396.0])


def test_sci_by_hand() -> None:
    """E: 2 x 3600 J x 1.2 = 8640 J = 0.0024 kWh for ten functional units of 1000 tokens, so
    0.00024 kWh a unit. E·I = 0.00024 x 500 = 0.12 g. M: 150 kg x (2 x 10 s / 10) / (4 years of
    8766 h) = 150,000 x 2 / 3600 / 35,064 = 0.0023766 g."""
    given = CarbonInputs("500g/kWh", 1.2, embodied_g=150_000.0, lifetime_h=4 * YEAR_H)
    form = forms.fill_sci(Made(), given)  # type: ignore[arg-type]
    assert form.functional_unit == "1000 tokens"
    assert hold(form.energy_kwh, 0.00024, 0.000216, 0.000264)
    assert hold(form.operational_g, 0.12, 0.108, 0.132)
    assert form.embodied_g == pytest.approx(150_000 * 2 / 3600 / 35_064, rel=1e-9)
    assert form.embodied_g == pytest.approx(0.0023766, rel=1e-4)
    assert form.sci_g is not None
    assert form.sci_g.value == pytest.approx(0.1223766, rel=1e-6)
    assert form.missing == []
    assert form.carbon_source == "given by the user"


def test_ghg_by_hand() -> None:
    """A year: 2 x 360 W x 8766 h = 6311.52 kWh, times 1.5 = 9467.28 kWh. At 100 g/kWh 946.728 kg of
    scope 2. Category 2 of scope 3: 2 x 150 kg x 1 / 5 years = 60 kg."""
    given = CarbonInputs("100g/kWh", 1.5, embodied_g=150_000.0, lifetime_h=5 * YEAR_H)
    form = forms.fill_ghg(Made(), given)  # type: ignore[arg-type]
    assert hold(form.energy_kwh, 9467.28, 8520.552, 10414.008)
    assert hold(form.scope_2_location_based_kg, 946.728, 852.0552, 1041.4008)
    assert form.scope_3_category_2_kg == pytest.approx(60.0)
    assert form.scope_1_kg == 0.0
    assert form.scope_2_market_based_kg is None


def test_ai_act_by_hand() -> None:
    """1e9 tokens of 6e9 FLOP are 6e18 FLOP; 10 h on 8 GPUs are 80 GPU hours, 8 to 12 h are 64 to 96;
    50 kWh become 40 to 60, and 65 kWh at the meter at 400 g/kWh 26 kg."""
    job = {
        "model": "example",
        "gpu": "h100-sxm",
        "gpus": 8,
        "tokens": 1e9,
        "hours": 10.0,
        "gpu_hours": 80.0,
        "energy_kwh": 50.0,
        "site_energy_kwh": 65.0,
        "interval": {"hours": [8.0, 12.0]},
    }
    form = forms.fill_ai_act(job, 6e9, CarbonInputs("400g/kWh"))
    assert form.training_flop == 6e18
    assert hold(form.training_time_h, 10.0, 8.0, 12.0)
    assert hold(form.gpu_hours, 80.0, 64.0, 96.0)
    assert hold(form.energy_kwh, 50.0, 40.0, 60.0)
    assert form.carbon_kg is not None
    assert hold(form.carbon_kg, 26.0, 20.8, 31.2)
    assert form.energy_is == "estimated"


def test_what_nobody_gave_stays_unknown(decode: wattcast.Prediction) -> None:
    form = forms.fill_sci(decode, CarbonInputs("france"))
    assert form.sci_g is None
    assert form.embodied_g is None
    assert any("embodied" in name for name in form.missing)
    assert "56 g/kWh (2023" in form.carbon_source
    per_kwh_g = form.carbon_g_per_kwh
    assert per_kwh_g == pytest.approx(56.0)
    per_token_j = form.energy_kwh.value * 3.6e6 / 1000
    assert per_token_j == pytest.approx(decode.energy_j_per_token)
    with pytest.raises(BadInput, match="--carbon"):
        forms.fill_sci(decode, CarbonInputs())
    sweep = wattcast.predict("gpt2", gpu="h200", seq=64, clock=[1e9, 1.5e9])
    with pytest.raises(BadInput, match="one configuration"):
        forms.fill_ghg(sweep, CarbonInputs("us"))


COMMANDS: dict[str, tuple[str, ...]] = {
    "sci": ("--phase", "decode", "--batch", "4", "--seq", "64", "--carbon", "france"),
    "ghg": ("--seq", "64", "--carbon", "400g/kWh", "--embodied", "150kg", "--lifetime", "5y"),
    "eu-ai-act": ("--gpus", "1", "--training-tokens", "1M", "--carbon", "germany"),
}


@pytest.mark.parametrize("form", forms.FORMS)
def test_a_form_holds_for_the_schema_beside_it(call, tmp_path: Path, form: str) -> None:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="no jsonschema: pip install 'wattcast[dev]'"
    )
    out = tmp_path / "form.json"
    done = call(
        "report", "gpt2", "--gpu", "h200", "--form", form, *COMMANDS[form], "--out", str(out)
    )
    assert done.code == 0, done.err
    filled: dict[str, Any] = json.loads(out.read_text())
    schema = json.loads((tmp_path / "form.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    check.validate(filled)
    assert list(check.iter_errors({})), "and not for anything"
    msgspec.json.decode(out.read_bytes(), type=forms.FORM_TYPES[form])
    for name in filled["missing"]:
        assert name in done.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--form", "scii", "--carbon", "us"), "Closest: sci"),
        (("--form", "sci"), "--carbon"),
        (("--form", "sci", "--carbon", "us", "--embodied", "150"), "150kg"),
        (("--form", "sci", "--carbon", "us", "--lifetime", "5"), "5y"),
        (("--form", "sci", "--carbon", "us", "--pue", "0.5"), "pue"),
    ],
)
def test_wrong_inputs_of_a_form(call, tmp_path: Path, more: tuple[str, ...], says: str) -> None:
    out = tmp_path / "form.json"
    done = call("report", "gpt2", "--gpu", "h200", "--seq", "64", *more, "--out", str(out))
    assert done.code == 2
    assert says in done.err
    assert not list(tmp_path.iterdir())
