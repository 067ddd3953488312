"""``wattcast predict WORKLOAD... --gpu NAME``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Plot, save_one
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
    StackName,
    Tokens,
    Tp,
)

app = typer.Typer(help="Predict latency, power, energy and clock of workloads on a GPU.")


def _gpu_names(incomplete: str) -> list[str]:
    """GPUs a shell may complete to."""
    from wattcast import hardware

    return [name for name in hardware.names() if name.startswith(incomplete)]


def _model_names(incomplete: str) -> list[str]:
    """Models a shell may complete to; files are the shell's own business."""
    from wattcast.workload import models

    return [name for name in models.names() if name.startswith(incomplete)]


@app.command()
def predict(
    ctx: typer.Context,
    workloads: Annotated[
        list[str],
        typer.Argument(
            autocompletion=_model_names,
            help="Model names or files: workload JSON, EnergAIzer list, Hugging Face config.json, trace, ONNX.",
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(help="Catalogue name (`wattcast gpus`) or your own YAML file.", autocompletion=_gpu_names),
    ],
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    clock: Annotated[
        str | None, typer.Option(help="Locked core clock, such as 1830MHz; default: the governor.")
    ] = None,
    power_limit: Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")] = None,
    host_launch: Annotated[
        str | None, typer.Option(help="Host time per operator, such as 12us; 0us is a CUDA graph.")
    ] = None,
    temperature: Annotated[str | None, typer.Option(help="Die temperature, such as 60C.")] = None,
    data: Annotated[str, typer.Option(help="Operand data: random|zeros|ones|relu.")] = "random",
    bundle: Annotated[
        Path | None, typer.Option(help="Folder that `calibrate` or `fit kernels` saved, in place of the shipped one.")
    ] = None,
    factor: Annotated[
        list[str] | None, typer.Option(help="Your own efficiency factor, such as compute=0.9 or dram_energy=1.2.")
    ] = None,
    card: Annotated[
        str, typer.Option(help="Whose intervals: another of the kind, or this one, which the bundle was fitted on.")
    ] = "another",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Plot = None,
    figure: Annotated[str, typer.Option(help="What --plot draws: breakdown|timeline|roofline|clocks.")] = "breakdown",
) -> None:
    """Predict each workload, in order, on one GPU.

    Example: wattcast predict llama3-8b --gpu h100-sxm --batch 8 --seq 1024
    """
    from wattcast import api
    from wattcast.cli.factors import factors_of
    from wattcast.errors import bad_value

    env: Environment = ctx.obj
    if plot is not None:
        from wattcast.report.draw import check

        check(figure, plot)
        if len(workloads) != 1:
            raise bad_value("--plot", "one workload", f"{len(workloads)} workloads")
    chip = api.find_gpu(gpu)
    factors = factors_of(factor or [])
    predictions = api.predict_many(
        workloads,
        chip,
        clock=clock,
        power_limit=power_limit,
        host_launch=host_launch,
        temperature=temperature,
        data=data,
        bundle=bundle,
        factors=factors,
        card=card,
        batch=batch,
        seq=seq,
        tokens=tokens,
        phase=phase,
        dtype=dtype,
        attention=attention,
        head=head,
        stack=stack,
        tp=tp,
        pp=pp,
        dp=dp,
        skew=skew,
        recompute=recompute,
        image=image,
    )
    if plot is not None:
        from wattcast.report.draw import draw
        from wattcast.report.look import Settings, look
        from wattcast.workload.options import Options

        options = Options(**{key: ctx.params[key] for key in Options.__dataclass_fields__})
        settings = Settings(clock, power_limit, host_launch, temperature, data)
        save_one(env, draw(figure, look(workloads[0], chip, options, settings, sized=False)), plot)
    if json:
        from wattcast.report.plain import predictions_out

        env.json(predictions_out(predictions))
        return
    from wattcast.report.text import print_predictions

    print_predictions(env.console(), predictions, float(chip.memory.capacity_byte))
