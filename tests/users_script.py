"""A script as users write it, with every verb of the API: ``mypy --strict`` checks it, and nothing
runs it.

The last lines are wrong on purpose: an ignore that is not needed fails the check.
"""

from __future__ import annotations

import wattcast
from wattcast.explore import explore_designs


def use_every_verb(rows: str, module: object) -> float | None:
    """Call each verb once."""
    p: wattcast.Prediction = wattcast.predict("gpt2", gpu="h200", batch=8, seq=128, phase="decode")
    many: list[wattcast.Prediction] = wattcast.predict_many(
        ["gpt2", ("gpt2", {"batch": 4})], "h200", seq=128
    )
    print(p.latency_s, many, wattcast.compare(p, "gpt2,batch=2", gpu="h200", seq=64).b.latency_s)
    print(
        wattcast.explore("gpt2", "h200,l4", ["dtype=fp32,bf16", "clock=1GHz,1.5GHz"], seq=128).rows[
            0
        ]
    )
    print(explore_designs("gpt2", "h200", ["sm_count=64,128"]).points)
    print(
        wattcast.plan(
            "llama3-8b", "h200", rate="20/s", prompt=1000, output=300, tpot="p90:40ms", tp=(1,)
        ).best.make_row()
    )
    print(wattcast.simulate("gpt2", "h200", rate="2/s", seconds=5, prompt=64, output=8).summarise())
    print(wattcast.train("gpt2", "h200", gpus=1), wattcast.capture(module, (1, 2)))
    print(wattcast.gpus()[0].name, wattcast.models()[0].title, wattcast.load_gpu("h200").name)
    print(wattcast.calibrate(rows, "h200", out="mine").factors)
    with wattcast.measure("block") as run:
        pass
    return run.energy_j


def mistake_types() -> None:
    """Give each kind of signature a wrong type."""
    wattcast.predict("gpt2", "h200", batch="8")  # type: ignore[call-overload]
    wattcast.explore("gpt2", 3)  # type: ignore[arg-type]
    wattcast.measure(3)  # type: ignore[arg-type]
    wattcast.plan("gpt2", "h200", rate="20/s", prompt=1, output=1, colour=1)  # type: ignore[call-arg]
