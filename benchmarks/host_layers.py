"""What issuing a layer costs a host: five Hugging Face networks with tensors of a few numbers, on a
CPU.

Nothing but Python and the dispatcher takes time then. Gives microseconds a layer, and the cost of
an operator (a launch included) and of a layer besides that fit them best: behind the
``host_weights`` of ``starting_rule.yaml``. Run by hand, on a quiet machine: ``python
benchmarks/host_layers.py``. Needs torch and transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as hf

SHORT, LONG = 2, 10  # layers: the difference leaves embeddings and masks out
LAUNCH_US = (
    3.5  # of a kernel, beyond what the operator costs on a CPU: not measured here, see the docs
)
ROUNDS, CALLS = 25, 4
SMALL = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
OPERATORS = {
    "bert": 19,
    "gpt2": 25,
    "opt": 23,
    "qwen2": 50,
    "vit": 21,
}  # of a layer: our templates, eager attention


def networks(layers: int) -> dict[str, Callable[[], Any]]:
    """A forward pass of each network."""
    few = {"vocab_size": 16, "max_position_embeddings": 16}
    configs = {
        "bert": hf.BertConfig(num_hidden_layers=layers, **SMALL),
        "gpt2": hf.GPT2Config(n_embd=16, n_head=2, n_layer=layers, n_positions=16, vocab_size=16),
        "opt": hf.OPTConfig(
            hidden_size=16, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16, num_hidden_layers=layers, **few
        ),
        "qwen2": hf.Qwen2Config(num_hidden_layers=layers, num_key_value_heads=1, **SMALL),
        "vit": hf.ViTConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=layers, image_size=4,
            patch_size=2,
        ),
    }  # fmt: skip
    tokens, picture = torch.randint(0, 10, (2, 4)), torch.randn(2, 3, 4, 4)
    found = {}
    for name, config in configs.items():
        config._attn_implementation = "eager"
        model = hf.AutoModel.from_config(config).eval()
        given = picture if name == "vit" else tokens
        found[name] = lambda model=model, given=given: model(given)
    return found


def layer_us() -> dict[str, float]:
    """Microseconds of processor time that one more layer takes: the least of many rounds."""
    torch.set_num_threads(1)
    passes = {(name, n): call for n in (SHORT, LONG) for name, call in networks(n).items()}
    least = dict.fromkeys(passes, np.inf)
    with torch.no_grad():
        for _ in range(ROUNDS):
            for key, call in passes.items():
                call()
                start = time.process_time()
                for _ in range(CALLS):
                    call()
                least[key] = min(least[key], (time.process_time() - start) / CALLS)
    return {
        name: 1e6 * (least[name, LONG] - least[name, SHORT]) / (LONG - SHORT) for name in OPERATORS
    }


def costs_us(layers_us: dict[str, float]) -> tuple[float, float]:
    """Microseconds of a layer by itself and of each of its operators: least squares on relative
    error.
    """
    count = np.array(list(OPERATORS.values()), dtype=float)
    whole = np.array([layers_us[name] for name in OPERATORS]) + LAUNCH_US * count
    columns = np.stack([np.ones(len(count)), count], axis=-1) / whole[:, np.newaxis]
    found = np.linalg.lstsq(columns, np.ones(len(whole)), rcond=None)[0]
    return float(found[0]), float(found[1])


if __name__ == "__main__":
    measured = layer_us()
    own_us, each_us = costs_us(measured)
    print({name: round(us) for name, us in measured.items()})
    ratio = own_us / each_us + 1
    print(
        f"a layer {own_us:.0f} us, an operator {each_us:.1f} us: attention counts as {ratio:.0f} operators"
    )
