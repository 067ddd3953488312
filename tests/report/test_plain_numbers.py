"""No headline is written with an exponent: 25,000 tokens/s was 2.5e+04."""

from __future__ import annotations

import re

import pytest

COMMANDS = {
    "predict gpt2 --gpu h200 --batch 64 --seq 512",
    "explore sweep gpt2 --gpu h200 --seq 512 --vary batch=64,128",
    "simulate gpt2 --gpu h200 --rate 200/s --requests 300 --prompt 64 --output 64",
    "plan gpt2 --gpu h200 --rate 400/s --prompt 64 --output 64 --tp 1 --requests 100",
    "train gpt2 --gpu h200 --gpus 8 --tokens 300B --seq 512 --price 2/h",
    "compare gpt2@h200,batch=64 ,batch=128 --seq 512",
}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_answers_have_no_exponent(call, line: str) -> None:
    done = call(*line.split())
    assert done.code == 0, done.err
    assert re.findall(r"\S*\d[eE]\+\d+\S*", done.out) == []
    assert re.search(r"\d{2},\d{3}|\d\.\d|\d k", done.out)
