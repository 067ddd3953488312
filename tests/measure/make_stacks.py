"""Write ``src/wattcast/lab/campaigns/plans/stacks.jsonl``: ``python tests/measure/make_stacks.py``.

Models of made-up sizes, none of them one that is measured whole, so that what is learned from their
layers can be judged by whole models. Layers are spelled by Wattcast's own front end."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wattcast.lab.campaigns.kernel_plan import spec_from_operator
from wattcast.lab.campaigns.model_campaign import ModelDims
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions, WorkloadPhase
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import ADAMW_ALIGNMENT, ADAMW_ELEMENTS_PER_LAUNCH
from wattcast.workload.readers import load_workload
from wattcast.workload.readers.from_json import operator_to_plain

FILE = Path(__file__).resolve().parents[2] / "src/wattcast/lab/campaigns/plans/stacks.jsonl"
SIZES = (
    ("decode", 1, 512),
    ("decode", 8, 1536),
    ("decode", 24, 768),
    ("prefill", 1, 192),
    ("prefill", 1, 1024),
    ("prefill", 4, 512),
    ("train", 1, 256),
    ("train", 4, 512),
)
MADE_UP = (
    ModelDims("llama-2048", "llama", 1, 2048, 32, 4, 64, 5632, 32000, 8192, False),
    ModelDims("qwen3-2560", "qwen3", 1, 2560, 24, 8, 128, 7680, 32000, 8192, False),
    ModelDims("gpt2-2048", "gpt2", 1, 2048, 16, 16, 128, 8192, 32000, 2048, True),
    ModelDims("qwen2-3072", "qwen2", 1, 3072, 24, 4, 128, 9216, 32000, 8192, False),
    ModelDims("gpt2-896", "gpt2", 1, 896, 14, 14, 64, 3584, 32000, 2048, True),
    ModelDims("llama-5120", "llama", 1, 5120, 40, 8, 128, 13824, 32000, 8192, False),
)


def config(dims: ModelDims, layers: int) -> dict[str, Any]:
    """The sizes as Hugging Face writes them."""
    if dims.architecture == "gpt2":
        sizes = {
            "n_layer": layers,
            "n_embd": dims.hidden,
            "n_head": dims.heads,
            "n_positions": dims.max_positions,
        }
    else:
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": dims.hidden,
            "intermediate_size": dims.intermediate,
            "num_attention_heads": dims.heads,
            "num_key_value_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "max_position_embeddings": dims.max_positions,
            "tie_word_embeddings": dims.tied,
        }
    return {"model_type": dims.architecture, "vocab_size": dims.vocab, **sizes}


def layer(dims: ModelDims, options: ModelOptions) -> list[dict[str, Any]]:
    """The distinct operators of what repeats, each with how often it is called; in training its
    optimizer too.
    """
    few, graph = (
        load_workload.load_workload(config(dims, layers), options)
        for layers in (_LAYERS // 2, _LAYERS)
    )
    calls: dict[Operator, int] = {}
    for op in (op for block in graph.blocks if block.repeat > 1 for op in block.ops):
        calls[op] = calls.get(op, 0) + op.count
    if options.phase is WorkloadPhase.TRAIN:
        each = (math.prod(_optimiser(graph)) - math.prod(_optimiser(few))) // (
            _LAYERS - _LAYERS // 2
        )
        count = math.ceil(each / ADAMW_ELEMENTS_PER_LAUNCH)
        n = each // count // ADAMW_ALIGNMENT * ADAMW_ALIGNMENT
        calls[Elementwise("adamw", n, dtype=options.dtype, write=3 * n * options.dtype.byte)] = (
            count
        )
    return [_runnable(operator_to_plain(op)) | {"count": count} for op, count in calls.items()]


_LAYERS = 4


def _optimiser(graph: Graph) -> tuple[int, int]:
    """Elements of one launch of the optimizer, and launches."""
    (op,) = (op for block in graph.blocks for op in block.ops if op.name == "adamw")
    assert isinstance(op, Elementwise)
    return op.n, op.count


def _runnable(plain: dict[str, Any]) -> dict[str, Any]:
    """As the campaign runs it: one element for all of a single row is an operand like any other."""
    kept = {name: value for name, value in plain.items() if name not in ("count", "label")}
    if spec_from_operator(kept) is None:
        kept = {
            name: value for name, value in kept.items() if name not in ("layout", "rows", "read")
        }
    return kept


def lines() -> list[str]:
    """One stack a line."""
    found = []
    for dims in MADE_UP:
        for phase, batch, seq in SIZES:
            options = ModelOptions.from_names(phase=phase, batch=batch, seq=seq, stack="eager")
            name = f"stack {dims.model} {phase} {batch} {seq}"
            line = {"name": name, "dims": asdict(dims), "phase": phase, "batch": batch, "seq": seq}
            found.append(json.dumps(line | {"members": layer(dims, options)}))
    return found


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
