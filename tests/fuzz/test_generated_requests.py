"""HTTP requests drawn from the request schema: answered soundly, or refused in one sentence.

Strategies are made from the structs that requests are read into: numbers inside their bounds, at
their ends and beyond, words of the schema and others, files of every kind. The oracle is that of
the files: no answer of 500, none that takes over 10 s of a processor, no process over 1 GB, nothing
absurd.

A normal run tries a few dozen. ``python -m tests.fuzz.test_generated_requests 20000 2`` tries so
many."""

from __future__ import annotations

import collections
import json
import math
import os
import resource
import sys
import time
import traceback
import warnings
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec import inspect
from tests.fuzz.structured_mutations import (
    WORDS,
    begin_peak,
    edit_lists,
    grown_byte,
    mutate,
)
from tests.fuzz.test_structured_files import MOST_BYTE, list_documents, within

from wattcast.hardware import load_gpu
from wattcast.web.answers import REQUEST_KINDS, answer_request

REQUESTS = int(os.environ.get("WATTCAST_REQUESTS", "24"))
SEED = int(os.environ.get("WATTCAST_SEED", "29"))
QUICK_KINDS = ("view", "room", "power", "kernel", "predict", "csv", "compare")
SLOW_KINDS = ("simulate", "train", "plan", "hall", "figure", "report")  # up to seconds each
FIRST_CHOICE = {"gpu": "h200", "model": "gpt2"}  # so that most requests get past their names
# What one request may ask of one answer. A drawn number is often at its bound, and a plan or a
# simulation at all bounds takes as long as the server lets it.
SMALL = {"seconds": 2.0, "rate_per_s": 2.0, "prompt": 64, "output": 8, "replicas": 1, "gpus": 8}
SMALL |= {"serving_racks": 1, "training_racks": 1, "idle_racks": 1}


def strategy_of(kind: inspect.Type, name: str = "", wild: bool = True) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a type describes; where ``wild``, for others as well."""
    if isinstance(kind, inspect.UnionType):
        return st.one_of([strategy_of(one, name, wild) for one in kind.types])
    if isinstance(kind, inspect.Metadata):
        words = (kind.extra_json_schema or {}).get("enum")
        if not words:
            return strategy_of(kind.type, name, wild)
        usual = st.one_of(st.just(FIRST_CHOICE.get(name, words[0])), st.sampled_from(words))
        return st.one_of(usual, st.sampled_from(WORDS)) if wild else usual
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return _numbers(kind, st.integers if isinstance(kind, inspect.IntType) else st.floats, wild)
    if isinstance(kind, inspect.ListType):
        item = strategy_of(kind.item_type, "gpu" if name == "gpus" else name, wild)
        most = (kind.max_length or 4) + 1 if wild else 2
        return st.lists(item, min_size=0 if wild else 1, max_size=most)
    if isinstance(kind, inspect.StructType):
        return _struct(kind, wild)
    simple: dict[type, st.SearchStrategy[Any]] = {
        inspect.NoneType: st.none(),
        inspect.BoolType: st.booleans(),
        inspect.StrType: st.one_of(st.sampled_from(WORDS), st.just(TRACE))
        if wild
        else st.just(TRACE),
        inspect.RawType: uploads,
    }
    return simple.get(type(kind), st.sampled_from([None, 1, "x", [], {}]))


TRACE = "arrival_s,prompt_tokens,output_tokens\n0.5,16,4\n1.5,32,8\n"


def _numbers(kind: Any, make: Any, wild: bool) -> st.SearchStrategy[Any]:
    ends = [end for end in (kind.ge, kind.gt, kind.le, kind.lt) if end is not None]
    low = min(ends, default=0)
    high = max(ends, default=100)
    few = make(min_value=low, max_value=min(low + 64, high))
    if not wild:
        return st.one_of(few, st.sampled_from([end for end in ends if end] or [1]))
    beyond = [low - 1, high * 2, -1, 0, 1e300, 2**63, 0.5, "1", None]
    return st.one_of(few, st.sampled_from(ends or [1]), st.sampled_from(beyond))


def _struct(kind: inspect.StructType, wild: bool) -> st.SearchStrategy[dict[str, Any]]:
    required = {}
    optional = {}
    for field in kind.fields:
        drawn = strategy_of(field.type, field.encode_name, wild)
        if field.required or field.encode_name in FIRST_CHOICE:
            required[field.encode_name] = drawn
        else:
            optional[field.encode_name] = drawn
    if wild:
        optional["unknown"] = st.just(1)
    return st.fixed_dictionaries(required, optional=optional)


def _list_uploads() -> list[Any]:
    found = [document.tree for document in list_documents("models").values()]
    found += [document.tree for document in list_documents("operators").values()]
    return [tree for tree in found if isinstance(tree, dict)]


uploads: st.SearchStrategy[Any] = st.deferred(
    lambda: st.builds(mutate, st.sampled_from(_list_uploads()), edit_lists)
)


def requests_of(kind: str) -> st.SearchStrategy[Any]:
    """Return a strategy for bodies of a kind of request, most of them with few fields, one in three
    wild.
    """
    info = inspect.type_info(REQUEST_KINDS[kind][0])
    keep = st.lists(st.integers(0, 99), max_size=4)
    tame = st.builds(_thin_out, strategy_of(info, "", False), keep, st.integers(1, 13))
    bold = st.builds(_thin_out, strategy_of(info, "", False), keep, st.integers(0, 15))
    wild = st.builds(_thin_out, strategy_of(info, "", True), keep, st.integers(0, 15))
    return st.one_of(tame, bold, wild)


def _thin_out(body: Any, keep: list[int], mode: int) -> Any:
    """Leave few of the optional fields, since the first wrong one decides; name a model or a file,
    not both.
    """
    if not isinstance(body, dict):
        return body
    if "configurations" in body:
        inner = body["configurations"]
        listed = [_thin_out(one, keep, mode) for one in inner] if isinstance(inner, list) else inner
        return body | {"configurations": listed}
    names = [name for name in body if name not in ("gpu", "gpus", "model", "file")]
    chosen = {names[place % len(names)] for place in keep} if names else set()
    kept = {name: value for name, value in body.items() if name not in names or name in chosen}
    if mode:
        kept.pop("unknown", None)
    file = kept.get("file")
    if isinstance(file, dict) and mode:
        file.pop("unknown", None)
    if mode < 15:
        has_file = file is not None and mode < 6
        kept.pop("model" if has_file else "file", None)
        if not has_file and kept.get("model") is None:
            kept["model"] = "gpt2"
    return {name: SMALL.get(name, value) if mode < 14 else value for name, value in kept.items()}


def check_answer(kind: str, body: bytes) -> int:
    """Answer a request, check the answer, and return its status."""
    with within(10):
        answer = answer_request(kind, body)
    assert answer.status in (200, 422), (kind, answer.status, body[:2000])
    if answer.status == 422:
        said = msgspec.json.decode(answer.body)["error"]
        assert 0 < len(said) <= 2000
    elif answer.type == "application/json":
        plain = json.loads(answer.body)
        assert_finite(plain, kind)
        for prediction in [
            *plain.get("predictions", []),
            *[plain[k] for k in ("prediction",) if k in plain],
        ]:
            check_figures(prediction, b"duration_s" in body)
    return answer.status


def assert_finite(plain: Any, path: str) -> None:
    """Assert that no number of an answer is NaN or infinite."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            assert_finite(value, f"{path}.{name}")
    elif isinstance(plain, list):
        for value in plain:
            assert_finite(value, path)
    elif isinstance(plain, float):
        assert math.isfinite(plain), path


def check_figures(p: dict[str, Any], is_brief: bool) -> None:
    """Assert what holds for every prediction in an answer.

    A brief run may end before the governor cuts its power, so that it exceeds the limit for a
    while: the H200 of the recording that ships reaches 734 W."""
    for name in ("latency_s", "power_w", "energy_j", "clock_hz", "effective_clock_hz"):
        assert 0.0 < p[name] < 1e13, (name, p[name])
    assert math.isclose(p["energy_j"], p["power_w"] * p["latency_s"], rel_tol=1e-6)
    assert all(module["power_w"] >= 0.0 for module in p["modules"])
    gpu = load_gpu(p["gpu"])
    most_w = max(float(gpu.power.limit_w), float(gpu.power.max_limit_w or 0.0)) * (
        1.5 if is_brief else 1.001
    )
    cannot = any("cannot be met" in text for text in p["assumptions"])
    assert cannot or p["power_w"] <= most_w, (p["power_w"], most_w)


def attack_kind(
    kind: str, examples: int, number: int, failures: dict[str, str] | None = None
) -> collections.Counter[int]:
    """Try requests of a kind; return how many were answered with each status.

    Failures are raised, shrunk to the simplest; or collected by place in ``failures`` while it goes
    on."""
    seen: collections.Counter[int] = collections.Counter()

    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None,
        phases=[Phase.generate, Phase.shrink] if failures is None else [Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(requests_of(kind))
    def attack(body: Any) -> None:
        data = json.dumps(body).encode("utf-8", "surrogatepass")
        try:
            seen[check_answer(kind, data)] += 1
        except Exception as error:
            if failures is None:
                raise
            seen[0] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{kind}: {error!r} {data[:1500]!r}"
            failures.setdefault(f"{type(error).__name__} at {last.filename}:{last.lineno}", text)

    start_byte = begin_peak()
    attack()
    assert grown_byte(start_byte) < MOST_BYTE
    return seen


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_generated_request_is_answered_or_refused(kind: str) -> None:
    """7 of 5,000 generated requests were answers of 500."""
    seen = attack_kind(kind, REQUESTS // len(QUICK_KINDS) + 1, SEED)
    assert seen.total() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_a_generated_question_that_takes_long_is_answered_or_refused(kind: str) -> None:
    seen = attack_kind(kind, max(REQUESTS // 50, 5), SEED)
    assert seen.total() > 0


def main(total: int, number: int) -> int:
    """Try ``total`` requests, a twentieth of them of the kinds that take long, and say what failed."""
    warnings.simplefilter("error")
    # a long name leaves a figure no room: it is drawn all the same
    warnings.filterwarnings("ignore", "constrained_layout not applied")
    warnings.filterwarnings("ignore", "Creating legend with loc=.best. can be slow")
    failures: dict[str, str] = {}
    whole: collections.Counter[int] = collections.Counter()
    quick = dict.fromkeys(QUICK_KINDS, 0.95 / len(QUICK_KINDS))
    for kind, share in {**quick, **dict.fromkeys(SLOW_KINDS, 0.05 / len(SLOW_KINDS))}.items():
        began = time.process_time()
        known = len(failures)
        seen = attack_kind(kind, math.ceil(total * share), number, failures)
        whole += seen
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        took = time.process_time() - began
        print(
            f"{kind}: {dict(seen)} in {took:.0f} s of a processor; {peak:.0f} MiB at most",
            flush=True,
        )
        for failure in list(failures.values())[known:]:
            print(f"FAILED {failure}", flush=True)
    print(f"{whole.total()} requests, {dict(whole)}, {len(failures)} kinds of failure")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
