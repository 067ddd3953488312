"""Traces: drawn with the moments asked for, read from every known form, refused with a sentence
when damaged.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput, WattcastError
from wattcast.serving.arrivals import draw_trace, make_trace
from wattcast.serving.trace_files import parse_trace, read_trace


@pytest.mark.parametrize(
    ("process", "variation"), [("poisson", 1.0), ("gamma:cv=3", 3.0), ("fixed", 0.0)]
)
def test_gaps_have_the_mean_and_variation_asked_for(process: str, variation: float) -> None:
    gaps = np.diff(draw_trace(20.0, arrivals=process, requests=100_000).arrival_s)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_diurnal_arrivals_peak_half_a_period_after_the_start() -> None:
    trace = draw_trace(10.0, arrivals="diurnal:peak=1.8,period=1000s", seconds=10_000, seed=5)
    phase = trace.arrival_s % 1000.0
    counts = np.histogram(phase, bins=10, range=(0, 1000))[0] / len(trace)
    assert counts[4:6].mean() / counts[[0, 9]].mean() > 3.0
    assert len(trace) == pytest.approx(100_000, rel=0.02)


def test_the_same_seed_gives_the_same_trace() -> None:
    spec = {"prompt": "lognormal:median=100,sigma=0.5,least=20,most=300", "seconds": 50}
    one, two, other = (draw_trace(5.0, **spec, seed=seed) for seed in (1, 1, 2))
    assert one.arrival_s.tolist() == two.arrival_s.tolist()
    assert one.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert one.prompt_tokens.min() >= 20
    assert one.prompt_tokens.max() <= 300
    assert one.arrival_s.max() < 50


def test_lengths_are_drawn_from_a_file(tmp_path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("7\n9\n11\n")
    assert set(draw_trace(5.0, str(path), 4, requests=200).prompt_tokens.tolist()) == {7, 9, 11}


FORMS = {
    "own.csv": "arrival_s,prompt_tokens,output_tokens,prefix_id\n1.5,20,4,b\n0.5,10,3,a\n2.5,30,5,\n",
    "own.jsonl": '{"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 3, "prefix_id": "a"}\n'
    '{"arrival_s": 1.5, "prompt_tokens": 20, "output_tokens": 4, "prefix_id": 7}\n\n'
    '{"arrival_s": 2.5, "prompt_tokens": 30, "output_tokens": 5}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,3\n"
    "2023-11-16 18:15:47.6805900,20,4\n2023-11-16 18:15:48.6805900,30,5\n",
    "azure2.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,10,3\n"
    "2024-05-10 00:00:01.009930+00:00,20,4\n2024-05-10 00:00:02.009930+00:00,30,5\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,10,3,13,API log\n"
    "6,ChatGPT,20,4,24,API log\n6.5,GPT-4,50,0,50,API log\n7,GPT-4,30,5,35,API log\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_requests(tmp_path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FORMS[name])
    trace = read_trace(path)
    np.testing.assert_allclose(np.diff(trace.arrival_s), [1.0, 1.0])
    assert trace.prompt_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [3, 4, 5]
    if name.startswith("own"):
        assert trace.prefix_id[0] != trace.prefix_id[1]
        assert trace.prefix_id[2] == -1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "when,what\n1,2\n", "a header of a known form"),
        ("a.csv", "", "a header of a known form"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n", "at least one request"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n", "line 3: prompt"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,0,3\n", "from 1 to"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n-1,4,3\n", "positive"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\nnan,4,3\n", "a finite number"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,4,3\n", "times such as"),
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", "\n", "at least one request"),
        ("a.jsonl", '{"arrival_s": 1, "prompt_tokens": 2', "line 1"),
    ],
)
def test_damaged_files_are_refused_with_the_place(
    tmp_path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(WattcastError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_per_s": 0.0},
        {"rate_per_s": 1.0, "arrivals": "weibull"},
        {"rate_per_s": 1.0, "arrivals": "gamma:cv=-1"},
        {"rate_per_s": 1.0, "arrivals": "gamma:shape=2"},
        {"rate_per_s": 1.0, "arrivals": "diurnal:peak=3"},
        {"rate_per_s": 1.0, "prompt": 0},
        {"rate_per_s": 1.0, "prompt": "lognormal:sigma=1"},
        {"rate_per_s": 1.0, "prompt": "no such file"},
        {"rate_per_s": 1.0, "requests": 0},
        {"rate_per_s": 1e-6, "seconds": 1.0},
    ],
)
def test_impossible_draws_are_refused(wrong) -> None:
    with pytest.raises(BadInput):
        draw_trace(**wrong)


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(BadInput, match="one length"):
        make_trace([0.0, 1.0], [1], [1, 1])


def test_contexts_of_like_requests_spread_by_their_output_alone() -> None:
    alike = make_trace([0.0, 1.0], [900, 900], [200, 200])
    assert alike.context_spread == pytest.approx(200 / 12**0.5 / 1000)
    unlike = make_trace([0.0, 1.0], [100, 1900], [1, 1])
    assert unlike.context_spread == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        ("arrival_time,input_tokens,output_tokens", "0.5", "2.0"),
        ("Request Time,Input Tokens,Output Tokens", "0.5", "2.0"),
        ("timestamp,prompt_len,output_len", "1700000000.25", "1700000001.75"),
        ("timestamp,num_input_tokens,num_output_tokens", "1700000000250", "1700000001750"),
        ("time,input_length,output_length", "2024-05-01T10:00:00.25", "2024-05-01T10:00:01.75"),
        ("Request Time (s),Input Tokens,Output Tokens", "0.5", "2.0"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", "0.5", "2.0"),
        ("arrival_ms,prompt_lens,output_lens", "500", "2000"),
        ("timestamp_ms,isl,osl", "1700000000250", "1700000001750"),
        ("start_time,input_lens,output_lens", "86400.5", "86402.0"),
    ],
)
def test_request_logs_of_others_are_read(header: str, first: str, second: str) -> None:
    """A log of arrivals, prompts and outputs is all that a replay needs, whoever wrote it."""
    text = f"id,{header}\nx,{second},20,5\ny,{first},10,3\nfailed,{second},30,0\n"
    trace = parse_trace(text.encode(), "log.csv")
    assert trace.prompt_tokens.tolist() == [10, 20]
    assert trace.output_tokens.tolist() == [3, 5]
    assert np.diff(trace.arrival_s) == pytest.approx([1.5])
    begins_at_once = first in ("0.5", "500")
    assert trace.arrival_s[0] == pytest.approx(0.5 if begins_at_once else 0.0)


COLUMNS = {
    "start_times": [7200.5, 7202.0, 7203.5],
    "input_lens": [10, 20, 30],
    "output_lens": [3, 5, 0],
}


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_logs_may_part_fields_by_semicolons_and_tabs(delimiter: str) -> None:
    """A spreadsheet of many countries writes semicolons; such a log was refused."""
    lines = ["arrival_time,input_tokens,output_tokens", "0.5,10,3", "2.0,20,5"]
    trace = parse_trace("\n".join(lines).replace(",", delimiter).encode(), "log.tsv")
    assert trace.arrival_s.tolist() == [0.5, 2.0]
    assert trace.output_tokens.tolist() == [3, 5]


@pytest.mark.parametrize("form", ["columns", "list", "lines"])
def test_logs_in_json_are_read(form: str) -> None:
    """vLLM's benchmark saves one object of columns, others a list, or a line for each request."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
    texts = {
        "columns": json.dumps({"backend": "vllm", "itls": [[0.1]], **COLUMNS}),
        "list": json.dumps(rows),
        "lines": "\n".join(map(json.dumps, rows)),
    }
    name = "log.jsonl" if form == "lines" else "log.json"
    trace = parse_trace(texts[form].encode(), name)
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.prompt_tokens.tolist() == [10, 20]
    assert trace.output_tokens.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("log.json", '{"input_lens": [1], "output_lens": [2]}', "column of arrival"),
        ("log.json", '{"start_times": [1, 2], "input_lens": [1], "output_lens": [2]}', "as many"),
        ("log.json", "[]", "at least one request"),
        ("log.json", "[1]", "request 1"),
        ("log.jsonl", '{"time": 1, "isl": 2}', "line 1: .*output tokens"),
        ("log.csv", "time,prompt,output_tokens", "column of prompt tokens"),
    ],
)
def test_a_log_without_a_column_is_told_which(name: str, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_trace(text.encode(), name)


MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 3, 4]}\n'
    '{"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'
)


def test_a_mooncake_trace_names_the_blocks_of_its_prompts() -> None:
    """Times are in milliseconds; blocks of 512 tokens stay with their request when sorted."""
    trace = parse_trace(MOONCAKE.encode(), "mooncake.jsonl")
    assert trace.arrival_s.tolist() == [1.0, 3.0]
    assert trace.prompt_tokens.tolist() == [600, 1100]
    assert trace.output_tokens.tolist() == [7, 5]
    assert trace.hash_ids == ((0, 1), (0, 3, 4))
    assert trace.hash_tokens == 512


def test_a_mooncake_line_without_a_length_is_named() -> None:
    text = MOONCAKE + '{"timestamp": 1, "input_length": 3}\n'
    with pytest.raises(WattcastError, match="line 3"):
        parse_trace(text.encode(), "mooncake.jsonl")


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_public_mooncake_traces_are_read(name: str, reference: Path) -> None:
    """Their first halves: every prompt has a name for each 512 tokens, the last one begun too."""
    path = reference / "traces" / f"mooncake_{name}_first_half.jsonl.gz"
    trace = parse_trace(gzip.decompress(path.read_bytes()), "mooncake.jsonl")
    assert len(trace) == {"conversation": 6015, "synthetic": 1996}[name]
    assert trace.hash_ids is not None
    named = np.array([len(ids) for ids in trace.hash_ids])
    assert (named == -(-trace.prompt_tokens // trace.hash_tokens)).mean() > 0.99
