"""Options: defaults are stated, nonsense is refused with a word on what to do."""

from __future__ import annotations

import pytest

import wattcast
from wattcast.core.errors import BadInput, UnknownName, WattcastError
from wattcast.core.units import Dtype
from wattcast.options.keywords import ModelKeywords
from wattcast.workload import ModelOptions, OutputHead, SoftwareStack, WorkloadPhase, build_graph
from wattcast.workload.model_options import OPTION_NAMES


@pytest.mark.parametrize("name", ["batch", "seq", "tokens", "tp", "pp", "dp", "image"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "8", 1 << 31])
def test_sizes_are_positive_whole_numbers(name: str, value: object) -> None:
    phase = "generate" if name == "tokens" else None
    with pytest.raises(BadInput, match=f"{name}: expected a whole number"):
        ModelOptions(**{name: value}, phase=phase)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"phase": "dream"}, "prefill, decode, generate, train, forward"),
        ({"dtype": "fp61"}, "unknown dtype"),
        ({"dtype": "int64"}, "dtype"),
        ({"attention": "lazy"}, "eager, flash"),
        ({"head": "tail"}, "none, last, all"),
        ({"stack": "jax"}, "eager, compiled, engine"),
        ({"tokens": 5}, "phase generate"),
        ({"recompute": True}, "phase train"),
        ({"phase": "train", "dtype": "fp8"}, "in training"),
        ({"phase": "train", "stack": "engine"}, "only serves"),
        ({"skew": 1.5}, "skew"),
        ({"skew": float("nan")}, "skew"),
    ],
)
def test_nonsense_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(WattcastError) as error:
        ModelOptions(**given)
    assert says in str(error.value)


def test_an_option_nobody_knows_is_named_with_the_nearest() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown option 'sequ'\. Closest: seq\. Options of a model: batch, seq,"
    ):
        ModelOptions.from_names(sequ=5)


def test_a_setting_misspelt_as_an_option_is_found_among_the_settings() -> None:
    """``power_limit_w=450`` used to end in a bare TypeError of ``Options.__init__``."""
    with pytest.raises(UnknownName) as error:
        wattcast.predict("bert-base", "h200", power_limit_w=450)
    assert "unknown option 'power_limit_w'. Closest: power_limit." in str(error.value)
    with pytest.raises(UnknownName, match="Closest: batch"):
        wattcast.predict_many([("bert-base", {"bacth": 3})], "h200")


def test_words_become_enums_and_pytorch_names_are_known() -> None:
    options = ModelOptions(phase="decode", dtype="float16", head="all", stack="engine")
    assert (options.phase, options.dtype, options.head, options.stack) == (
        WorkloadPhase.DECODE,
        Dtype.FP16,
        OutputHead.ALL,
        SoftwareStack.ENGINE,
    )
    assert hash(options) == hash(
        ModelOptions(
            phase=WorkloadPhase.DECODE,
            dtype=Dtype.FP16,
            head=OutputHead.ALL,
            stack=SoftwareStack.ENGINE,
        )
    )


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("bert-large", {"phase": "decode"}, "prefill, forward, train"),
        ("resnet50", {"phase": "prefill"}, "forward, train"),
        ("resnet50", {"seq": 128}, "no sequence length"),
        ("resnet50", {"image": 100}, "a multiple of 32"),
        ("resnet50", {"tp": 2}, "1 for a vision model"),
        ("swin-base", {"tp": 2}, "1 for a vision model"),
        ("gpt2", {"image": 224}, "no picture"),
        ("llama3-8b", {"tp": 3}, "a divisor of heads=32"),
        ("qwen2-1.5b", {"tp": 3}, "divisor"),
        ("llama3-8b", {"pp": 33}, "at most as many stages as layers (32)"),
    ],
)
def test_what_a_model_cannot_do_is_said(name: str, given: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput) as error:
        build_graph(name, ModelOptions(**given))
    assert says in str(error.value)
    assert name in str(error.value)


def test_every_default_taken_is_stated() -> None:
    bare = " | ".join(build_graph("llama3-8b").assumptions)
    for word in ("phase prefill", "seq 1024", "head last", "no padding"):
        assert word in bare
    told = build_graph(
        "llama3-8b", ModelOptions(phase="prefill", seq=1024, head="last", stack="eager")
    ).assumptions
    assert not any("default" in line for line in told)
    assert any("224 by 224" in line for line in build_graph("resnet50").assumptions)
    assert any(
        "1024 this model was made for" in line
        for line in build_graph("gpt2", ModelOptions(seq=4096)).assumptions
    )


def test_names_say_what_is_run() -> None:
    eager = ModelOptions(batch=8, seq=1024, stack="eager")
    assert build_graph("llama3-8b", eager).name == "llama3-8b prefill b8 s1024 bf16 eager"
    options = ModelOptions(phase="generate", seq=64, tokens=9, dtype="fp8", stack="engine", tp=2)
    assert build_graph("llama3-8b", options).name == "llama3-8b generate b1 s64 t9 fp8 engine tp2"
    assert (
        build_graph("resnet50", ModelOptions(batch=2)).name == "resnet50 forward b2 i224 bf16 eager"
    )


def test_keywords_are_the_fields_of_the_options() -> None:
    assert tuple(ModelKeywords.__annotations__) == OPTION_NAMES
