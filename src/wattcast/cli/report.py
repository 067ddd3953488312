"""``wattcast report WORKLOAD --gpu NAME --out report.html``"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.options import (
    AttentionName,
    Batch,
    Dp,
    DtypeName,
    HeadName,
    Image,
    PhaseName,
    Pp,
    Recompute,
    Seq,
    Skew,
    Source,
    StackName,
    Tokens,
    Tp,
)

app = typer.Typer(help="One self-contained HTML file about a workload on a GPU.")


@app.command()
def report(
    ctx: typer.Context,
    workload: Source,
    gpu: Annotated[
        str, typer.Option(help="Catalogue name or your own YAML file; more names with commas are compared with it.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, such as report.html.")],
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    clock: Annotated[str | None, typer.Option(help="Locked core clock, such as 1830MHz.")] = None,
    power_limit: Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")] = None,
    host_launch: Annotated[str | None, typer.Option(help="Host time per operator; 0us is a CUDA graph.")] = None,
    temperature: Annotated[str | None, typer.Option(help="Die temperature, such as 60C.")] = None,
    data: Annotated[str, typer.Option(help="Operand data: random|zeros|ones|relu.")] = "random",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Summary, memory, breakdown, timeline, clock curve, other GPUs, intervals, assumptions, provenance.

    Example: wattcast report llama3-8b --gpu h200,h100-sxm --batch 8 --seq 1024 --out report.html
    """
    from wattcast.api import find_gpu
    from wattcast.errors import bad_value
    from wattcast.files import write_whole
    from wattcast.report.look import Settings
    from wattcast.report.page import report as make
    from wattcast.workload.options import Options

    env: Environment = ctx.obj
    if out.suffix.lower() not in (".html", ".htm"):
        raise bad_value("--out", "a name that ends in .html", out.name)
    chips = [find_gpu(name.strip()) for name in gpu.split(",")]
    options = Options(**{key: ctx.params[key] for key in Options.__dataclass_fields__})
    settings = Settings(clock, power_limit, host_launch, temperature, data)
    page = make(workload, chips, options, settings, _command(ctx))
    write_whole(out, page.encode())
    if json:
        env.json({"file": str(out), "byte": len(page.encode()), "gpus": [chip.name for chip in chips]})
    else:
        env.say(f"report saved: {out}")


def _command(ctx: typer.Context) -> str:
    """The command line, as far as it decides what the page says."""
    words = ["wattcast", "report", str(ctx.params["workload"])]
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in ("workload", "json", "out"):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join(words)
