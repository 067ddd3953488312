"""Serving as ratios: a simulated request against one prediction, and many requests against few.

Run with ``asv run --python=same``. Ratios travel between machines; seconds do not. By hand,
``python benchmarks/bench_serving.py`` serves a million requests (40 million tokens) on one replica.
"""

from __future__ import annotations

import time

import wattcast

LENGTHS = {
    "prompt": "lognormal:median=100,sigma=0.6,least=4,most=2000",
    "output": "lognormal:median=35,sigma=0.5,least=2,most=300",
}


def serve_s(requests: int) -> float:
    """Processor time to serve so many requests, tables included."""
    began_s = time.process_time()
    wattcast.simulate("llama3-8b", "h200", rate=60.0, requests=requests, **LENGTHS)
    return time.process_time() - began_s


class Serving:
    """Ratios of processor time."""

    def setup(self) -> None:
        serve_s(1)

    def track_thousand_requests_over_one_prediction(self) -> float:
        """A thousand requests beside one prediction of new sizes."""
        began_s = time.process_time()
        wattcast.predict("llama3-8b", "h200", phase="decode", batch=17, seq=1234, stack="engine")
        predict_s = time.process_time() - began_s
        return (serve_s(11_000) - serve_s(1_000)) / 10 / predict_s

    def track_eight_times_the_requests(self) -> float:
        """Eight times as many requests take eight times as long."""
        base_s = serve_s(1)
        return (serve_s(32_000) - base_s) / (serve_s(4_000) - base_s)


if __name__ == "__main__":
    print(f"a million requests: {serve_s(1_000_000):.1f} s of processor time")
