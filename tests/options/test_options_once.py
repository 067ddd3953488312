"""An option is declared once and reaches Python, the command line, the help and HTTP from there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import typer.rich_utils

import wattcast
from wattcast.cli.main import walk_commands
from wattcast.core.errors import UnknownName
from wattcast.core.option_declaration import DeclaredOption, parse_option_value
from wattcast.explore.explorations import explore, explore_designs
from wattcast.options.exploring_options import EXPLORE, EXPLORE_DESIGNS
from wattcast.options.keyword_source import TARGET, write_keywords
from wattcast.options.serving_options import PLAN, SIMULATE, LatencyTargets
from wattcast.options.setting_options import COMPARE, PREDICT, PriceOptions, SettingOptions
from wattcast.options.training_options import TRAIN
from wattcast.options.verb_options import VerbOptions
from wattcast.web import request_schema

VERBS: dict[str, tuple[VerbOptions, Callable[..., Any]]] = {
    "predict": (PREDICT, wattcast.predict),
    "compare": (COMPARE, wattcast.compare),
    "simulate": (SIMULATE, wattcast.simulate),
    "plan": (PLAN, wattcast.plan),
    "train": (TRAIN, wattcast.train),
    "explore sweep": (EXPLORE, explore),
    "explore designs": (EXPLORE_DESIGNS, explore_designs),
}
OPTIONS = [(words, name) for words, (verb, _) in VERBS.items() for name in verb.declared]
COMMANDS = dict(walk_commands())


def test_the_keywords_of_type_checkers_are_those_declared() -> None:
    says = "run `python -m wattcast.options.keyword_source`"
    assert TARGET.read_text(encoding="utf-8") == write_keywords(), says


@pytest.mark.parametrize(("words", "name"), OPTIONS)
def test_an_option_reaches_python_and_the_command_line(words: str, name: str) -> None:
    verb, function = VERBS[words]
    declared = verb.declared[name]
    assert inspect.signature(function).parameters[name].default == declared.default
    (parameter,) = (p for p in COMMANDS[words].params if p.name == name)
    assert declared.flag.split("/")[0] in parameter.opts
    assert parameter.help == declared.option.help


@pytest.mark.parametrize("words", VERBS)
def test_full_help_tells_every_option(call, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", 200)  # read from the environment once
    shown = re.sub(r"[\s│]+", "", call(*words.split(), "--help-all").out)
    for declared in VERBS[words][0].declared.values():
        text = re.sub(r"\s+", "", declared.option.help)
        assert declared.flag.split("/")[0] in shown
        assert text in shown, declared.keyword


@pytest.mark.parametrize("words", VERBS)
def test_a_mistyped_keyword_names_the_nearest(words: str) -> None:
    verb, function = VERBS[words]
    name = "power_limit" if "power_limit" in verb.declared else "power_limits"
    given: dict[str, Any] = {"rate": "1/s"} if words == "plan" else {}
    given[name.replace("limit", "limt")] = "300W"
    subjects = ["gpt2", "h200", ["batch=1,2"]] if "explore" in words else ["gpt2", "h200"]
    if words == "compare":
        subjects = ["gpt2@h200", ",batch=2"]
    with pytest.raises(UnknownName, match=name):
        function(*subjects, **given)


@pytest.mark.parametrize("words", VERBS)
def test_no_verb_has_many_parameters_of_its_own(words: str) -> None:
    code = VERBS[words][1].__code__
    assert code.co_argcount + code.co_kwonlyargcount <= 8


def test_words_and_units_become_what_fields_hold() -> None:
    chosen = SIMULATE.parse({"clock": "1.5GHz", "power_limit": "0.5kW", "transfer": "1GB/s"})
    assert chosen[SettingOptions].clock_hz == 1.5e9
    assert chosen[SettingOptions].power_limit_w == 500.0
    assert chosen.select_keywords(PriceOptions) == {}
    assert chosen[LatencyTargets] == LatencyTargets()
    with pytest.raises(UnknownName, match="replicas"):
        SIMULATE.parse({"replica": 2})


REQUESTS: dict[type[msgspec.Struct], VerbOptions] = {
    request_schema.Configuration: PREDICT,
    request_schema.SimulationRequest: SIMULATE,
    request_schema.PlanRequest: PLAN,
    request_schema.TrainingRequest: TRAIN,
}
# of a request, and not of a verb: what it is about, prices in US dollars, names of what is sent
ABOUT = {
    *("model", "file", "gpu", "gpus", "trace_name", "percentile"),
    *("price_per_h", "electricity_per_kwh"),
}
# the server's own defaults: a simulation over HTTP is shorter
OTHER_DEFAULTS = {("SimulationRequest", "seconds"), ("PlanRequest", "pools")}  # null: none


def fields_of_requests() -> Iterator[tuple[type[msgspec.Struct], str]]:
    for request in REQUESTS:
        for name in request.__struct_fields__:
            if name not in ABOUT or (request is request_schema.TrainingRequest and name == "gpus"):
                yield request, name


def find_declared(verb: VerbOptions, field: str) -> DeclaredOption:
    """Return the option whose field, or whose keyword with its unit, is that of a request."""
    for declared in verb.declared.values():
        if field in (
            declared.field,
            declared.keyword,
            f"{declared.keyword}_{declared.option.unit}",
        ):
            return declared
    raise AssertionError(f"{field} is no option of {verb.verb}")


@pytest.mark.parametrize(("request_type", "field"), list(fields_of_requests()))
def test_a_field_of_a_request_is_a_declared_option(
    request_type: type[msgspec.Struct], field: str
) -> None:
    declared = find_declared(REQUESTS[request_type], field)
    info = msgspec.json.schema(request_type)["$defs"][request_type.__name__]
    shown = info["properties"][field]
    kinds = shown.get("anyOf", [shown])
    bounds: dict[str, Any] = {}
    for kind in kinds:
        bounds |= kind
    if declared.words:
        assert set(bounds["enum"]) <= set(declared.words)
    for end, limit in (("minimum", declared.option.least), ("maximum", declared.option.most)):
        if limit is not None and end in bounds:
            assert bounds[end] >= limit if end == "minimum" else bounds[end] <= limit
    if (
        field not in info.get("required", [])
        and (request_type.__name__, field) not in OTHER_DEFAULTS
    ):
        default = shown["default"]
        value = None if default is None else parse_option_value(declared, default)
        assert value == declared.default


def test_what_is_not_served_was_decided() -> None:
    """A new option is served over HTTP, or stands here."""
    left_out = {}
    for request, verb in REQUESTS.items():
        served = {
            find_declared(verb, field).keyword
            for kind, field in fields_of_requests()
            if kind is request
        }
        left_out[verb.verb] = set(verb.declared) - served - {"price", "electricity"}
    files = {"bundle", "node", "force", "carbon", "pue"}  # files of the server, and what it decides
    own = {"operands", "factors", "card", "engine", "scheduling"}
    machine = {"host_factor", "power_factor"}  # the page takes what the server's machine remembers
    assert left_out["predict"] == files | own | machine
    assert left_out["simulate"] >= {"seed", "seeds", "router", "node", "force"}
    assert "rate" not in left_out["plan"]
    assert "minimise" not in left_out["train"]
