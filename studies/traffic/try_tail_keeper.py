"""Serve the parts of traces that constants may be chosen on with ``TailKeeper``.

    python studies/traffic/try_tail_keeper.py TRACES [--cards h200] [--names burst] [--loads 0.2,0.6]

One line for each cell: minutes kept, of those of the top clock, and what was saved. No oracle: the
figures of ``judged_rows.jsonl`` are of the same cells with --middle, which serves the parts from 40 %
of a trace on with the plants of ``judge_traffic.py``. Those were looked at since.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import judge_traffic
import numpy as np
from tail_keeper import CountedReading, TailKeeper, forecast_work

from wattcast.control.serving_control import ServingLimits
from wattcast.control.serving_rehearsal import ServingPlant
from wattcast.control.traffic_rehearsal import count_kept_of_top, perturb_levels, serve_traffic
from wattcast.predictor.api import find_gpu

TRIED_SEEDS = {"a100-sxm": 1, "h100-sxm": 2, "h200": 3}


def follow_tails(keeper: TailKeeper) -> object:
    """Return the decisions of the policy."""

    def decide(now_s: float, plant: ServingPlant) -> int:
        reading = plant.read()
        ended = float(np.count_nonzero(np.array(plant.engine.last_token_s) <= now_s))
        return keeper.decide(now_s, CountedReading(**vars(reading), ended=ended), 0.0)

    return decide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--cards", default=",".join(TRIED_SEEDS))
    parser.add_argument("--names", default="azure-conv,burst")
    parser.add_argument("--loads", default="0.2,0.6")
    parser.add_argument("--middle", action="store_true")
    options = parser.parse_args()
    setup = json.loads(Path(__file__).with_name("setup.json").read_text())
    for card in options.cards.split(","):
        by_level = judge_traffic.build_levels(card)
        seeds = judge_traffic.SEEDS if options.middle else TRIED_SEEDS
        plant = perturb_levels(by_level, find_gpu(card), seeds[card])
        for name in options.names.split(","):
            place = setup[f"{card} {name}"]
            limits = ServingLimits(*place["limits"])
            whole = judge_traffic.read_part(options.traces, name, not options.middle)
            for load in map(float, options.loads.split(",")):
                trace = judge_traffic.speed_up(
                    whole,
                    load * place["judge"],
                    judge_traffic.SECONDS,
                    judge_traffic.MOST_REQUESTS,
                )
                begin_s = min(judge_traffic.WARM_UP_S, 0.3 * float(trace.arrival_s[-1]))
                top = serve_traffic(plant, trace, limits, len(plant) - 1, begin_s=begin_s)
                keeper = TailKeeper(
                    [float(costs.clock_hz[0]) for costs in by_level],
                    limits,
                    partial(forecast_work, by_level),
                )
                ours = serve_traffic(
                    plant,
                    trace,
                    limits,
                    follow_tails(keeper),
                    begin_s=begin_s,
                    interval_s=keeper.interval_s,
                )
                saving = 1.0 - ours.energy_j / top.energy_j
                kept = count_kept_of_top(ours, top)
                print(f"{card} {name} {load}: {kept:.0%} of {top.kept.sum()}, {saving:.1%}")


if __name__ == "__main__":
    main()
