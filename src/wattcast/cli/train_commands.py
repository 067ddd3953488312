"""``wattcast train``: a training job before its first step."""

from __future__ import annotations

from typing import Annotated

import typer

from wattcast.cli.shared_options import Environment, Json, Plot, save_plot

_STRATEGY = "How GPUs share it (chosen where not given)"
_MONEY = "Money, carbon and pauses"


def _share(help_text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(help=help_text, rich_help_panel=_STRATEGY)
    return found


def _money(help_text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(help=help_text, rich_help_panel=_MONEY)
    return found


def train(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or Hugging Face config.json.")],
    gpu: Annotated[str, typer.Option(help="GPU name or YAML file.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens to train on: 1B, 300M, 15T.")] = "1B",
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; default 4096.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step; default half a million tokens.")
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16|fp16|fp32|fp8")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw|adamw8bit|adafactor|muon|sgd")] = "adamw",
    stack: Annotated[str, typer.Option(help="compiled|eager kernels.")] = "compiled",
    lora: Annotated[int, typer.Option(min=0, help="Rank of LoRA adapters; 0 trains all weights.")] = 0,
    base_bits: Annotated[int, typer.Option(help="Bits of frozen weights: 16, 8, or 4 (QLoRA).")] = 16,
    fused_loss: Annotated[bool, typer.Option("--fused-loss", help="The loss never keeps all logits.")] = False,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="CUDA graphs replay the step; the host costs nothing.")
    ] = False,
    loss_share: Annotated[float, typer.Option(help="Of compute, lost to input and uneven clocks.")] = 0.05,
    clock: Annotated[str | None, typer.Option(help="Locked clock, such as 1500MHz.")] = None,
    power_limit: Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")] = None,
    minimise: Annotated[str, typer.Option(help="time|energy: what decides.")] = "time",
    micro_batch: Annotated[int | None, _share("Sequences computed at a time.")] = None,
    tp: Annotated[int | None, _share("Tensor-parallel GPUs.")] = None,
    pp: Annotated[int | None, _share("Pipeline stages.")] = None,
    cp: Annotated[int, _share("Context-parallel GPUs, which share a sequence.")] = 1,
    ep: Annotated[int, _share("Expert-parallel GPUs.")] = 1,
    interleave: Annotated[int, _share("Model chunks of a pipeline stage.")] = 1,
    sharding: Annotated[str | None, _share("none|zero1|zero2|zero3 (FSDP).")] = None,
    recompute: Annotated[str | None, _share("none|selective|full activations.")] = None,
    node: Annotated[str | None, _share("Node, such as hgx-h100 (gpus nodes lists them), or YAML file.")] = None,
    network: Annotated[str | None, _share("Network of one GPU and direction, such as 50GB/s.")] = None,
    price: Annotated[list[str], _money("Rent of a GPU, such as 2.50USD/h.")] = [],  # noqa: B006
    electricity: Annotated[str | None, _money("Price of energy, such as 0.12USD/kWh.")] = None,
    carbon: Annotated[str | None, _money("Carbon intensity, such as 400g/kWh, or a region.")] = None,
    pue: Annotated[float, _money("Energy at the meter per energy of the node.")] = 1.0,
    host_share: Annotated[float, _money("Hosts, network and fans, as a share of the GPUs' energy.")] = 0.25,
    padding: Annotated[float, _money("Share of tokens that are padding.")] = 0.0,
    pauses: Annotated[float, _money("Share of evaluation, checkpoints and stalls.")] = 0.0,
    failures: Annotated[float, _money("Failures per GPU and day.")] = 0.0,
    search: Annotated[bool, typer.Option("--search", help="Show the ways to share it.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print every assumption.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Answer even where it does not fit.")] = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Say how long a training job takes, how many kWh, what it costs and how to share it over GPUs.

    Example: wattcast train llama3-8b --gpu h100-sxm --gpus 8 --tokens 1B --price 2.50USD/h --carbon germany
    """
    from wattcast.predictor.prices import parse_prices
    from wattcast.training.train_job import train as train_job
    from wattcast.training.training_report import draw_training, print_training, summarise_training

    env: Environment = ctx.obj
    result = train_job(
        model,
        gpu,
        gpus=gpus,
        tokens=tokens,
        seq=seq,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        interleave=interleave,
        sharding=sharding,
        recompute=recompute,
        precision=precision,
        optimizer=optimizer,
        stack=stack,
        lora=lora,
        base_bits=base_bits,
        fused_loss=fused_loss,
        graphs=graphs,
        loss_share=loss_share,
        node=node,
        network=network,
        clock=clock,
        power_limit=power_limit,
        minimise=minimise,
        padding=padding,
        pause_share=pauses,
        failures_per_gpu_day=failures,
        host_share=host_share,
        prices=parse_prices(electricity, carbon, price, pue),
        force=force,
    )
    if plot is not None:
        save_plot(env, draw_training(result), plot)
    if json:
        env.json(summarise_training(result))
        return
    print_training(env.console(), result, details, search)
