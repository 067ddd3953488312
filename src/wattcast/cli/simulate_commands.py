"""``wattcast simulate``: a serving engine under traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.shared_options import (
    Carbon,
    Electricity,
    Environment,
    Json,
    Plot,
    Pue,
    Rent,
    options_besides,
    save_plot,
)


def simulate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or Hugging Face config.json.")],
    gpu: Annotated[str, typer.Option(help="GPU name or YAML file.")],
    rate: Annotated[str | None, typer.Option(help="Requests, such as 8/s or 600/min.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Requests of a CSV or JSON Lines file.")] = None,
    prompt: Annotated[str, typer.Option(help="Prompt tokens: 512, lognormal:median=512,sigma=0.8, a file.")] = "512",
    output: Annotated[str, typer.Option(help="Output tokens, written like --prompt.")] = "128",
    arrivals: Annotated[str, typer.Option(help="poisson|fixed|gamma:cv=2|diurnal:peak=1.5,period=24h")] = "poisson",
    seconds: Annotated[str, typer.Option(help="Time of arrivals, such as 600 or 1h.")] = "600",
    requests: Annotated[int | None, typer.Option(help="Number of requests, in place of --seconds.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn arrivals and lengths.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Draws to repeat it with, for the spread.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32|tf32|bf16|fp16|fp8|int8")] = "bf16",
    quantization: Annotated[str | None, typer.Option(help="Recipe: fp8|fp8-block|w8a8|awq|gptq|mxfp4|nvfp4.")] = None,
    weights: Annotated[str | None, typer.Option(help="Weights alone in int4|fp8|fp4.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Cache in bf16|fp16|fp8.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel GPUs of a replica.")] = 1,
    clock: Annotated[str | None, typer.Option(help="Locked clock, such as 1500MHz.")] = None,
    power_limit: Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the requests.")] = 1,
    router: Annotated[str, typer.Option(help="round-robin|least-loaded")] = "round-robin",
    prefill_replicas: Annotated[int, typer.Option(min=0, help="Engines for prompts alone; others decode.")] = 0,
    transfer: Annotated[str, typer.Option(help="Speed of sending a prompt's cache on.")] = "50GB/s",
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step at most.")] = 8192,
    max_seqs: Annotated[int, typer.Option(min=1, help="Sequences of a step at most.")] = 256,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a cache block.")] = 16,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Room of the cache; default: what the memory leaves.")
    ] = None,
    memory_utilisation: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the memory an engine takes.")
    ] = 0.9,
    prefix_hit_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of each prompt found in the cache.")
    ] = 0.0,
    speculative_tokens: Annotated[int, typer.Option(min=0, max=64, help="Tokens drafted a step.")] = 0,
    acceptance_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Chance that a drafted token is kept.")
    ] = 0.7,
    ttft: Annotated[str | None, typer.Option(help="Time to first token of a good request, such as 500ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Time per output token of a good request, such as 50ms.")] = None,
    electricity: Electricity = None,
    carbon: Carbon = None,
    price: Rent = [],  # noqa: B006
    pue: Pue = 1.0,
    plot: Plot = None,
    out: Annotated[Path | None, typer.Option(help="Every request and every step, as .parquet.")] = None,
    json: Json = False,
) -> None:
    """Serve requests as vLLM would and say how long they take and what they draw.

    Example: wattcast simulate llama3-8b --gpu h200 --rate 8/s --prompt 512 --output 128 --seconds 600
    """
    from wattcast.serving.simulate_serving import simulate as simulate_serving

    env: Environment = ctx.obj
    if (rate is None) == (trace is None):
        raise typer.BadParameter("give either --rate or --trace", param_hint="'--rate' / '--trace'")
    result = simulate_serving(**options_besides(ctx, "plot", "out", "json"))
    if out is not None:
        for path in result.write_requests_and_steps(out):
            env.say(f"written: {path}")
    if plot is not None:
        from wattcast.serving.serving_result import draw_serving

        save_plot(env, draw_serving(result), plot)
    if json:
        env.json(result.summarise())
        return
    from wattcast.serving.serving_result import print_serving

    print_serving(env.console(), result)
