"""A question that is refused leaves no old answer: its field says why, and what stands is dimmed."""

from __future__ import annotations

import json
import math
import time

import pytest
from test_web_page import AXE, answered, link, opened, pick, until

# tab, control, a value that its field refuses
WRONG = [
    ("predict", "config.batch", "0"),
    ("predict", "config.batch", "-4"),
    ("predict", "config.batch", "1.5"),
    ("predict", "config.batch", "99999999"),
    ("predict", "config.seq", "0"),
    ("predict", "config.seq", "10.5"),
    ("predict", "config.seq", "99999999"),
    ("predict", "config.tokens", "0"),
    ("predict", "config.tokens", "2000000"),
    ("predict", "config.tp", "0"),
    ("predict", "config.tp", "65"),
    ("predict", "config.temperature_c", "200"),
    ("predict", "config.host_launch_s", "-1"),
    ("predict", "money.price_per_h", "-1"),
    ("predict", "config.tp", "5"),  # gpt2 has 12 heads: refused by the server
    ("simulate", "sim.rate_per_s", "0"),
    ("simulate", "sim.seconds", "0"),
    ("simulate", "sim.seconds", "9000"),
    ("simulate", "sim.replicas", "17"),
    ("simulate", "sim.concurrency", "0"),
    ("simulate", "sim.prefix_hit_rate", "101"),
    ("simulate", "sim.speculative_tokens", "17"),
    ("simulate", "sim.draft", "gpt2"),  # refused by the server: no tokens to draft
    ("simulate", "sim.rate_per_s", "9999"),  # more requests than the server simulates
    ("plan", "plan.rate_per_s", "0"),
    ("plan", "plan.rate_per_s", "20000"),
    ("plan", "plan.ttft_s", "0"),
    ("plan", "plan.tpot_s", "0"),
    ("plan", "plan.percentile", "10"),
    ("plan", "plan.headroom", "300"),
    ("plan", "plan.site_power_w", "0"),
    ("plan", "plan.pools", "two"),
    ("train", "train.tokens", "0"),
    ("train", "train.lora", "5000"),
    ("train", "train.gpus", "0"),
    ("train", "train.seq", "0"),
]
OPACITY = """tab => {
  let opacity = 1;
  for (let at = document.querySelector(`#p-${tab} .answers`); at; at = at.parentElement)
    opacity *= Number(getComputedStyle(at).opacity);
  return opacity;
}"""
SHAPES = [(390, "light"), (1440, "dark")]
MORE = [(390, "dark"), (768, "light"), (768, "dark"), (1440, "light")]
BY_NIGHT = [pytest.param(*shape, marks=pytest.mark.slow) for shape in MORE]


@pytest.mark.parametrize(
    ("width", "scheme", "step"),
    [
        (390, "light", 2),
        *(
            pytest.param(*shape, 1, marks=pytest.mark.slow, id=f"{shape[0]}-{shape[1]}")
            for shape in [*SHAPES, *MORE]
        ),
    ],
)
def test_no_old_answer_stands_under_a_refused_question(
    open_page, width: int, scheme: str, step: int
) -> None:
    """A value that its field refused was not asked about, and the answer to the last one stayed."""
    assert len(WRONG) >= 30
    assert {tab for tab, *_ in WRONG[::step]} == {"predict", "simulate", "plan", "train"}
    page = None
    now = ""
    for tab, bound, value in WRONG[::step]:
        if tab != now:
            page = opened(open_page, tab, width=width, scheme=scheme)
            for details in page.locator("#ask fieldset > details:not([hidden]) > summary").all():
                details.click()
            now = tab
        assert page is not None
        control = page.locator(f"[data-bind='{bound}']")
        before = control.input_value()
        control.fill(value)
        dimmed = f"({OPACITY})(arguments_tab) < 0.9".replace("arguments_tab", json.dumps(tab))
        until(page, f"() => {dimmed}", limit_s=60)
        until(
            page,
            "() => document.querySelector('.problem, #errors p')?.textContent.length > 10",
            limit_s=60,
        )
        assert control.get_attribute("aria-invalid") == "true" or page.inner_text("#errors")
        control.fill(before)
        fresh = f"({OPACITY})({json.dumps(tab)}) === 1"
        until(page, f"() => {fresh}", limit_s=60)
        assert page.locator(".problem").count() == 0, (tab, bound, value)


def test_the_refusal_stands_at_its_field(open_page) -> None:
    page = opened(open_page, "predict")
    page.fill("#batch", "0")
    until(page, "document.querySelector('.problem') !== null")
    field = page.locator("#batch")
    note = field.get_attribute("aria-describedby")
    assert "from 1 to 1,000,000" in page.inner_text(f"[id='{note}']")
    page.fill("#batch", "2")
    until(page, "document.querySelector('.problem') === null")


@pytest.mark.parametrize(("width", "scheme"), [*SHAPES, *BY_NIGHT])
def test_a_refused_page_passes_axe(open_page, width: int, scheme: str) -> None:
    page = opened(open_page, "predict", width=width, scheme=scheme)
    page.fill("#batch", "0")
    until(page, "document.querySelector('.problem') !== null")
    page.evaluate(AXE.read_text())
    # what is dimmed is no answer any more, so its contrast is not judged
    found = page.evaluate(
        "async () => (await axe.run({exclude: ['#results']})).violations.map(v => `${v.id}: ${v.nodes[0].html}`)"
    )
    assert found == []


def test_links_can_be_read_and_opened_directly(open_page) -> None:
    page = open_page("/simulate?model=gpt2&gpu=l4&rate=5&seconds=10&prompt=64&output=16")
    answered(page, "simulate")
    assert page.input_value("#gpu") == "l4"
    assert page.input_value("#sim-rate") == "5"
    assert page.input_value("#seq") == "64"
    page.fill("#sim-rate", "4")
    until(page, "location.search.includes('rate=4')")
    address = page.evaluate("location.pathname + location.search")
    assert address.startswith("/simulate?model=gpt2&gpu=l4&")
    again = open_page(address)
    assert again.input_value("#sim-rate") == "4"
    assert again.input_value("#model") == "gpt2"


def test_a_unit_in_a_link_is_read(open_page) -> None:
    page = open_page("/plan?model=gpt2&gpu=h200,b200&rate=2/s&ttft=250ms&prompt=64&output=16")
    answered(page, "plan")
    assert page.input_value("#plan-ttft") == "250"
    assert page.locator("#plan-gpus button").count() == 2


def test_a_hugging_face_id_is_taken(open_page) -> None:
    page = opened(open_page, "predict")
    pick(page, "model", "Qwen/Qwen3-0.6B")
    until(
        page,
        "!document.querySelector('.stale') && document.querySelector('#model').value === 'Qwen/Qwen3-0.6B'",
    )
    assert page.locator("#errors p").count() == 0
    pick(page, "model", "nobody/nothing")
    until(page, "document.querySelector('#errors').textContent.includes('unknown model')")
    until(page, f"() => ({OPACITY})('predict') < 0.9")


def test_five_kinds_stream_and_can_be_stopped(open_page) -> None:
    kinds = ["h200", "b200", "h100-sxm", "l40s", "a100-sxm-80gb"]
    words = f"/plan?model=llama3-8b&gpu={','.join(kinds)}&rate=20&prompt=500&output=100"
    page = open_page(words)
    began_s = time.monotonic()
    until(page, "document.querySelector('#plan-chart .pick') !== null")
    first_s = time.monotonic() - began_s
    assert page.locator("#plan-go").is_disabled(), "the other kinds are still searched"
    page.locator("#stop").click()
    until(page, "document.querySelector('#working').hidden")
    until(page, "!document.querySelector('#plan-go').disabled")
    assert page.locator("#plan-chart .pick").count() >= 1
    assert first_s < 60.0  # test_the_first_kind_comes_in_seven_seconds times it alone


@pytest.mark.realtime
@pytest.mark.alone
def test_the_first_kind_comes_in_seven_seconds(open_page) -> None:
    kinds = "h200,b200,h100-sxm,l40s,a100-sxm-80gb"
    times_s = [math.inf]
    for rate in (21, 22, 23):  # again only where something else held the machine up
        if min(times_s) < 7.0:
            break
        page = open_page(
            f"/plan?model=llama3-8b&gpu={kinds}&rate={rate}&prompt=500&output=100", fresh=True
        )
        began_s = time.monotonic()
        until(page, "document.querySelector('#plan-chart .pick') !== null")
        times_s.append(time.monotonic() - began_s)
        page.locator("#stop").click()
    print(f"first of five kinds: {min(times_s):.1f} s")
    assert min(times_s) < 7.0, times_s


def test_old_links_still_open(open_page) -> None:
    page = open_page(
        link("compare", {"model": "gpt2", "gpu": "h200"}, {"model": "gpt2", "gpu": "l4"})
    )
    answered(page, "compare")
    assert page.locator("#compare-cards article").count() == 2
