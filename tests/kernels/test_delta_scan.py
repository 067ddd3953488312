"""The gated delta rule in an engine: chunks of a sequence follow one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wattcast import predict


def predict_scan_s(folder: Path, batch: int, length: int) -> float:
    """Predict one scan of Qwen3-Next's linear attention, in seconds."""
    scan = {
        "op": "state_scan",
        "batch": batch,
        "length": length,
        "heads": 32,
        "key_heads": 16,
        "key_dim": 128,
        "value_dim": 128,
        "chunk": 64,
        "rule": "delta",
        "dtype": "bf16",
        "count": 10,
    }
    path = folder / "scan.json"
    path.write_text(json.dumps({"name": "scan", "ops": [scan]}))
    return predict(path, "h200", host_launch="0us").latency_s / 10


def test_a_prompt_takes_as_long_as_its_chunks_one_by_one(tmp_path: Path) -> None:
    """The kernels of a layer took 484 us for 2,048 tokens, and 72 us were predicted from bytes and
    FLOPs: a prompt of 8,192 tokens came out a fifth too fast."""
    assert predict_scan_s(tmp_path, 1, 2048) == pytest.approx(484e-6, rel=0.1)


def test_sequences_share_the_wait(tmp_path: Path) -> None:
    """Heads of several sequences fill slots that one sequence leaves empty."""
    together_s = predict_scan_s(tmp_path, 4, 512)
    alone_s = predict_scan_s(tmp_path, 1, 2048)
    assert together_s < 0.5 * alone_s
