"""Long lists of distinct operators, as a ratio; by hand, the command itself on up to a million of
them.

Run with ``asv run --python=same``. ``python benchmarks/bench_operators.py`` writes lists of
100,000, 300,000 and a million distinct operators, runs ``wattcast predict`` on each and prints
seconds, processor time and peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import wattcast

COMMAND = "import sys; from wattcast.cli.main import main; sys.exit(main(sys.argv[1:]))"


def list_operators(count: int) -> list[dict[str, object]]:
    """List operators of layers of whose sizes no two are equal."""
    ops: list[dict[str, object]] = []
    for i in range(count // 5):
        rows, wide = 1 + i % 8192, 128 * (1 + i // 8192)
        heads = {"batch": 1 + i % 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
        ops.append({"op": "linear", "m": rows, "n": wide, "k": 64 * (1 + i % 61)})
        ops.append({"op": "attention", "q_len": 1 + i, "kv_len": 1 + i, **heads})
        ops += [{"op": name, "rows": rows, "dim": wide} for name in ("rmsnorm", "softmax")]
        ops.append({"op": "silu", "n": 1024 + 8 * i})
    return ops


def track_four_times_the_operators() -> float:
    """Four times as many distinct operators take four times as long."""
    spent_s = []
    for count in (1_000, 20_000, 80_000):  # the first one loads what all need
        begin_s = time.process_time()
        wattcast.predict({"name": "long", "ops": list_operators(count)}, "h200")
        spent_s.append(time.process_time() - begin_s)
    return spent_s[2] / spent_s[1]


if __name__ == "__main__":
    for count in (100_000, 300_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "long.json"
            path.write_text(json.dumps({"name": "long", "ops": list_operators(count)}))
            begin_s = time.perf_counter()
            asked = [sys.executable, "-c", COMMAND, "predict", str(path), "--gpu", "h200"]
            started = subprocess.Popen(asked, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(started.pid, 0)
            assert status == 0, status
        spent_s = time.perf_counter() - begin_s
        processor_s, peak_gb = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9
        print(
            f"{count:9,} operators: {spent_s:5.1f} s, {processor_s:5.1f} s of processors, {peak_gb:.2f} GB at most"
        )
