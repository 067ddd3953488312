"""``wattcast plan MODEL --rate 20/s --prompt 1000 --output 300 --gpus h100-sxm,h200``"""

from __future__ import annotations

from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.explore import Carbon, Json, Limit, Pue, Rent, Tariff
from wattcast.cli.figures import Plot, save_one
from wattcast.cli.options import AttentionName, DtypeName, StackName

app = typer.Typer(help="How many GPUs serve a model; batch, clock, energy and cost per token.")


@app.command()
def plan(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or Hugging Face config.json.")],
    rate: Annotated[str, typer.Option(help="Requests, such as 20/s or 600/min.")],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")],
    output: Annotated[int, typer.Option(help="Tokens generated for a request.")],
    gpus: Annotated[str, typer.Option(help="GPUs to compare, names with commas.")],
    ttft: Annotated[str | None, typer.Option(help="Time to first token at most, such as 500ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Time per output token at most, such as 40ms.")] = None,
    minimise: Annotated[str, typer.Option(help="gpus|energy|cost")] = "gpus",
    headroom: Annotated[str, typer.Option(help="Plan for this much more than the rate, such as 20%.")] = "0%",
    tp: Annotated[
        str | None, typer.Option(help="GPUs a replica, such as 2 or 1,2,4; default: as few as will do.")
    ] = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    stack: StackName = "engine",
    power_limit: Limit = None,
    host_launch: Annotated[str, typer.Option(help="Host time per operator; 0us is a CUDA graph.")] = "0us",
    tariff: Tariff = None,
    carbon: Carbon = None,
    price: Rent = [],  # noqa: B006
    pue: Pue = 1.0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """How many GPUs, which batch, clock and power limit; energy, cost and carbon per token and request.

    Example: wattcast plan llama3-8b --rate 20/s --prompt 1000 --output 300 --ttft 500ms --tpot 40ms
    --gpus h100-sxm,h200
    """
    from wattcast.explore import money, out, serving

    env: Environment = ctx.obj
    prices = money.prices(tariff, carbon, price, pue)
    asked = serving.service(
        model, rate, prompt, output, ttft, tpot, headroom, host_launch, dtype=dtype, attention=attention, stack=stack
    )
    names = [name.strip() for name in gpus.split(",")]
    found = serving.plan(asked, names, prices, minimise, out.whole_numbers(tp, "tp"), power_limit)
    if plot is not None:
        from wattcast.report import choices

        save_one(env, choices.plans(asked, found), plot)
    if json:
        env.json(out.plans_out(asked, found, prices))
        return
    from wattcast.report.explore_text import print_plans

    print_plans(env.console(), asked, found, prices)
