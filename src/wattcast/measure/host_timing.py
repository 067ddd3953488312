"""Time a small model whose operators PyTorch issues one by one, so slowly that a GPU waits for
them.

GPT-2 with random weights at batch 1 takes a data-centre GPU less than a millisecond of kernels, and
its host several milliseconds: what is timed is Python, PyTorch's dispatcher and the driver's
launches. Without a GPU the last part is missing, so nothing is measured there.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from wattcast.core.errors import BadInput, MissingTool

TOKENS = 64
WARM_RUNS = 20


def time_small_model(seconds: float = 3.0) -> tuple[float, str]:
    """Return the seconds of one forward pass of GPT-2 on this machine, and a description of it."""
    torch = _import_tool("torch")
    if not torch.cuda.is_available():
        raise BadInput(
            "no CUDA device here: without the driver's launches a host cannot be measured. "
            "Run `wattcast doctor --host` on the machine with the GPU, or give the time of your "
            "host: --host-launch 12us."
        )
    transformers = _import_tool("transformers")  # takes a second
    model = transformers.GPT2Model(transformers.GPT2Config()).to("cuda", torch.bfloat16).eval()
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device="cuda")
    each_s = _time_runs(torch, lambda: model(ids), seconds)
    words = f"gpt2 batch 1, {TOKENS} tokens, torch {torch.__version__}"
    return each_s, f"{words}, transformers {transformers.__version__}"


def _import_tool(name: str) -> Any:
    """Import PyTorch or transformers, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingTool(
            f"measuring the host needs PyTorch and transformers; {error.name} is missing. "
            "Install both with pip."
        ) from None


def _time_runs(
    torch: Any,
    run: Any,
    seconds: float,
) -> float:
    """Return the mean seconds of a run, over runs that follow one another for so long."""
    with torch.inference_mode():
        for _ in range(WARM_RUNS):
            run()
        torch.cuda.synchronize()
        runs = 0
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < seconds:
            run()
            runs += 1
        torch.cuda.synchronize()
        return (time.perf_counter() - begin_s) / runs
