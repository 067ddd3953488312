"""A predicted picture beside the predictions of its parts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast

CLOCK = "1.2GHz"  # no power limit binds, so that parts and the whole have one clock


@pytest.fixture(scope="module")
def picture():
    return wattcast.predict("flux.1-dev", "h200", steps=4, clock=CLOCK)


def test_parts_add_up_to_the_picture(picture) -> None:
    assert_allclose(sum(part.latency_s for part in picture.parts), picture.latency_s, rtol=1e-12)
    assert_allclose(sum(part.energy_j for part in picture.parts), picture.energy_j, rtol=1e-12)
    names = [(part.name, part.runs) for part in picture.parts]
    assert names == [
        ("clip-l-text", 1),
        ("t5-xxl-encoder", 1),
        ("denoiser", 4),
        ("flux-vae-decoder", 1),
    ]


def test_a_part_takes_what_it_is_predicted_to_take_alone(picture) -> None:
    """A step that follows another finds the host ahead, which saves it the first launches."""
    step = wattcast.predict("flux.1-dev", "h200", phase="forward", clock=CLOCK)
    text = wattcast.predict("t5-xxl-encoder", "h200", seq=512, clock=CLOCK)
    decoder = wattcast.predict("flux-vae-decoder", "h200", image=1024, clock=CLOCK)
    parts = {part.name: part for part in picture.parts}
    for name, alone, runs, tolerance in (
        ("denoiser", step, 4, 0.005),
        ("t5-xxl-encoder", text, 1, 0.05),
        ("flux-vae-decoder", decoder, 1, 0.01),
    ):
        assert_allclose(parts[name].latency_s, runs * alone.latency_s, rtol=tolerance)
        assert_allclose(parts[name].energy_j, runs * alone.energy_j, rtol=tolerance)


def test_a_further_step_takes_as_much_as_the_one_before(picture) -> None:
    """Within what the host's lead over the first steps is worth."""
    more = wattcast.predict("flux.1-dev", "h200", steps=8, clock=CLOCK)
    most = wattcast.predict("flux.1-dev", "h200", steps=12, clock=CLOCK)
    assert_allclose(most.latency_s - more.latency_s, more.latency_s - picture.latency_s, rtol=2e-3)
    assert_allclose(most.energy_j - more.energy_j, more.energy_j - picture.energy_j, rtol=2e-3)


def test_parts_add_up_where_the_power_limit_binds() -> None:
    """Stretches of a long run have clocks of their own."""
    held = wattcast.predict("flux.1-dev", "h200")
    assert held.capped
    assert_allclose(sum(part.latency_s for part in held.parts), held.latency_s, rtol=1e-9)
    assert_allclose(sum(part.energy_j for part in held.parts), held.energy_j, rtol=1e-9)
    assert "prefill" not in " ".join(phase.name for phase in held.phases)


def test_parts_of_a_sweep_have_its_shape() -> None:
    swept = wattcast.predict("sd1.5-unet", "h200", steps=2, clock=np.array([1.2e9, 1.8e9]))
    assert swept.parts[0].latency_s.shape == (2,)
    total_s = np.sum([part.latency_s for part in swept.parts], axis=0)
    assert_allclose(total_s, swept.latency_s, rtol=1e-9)


def test_support_says_that_no_picture_was_measured(picture) -> None:
    said = {distance.dimension: distance for distance in picture.support.distances}
    assert said["parts"].word == "near"
    assert "a whole picture was never measured" in said["parts"].reason
    step = wattcast.predict("flux.1-dev", "h200", phase="forward", clock=CLOCK)
    assert "parts" not in {distance.dimension for distance in step.support.distances}
    assert step.parts == ()


def test_the_answer_is_for_a_picture(picture) -> None:
    from wattcast.predictor.answer_lines import list_answers

    lines = {line.label: line.value for line in list_answers(picture)}
    assert lines["energy"].endswith("J/picture")
    assert lines["latency"].endswith(" a picture")
    four = wattcast.predict("sd1.5-unet", "h200", steps=2, batch=4)
    lines = {line.label: line.value for line in list_answers(four)}
    assert lines["latency"].endswith(" for 4 pictures")
    assert four.energy_j_per_item == pytest.approx(four.energy_j / 4)
    plain = four.to_dict()
    assert [part["name"] for part in plain["parts"]] == [part.name for part in four.parts]
