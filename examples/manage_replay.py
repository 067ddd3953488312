"""Replay a table of measurements: what would a controller have saved, had it been there?"""

import math
import tempfile
from pathlib import Path

from wattcast.control import policy_comparison
from wattcast.control.policies import PolicyName, PolicySetup
from wattcast.control.policy_comparison import compare_policies

# Two made-up programs on a made-up card: one waits for memory, one computes. Rows are memory MHz,
# core MHz, time ms, power W, energy mJ, as the tables of Guerreiro et al. have them.
lines = []
for name, share in (("waits", 0.1), ("computes", 0.95)):
    lines.append(name)
    for memory in (810, 3505):
        for core in range(600, 1201, 40):
            compute, transfer = share * 1200 / core, (1 - share) * 3505 / memory
            time_ms = 10 * math.hypot(compute, transfer)
            power = 55 + 75 * (core / 1200) ** 2.2 + 40 * memory / 3505
            lines.append(f"{memory},{core},{time_ms:.4f},{power:.4f},{time_ms * power:.4f}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    plants = policy_comparison.read_replay_tables(path, iterations=100, default="1200/3505")

comparison = compare_policies(plants, PolicySetup())
for outcome in comparison.for_policy(PolicyName.HARMONIA):
    settings = plants[0].lattice.describe(outcome.settings) if outcome.settings else "several"
    shares = outcome.shares
    print(
        f"{outcome.application}: {settings}; ED² {shares['ed2_gain_over_default']:.1%} better than the default, "
        f"{shares['ed2_over_oracle']:.2%} from the oracle, {shares['ed2_over_oracle_with_probing']:.2%} with probing"
    )
