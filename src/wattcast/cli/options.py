"""Options that say what a workload is; every command that takes one shares them."""

from __future__ import annotations

from typing import Annotated

import typer

Source = Annotated[
    str,
    typer.Argument(
        help="Model name, workload JSON, EnergAIzer list, Hugging Face config.json, profiler trace or ONNX."
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences or images at once.")]
Seq = Annotated[int | None, typer.Option(help="Prompt length; in decode the tokens already in the cache.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens to generate (phase generate).")]
PhaseName = Annotated[
    str | None,
    typer.Option(help="prefill|decode|generate|train|forward; default prefill for language, forward for vision."),
]
DtypeName = Annotated[str, typer.Option(help="fp32|tf32|bf16|fp16|fp8|int8")]
AttentionName = Annotated[str, typer.Option(help="eager|flash")]
HeadName = Annotated[
    str | None, typer.Option(help="Language-model head for none|last|all tokens; default last, all in training.")
]
StackName = Annotated[str, typer.Option(help="eager|compiled|engine: who issues the kernels.")]
Tp = Annotated[int, typer.Option(help="Tensor-parallel GPUs.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Dp = Annotated[int, typer.Option(help="Data-parallel replicas.")]
Skew = Annotated[float, typer.Option(help="Share of expert choices that fall on the same experts, 0 to 1.")]
Recompute = Annotated[bool, typer.Option("--recompute", help="Training: recompute activations, do not keep them.")]
Image = Annotated[int | None, typer.Option(help="Side of the picture in pixels (latent pixels in diffusion).")]
