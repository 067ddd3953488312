"""Write LoRA adapters with random weights, so that an engine serves requests through them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The linear layers of a decoder layer that adapters usually change.
ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_LAYERS = ("gate_proj", "up_proj", "down_proj")
WEIGHT_SCALE = 0.02  # standard deviation, as of weights before training


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each linear layer of a decoder layer, by its path.

    >>> config = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    ...           "intermediate_size": 20}
    >>> layer_shapes(config)["self_attn.k_proj"]
    (8, 4)
    """
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    key_heads = int(config.get("num_key_value_heads", heads))
    head_dim = int(config.get("head_dim") or hidden // heads)
    feed_forward = int(config["intermediate_size"])
    return {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, key_heads * head_dim),
        "self_attn.v_proj": (hidden, key_heads * head_dim),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, feed_forward),
        "mlp.up_proj": (hidden, feed_forward),
        "mlp.down_proj": (feed_forward, hidden),
    }


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    rank: int,
    seed: int,
    torch: Any,
) -> None:
    """Write one adapter as PEFT saves it: ``adapter_config.json`` and its weights in bf16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS],
        "base_model_name_or_path": "model",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(int(config["num_hidden_layers"])):
        for name, (inputs, outputs) in layer_shapes(config).items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) * WEIGHT_SCALE
                weights[f"{stem}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(weights, str(folder / "adapter_model.safetensors"))


def make_adapter_requests(
    folder: Path,
    config: Mapping[str, Any],
    count: int,
    rank: int,
    torch: Any,
) -> list[Any]:
    """Write ``count`` adapters and return the engine's handles of them."""
    from vllm.lora.request import LoRARequest

    requests = []
    for number in range(1, count + 1):
        path = folder / f"adapter-{number}"
        write_adapter(
            path,
            config,
            rank,
            seed=number,
            torch=torch,
        )
        requests.append(LoRARequest(path.name, number, str(path)))
    return requests
