"""Measure operators one after another: chains of different ones, and stacks, which are layers of
made-up models.

Run on a GPU: ``python -m wattcast.lab.campaigns.kernel_chains chains --out DIR``, or ``stacks``, or
``names`` for the kernels of the chains' members. Folders continue where they stopped; ``wattcast
lab pack`` packs them.

A burst repeats one kernel; in a model every kernel follows a different one. A chain takes longer
than the sum of its members because of the gaps between dependent kernels and because of colder
caches. Members are measured first, in the same run, as ordinary burst rows. In a chain each member
has operands of its own; in a stack each operator hands its result to the next, and one layer is the
difference between two depths."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import (
    asdict,
    dataclass,
    replace,
)
from functools import cache, partial
from pathlib import Path
from typing import Any

from wattcast.core.measured_rows import (
    ChainRow,
    KernelRow,
    RowKind,
)
from wattcast.core.row_journals import read_lines
from wattcast.core.units import parse
from wattcast.lab.campaigns import kernel_campaign, operator_calls
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.kernel_plan import OperatorSpec, spec_from_operator
from wattcast.lab.campaigns.model_campaign import ModelDims
from wattcast.lab.campaigns.operator_calls import (
    CallBuilder,
    OperatorCall,
    build_call,
)
from wattcast.lab.campaigns.operator_rows import (
    KernelCampaign,
    make_blank_row,
    make_row_id,
    measure_burst_row,
    save_row,
)
from wattcast.lab.module_commands import run_module

PLANS = Path(__file__).resolve().parent / "plans"
# layers of the two models whose difference is one layer
FEW = 2
MANY = 6


@dataclass(frozen=True)
class OperatorChain:
    """Operators one after another; with ``dims`` they are one layer of a made-up model."""

    name: str
    members: tuple[OperatorSpec, ...]
    operators: tuple[str, ...] = ()  # of a layer, as a workload file writes them, JSON
    dims: ModelDims | None = None  # of one layer
    phase: str = ""
    batch: int = 0
    seq: int = 0

    def spec(self, layers: int = 0) -> OperatorSpec:
        """Return the chain, or so many of its layers, as one operator for the builder."""
        if self.dims is not None:
            dims = asdict(replace(self.dims, layers=layers))
            detail: dict[str, Any] = {
                "dims": dims,
                "phase": self.phase,
                "batch": self.batch,
                "seq": self.seq,
            }
            return OperatorSpec(
                "stack", {"op": "stack", "dtype": "bf16"}, detail=detail, chosen="models"
            )
        members = []
        for member in self.members:
            fields = asdict(member)
            del fields["chosen"]
            members.append(fields)
        operator = {"op": "chain", "dtype": self.members[0].operator["dtype"]}
        return OperatorSpec("chain", operator, detail={"members": members}, chosen="models")


@cache
def read_chains(kind: str = "chains") -> tuple[OperatorChain, ...]:
    """Read the planned ``chains`` or ``stacks``, small ones first."""
    chains = []
    for line in read_lines(PLANS / f"{kind}.jsonl"):
        plain = []
        for member in line.pop("members"):
            plain += [member] * member.pop("count", 1)
        specs = [spec_from_operator(operator) for operator in plain]
        members = tuple(replace(spec, chosen="models") for spec in specs if spec is not None)
        assert len(members) == len(plain), f"a member of {line['name']} cannot be run"
        if "dims" in line:
            line |= {"dims": ModelDims(**line["dims"]), "operators": tuple(map(json.dumps, plain))}
        chains.append(OperatorChain(members=members, **line))
    return tuple(chains)


def list_chain_members() -> list[OperatorSpec]:
    """List the operators of all chains, each once: a plan for the step that names their kernels."""
    members: dict[str, OperatorSpec] = {}
    for chain in read_chains():
        members |= {member.id: member for member in chain.members}
    return list(members.values())


def measure_chains(
    campaign: KernelCampaign,
    kind: str,
    each_s: float,
) -> None:
    """Measure chains or stacks, each after those of its members that this process has not
    measured.
    """
    bench = campaign.bench
    chains = read_chains(kind)[: campaign.few or None]
    specs = [chain.spec(MANY) for chain in chains]
    chain_of_spec = dict(zip((spec.id for spec in specs), chains, strict=True))
    for spec in campaign.within(specs, each_s, kind.removesuffix("s")):
        chain = chain_of_spec[spec.id]
        alone_s = _measure_members(campaign, chain)
        blank = make_chain_row(chain, [make_blank_row(bench, RowKind.CHAIN, spec)], {})
        campaign.measure(RowKind.CHAIN, spec, blank, partial(_measure_chain, bench, chain, alone_s))


def _measure_members(campaign: KernelCampaign, chain: OperatorChain) -> dict[str, float]:
    """Measure the members of a chain alone, each once; return their latencies, where known."""
    alone_s: dict[str, float] = {}
    different_members = {member.id: member for member in chain.members}
    for member in different_members.values():
        save_row(campaign, RowKind.BURST, member)
        name = make_row_id(RowKind.BURST, member, campaign.bench.gpu.operands.pattern)
        if name in campaign.latency_s:
            alone_s[member.id] = campaign.latency_s[name]
    return alone_s


def _measure_chain(
    bench: OperatorBench,
    chain: OperatorChain,
    alone_s: dict[str, float],
) -> ChainRow:
    """Measure a chain, or a stack of layers at two depths."""
    depths = (FEW, MANY) if chain.dims else (0,)
    rows = [measure_burst_row(bench, chain.spec(layers)) for layers in depths]
    return make_chain_row(chain, rows, alone_s)


def make_chain_row(
    chain: OperatorChain,
    rows: list[KernelRow],
    alone_s: dict[str, float],
) -> ChainRow:
    """Turn a measured burst of a chain into a chain row; ``alone_s`` are its members' latencies,
    where known.

    Of a stack, ``rows`` are the two depths, and the row is one layer: their difference.
    """
    last = rows[-1]
    member_ids = tuple(member.id for member in chain.members)
    all_measured = alone_s.keys() >= set(member_ids)
    latency_s = None
    spread_s = None
    if not chain.dims:
        latency_s = last.latency_s
        spread_s = last.latency_spread_s
    if len(rows) == 2 and rows[0].latency_s and last.latency_s:
        latency_s = (last.latency_s - rows[0].latency_s) / (MANY - FEW)
        both_spreads_s = math.hypot(rows[0].latency_spread_s or 0.0, last.latency_spread_s or 0.0)
        spread_s = both_spreads_s / (MANY - FEW)
    flags: dict[str, None] = {}
    for row in rows:
        flags |= dict.fromkeys(row.flags)
    return ChainRow(
        last.id.replace(f"{RowKind.BURST}-", f"{RowKind.CHAIN}-", 1),
        chain.name,
        specs=member_ids,
        alone_s=tuple(alone_s[name] for name in member_ids) if all_measured else (),
        operators=chain.operators,
        handed_on=chain.dims is not None,
        copies=last.copies,
        replays=last.replays,
        latency_s=latency_s,
        latency_spread_s=spread_s,
        sm_clock_hz=last.sm_clock_hz,
        temperature_c=last.temperature_c,
        flags=tuple(flags),
        run=last.run,
        date=last.date,
    )


def call_chain(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Call several operators one after another; each has operands of its own."""
    calls = [
        build_call(builder, OperatorSpec(**member), fresh=False)
        for member in spec.detail["members"]
    ]

    def run(i: int) -> list[Any]:
        return [call.run(i) for call in calls]

    return OperatorCall(
        run,
        max(call.sets for call in calls),
        sum(call.fixed_byte for call in calls),
        sum(call.set_byte for call in calls),
    )


def call_stack(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Run a model of made-up sizes, whose layers hand on their results and have weights of their
    own.
    """
    from wattcast.lab.campaigns import model_campaign

    sizes = spec.detail
    device = builder.operands.device
    dims = model_campaign.ModelDims(**sizes["dims"])
    row = model_campaign.ModelRunSpec(dims.model, sizes["phase"], sizes["batch"], sizes["seq"])
    built = model_campaign.build_model(row, builder.torch, device, dims)
    step = model_campaign.make_iteration(
        built,
        row,
        builder.torch,
        device,
        dims,
    )

    def run(i: int) -> Any:
        with (
            model_campaign.eager_settings(builder.torch),
            builder.torch.set_grad_enabled(row.phase == "train"),
        ):
            return step()

    return OperatorCall(run, 1, built.parameters * builder.torch.bfloat16.itemsize, 0)


operator_calls.MAKERS |= {"chain": call_chain, "stack": call_stack}
kernel_campaign.STEPS |= {
    "chains": partial(measure_chains, kind="chains", each_s=2.0),
    "stacks": partial(measure_chains, kind="stacks", each_s=14.0),
}


def main() -> None:
    """Measure what the command line names, and print how many rows of each kind there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("chains", "stacks", "names"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="170s")
    options = parser.parse_args()
    listed = list_chain_members() if options.what == "names" else None
    print(
        kernel_campaign.run_kernel_campaign(
            options.out, [options.what], parse(options.budget, "s", "--budget"), listed=listed
        )
    )


if __name__ == "__main__":
    run_module(main)
