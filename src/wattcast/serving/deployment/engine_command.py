"""Write the command line of the engine that a plan was simulated with.

Names of arguments are those of ``vllm serve`` in vLLM 0.25.1. ``tests/serving/vllm_arguments.txt``
lists all that its parser takes, and a test holds the written ones against it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from wattcast.options.weight_recipes import UNQUANTIZED
from wattcast.serving.cache_size import MEMORY_UTILISATION
from wattcast.serving.plan_options import PlanOption
from wattcast.workload.model_catalogue import ModelSpec, load_aliases
from wattcast.workload.model_options import ModelOptions, count_positions

ENGINE_IMAGE = "vllm/vllm-openai:v0.25.1"
PORT = 8000
# Formats that vLLM makes of 16-bit weights while it loads them; others need a checkpoint in them.
_MADE_WHILE_LOADING = {"fp8": "fp8", "fp8-block": "fp8_per_block"}
# The ranks of adapters that vLLM takes (its ``MaxLoRARanks``)
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ENGINE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class EngineCommand:
    """The arguments of an engine of a plan, and what has to be known to start it."""

    model: str  # name on the Hugging Face hub, or a folder
    arguments: tuple[str, ...]  # after the model
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command."""
        return ("vllm", "serve", self.model, *self.arguments)

    def show(self) -> str:
        """Return the command for a shell, an argument a line."""
        lines = [f"vllm serve {shlex.quote(self.model)}"]
        place = 0
        while place < len(self.arguments):
            name = self.arguments[place]
            has_value = place + 1 < len(self.arguments)
            if has_value and not self.arguments[place + 1].startswith("--"):
                lines.append(f"  {name} {shlex.quote(self.arguments[place + 1])}")
                place += 2
                continue
            lines.append(f"  {name}")
            place += 1
        return " \\\n".join(lines)


def make_engine_command(
    option: PlanOption,
    model: str | Path | ModelSpec,
    spec: ModelSpec,
    role: str = "",
) -> EngineCommand:
    """Return the command of one engine of a plan's replica.

    ``role`` is that of an engine in a plan with pools, ``prefill`` or ``decode``: its cache goes
    through NIXL.
    """
    shared = option.shared
    settings = option.settings
    arguments = ["--port", str(PORT)]
    arguments += _list_parallel_arguments(shared)
    arguments += ["--max-num-seqs", str(settings.max_seqs)]
    arguments += ["--max-num-batched-tokens", str(settings.max_batched_tokens)]
    arguments += ["--gpu-memory-utilization", f"{MEMORY_UTILISATION:g}"]
    most_tokens = _limit_context(option, spec)
    notes: list[str] = []
    if most_tokens is not None:
        arguments += ["--max-model-len", str(most_tokens)]
        notes.append(f"requests of more than {most_tokens:,} tokens do not fit into the cache")
    formats, format_notes = _list_formats(shared)
    arguments += formats
    arguments += _list_adapters(shared)
    arguments.append("--enable-prefix-caching")
    if role:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    name = name_on_hub(model, spec)
    return EngineCommand(name, tuple(arguments), (*notes, *format_notes))


def _list_parallel_arguments(shared: ModelOptions) -> list[str]:
    """Return how the GPUs of an engine share the model; experts on whole GPUs where asked."""
    arguments = ["--tensor-parallel-size", str(shared.tp)]
    if shared.pp > 1:
        arguments += ["--pipeline-parallel-size", str(shared.pp)]
    if shared.dp > 1:
        arguments += ["--data-parallel-size", str(shared.dp)]
    if shared.ep > 1:
        arguments.append("--enable-expert-parallel")
    return arguments


def _limit_context(option: PlanOption, spec: ModelSpec) -> int | None:
    """Return the longest request that the cache holds, where that is less than the model takes.

    An engine whose cache holds no request of the model's full length refuses to start.
    """
    positions = count_positions(spec)
    costs = option.costs
    if positions is None or costs is None:
        return None
    if costs.cache_tokens >= costs.groups.count_slots(positions):
        return None
    low = 1
    high = positions
    while high - low > 1:
        middle = (low + high) // 2
        if costs.groups.count_slots(middle) <= costs.cache_tokens:
            low = middle
        else:
            high = middle
    return low


def _list_formats(shared: ModelOptions) -> tuple[list[str], list[str]]:
    """Return the arguments of number formats, and what the checkpoint has to be for the others."""
    arguments: list[str] = []
    notes: list[str] = []
    dtype = _ENGINE_DTYPES.get(str(shared.dtype))
    if dtype is not None:
        arguments += ["--dtype", dtype]
    expected = shared.quantization or (str(shared.dtype) if dtype is None else None)
    if expected in _MADE_WHILE_LOADING:
        arguments += ["--quantization", _MADE_WHILE_LOADING[expected]]
    elif expected not in (None, UNQUANTIZED):
        notes.append(
            f"--model has to name a checkpoint in {expected}: the engine reads its format there"
        )
    if shared.weights is not None:
        notes.append(
            f"--model has to name a checkpoint with weights in {shared.weights}: the engine reads "
            "its format there"
        )
    if shared.kv_dtype is not None:
        cache = _ENGINE_DTYPES.get(str(shared.kv_dtype), str(shared.kv_dtype))
        arguments += ["--kv-cache-dtype", cache]
    return arguments, notes


def _list_adapters(shared: ModelOptions) -> list[str]:
    """Return the arguments of LoRA adapters, whose rank the engine rounds up."""
    if shared.lora is None:
        return []
    rank = next((size for size in _ADAPTER_RANKS if size >= shared.lora), _ADAPTER_RANKS[-1])
    count = str(shared.adapters or 1)
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count]


def name_on_hub(model: str | Path | ModelSpec, spec: ModelSpec) -> str:
    """Return the name that an engine loads a model by.

    That is the name it was asked by where it is one of the Hugging Face hub, the folder of a
    ``config.json``, or the first name of the hub that means this catalogue model.
    """
    text = str(model) if isinstance(model, str | Path) else spec.name
    path = Path(text)
    if path.suffix in (".json", ".yaml"):
        return str(path.parent.resolve()) if path.name == "config.json" else spec.name
    if "/" in text:
        return text
    for alias, row in load_aliases().items():
        if row["name"] == spec.name and "/" in alias and not row["max_positions"]:
            return alias
    return spec.name
