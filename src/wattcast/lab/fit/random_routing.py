"""Count the experts that tokens of one prompt visit in an engine on random weights.

    python -m wattcast.lab.fit.random_routing qwen1.5-moe-a2.7b

``measure engine`` fills matrices with N(0, 0.02), norms with 1 and biases with 0
(``campaigns.engine_weights``), and its prompts are random tokens. What such a network routes
follows from that, without a GPU: attention hands all tokens of a prompt much the same sum, which
outweighs their embeddings. Where the feed-forward part is small (many small experts, weights of
experts that do not add up to one) hidden states grow alike from layer to layer, and tokens visit
the same few experts. A large dense layer at the beginning keeps them apart. Trained models are
balanced on purpose, so that none of this is assumed of them.

Steps in CUDA graphs have few tokens an expert and take as long as reading the visited experts does.
``find_skew`` says with which ``--skew`` they are asked for; ``random_routing.csv`` keeps the counts.

The forward pass is computed in NumPy at the sizes of the model; it takes minutes. Matrices are
slices of one buffer of random numbers at random places.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.strict_files import read_shipped_table
from wattcast.lab.campaigns.engine_weights import WEIGHT_SPREAD
from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.lab.module_commands import run_module
from wattcast.workload.engine_operators import FusedExperts

TOKENS = 256  # of the shortest measured prompt
COUNTS_FILE = "random_routing.csv"
_SKEW_STEP = 1e-4
_BUFFER = 80_000_000  # random numbers, more than any matrix has
_ROTARY_BASE = 1e4
_LEAST = 1e-6  # beneath a norm's root

Floats = npt.NDArray[np.float32]


@dataclass
class _Weights:
    """Random matrices, as an engine is filled with."""

    generator: np.random.Generator
    buffer: Floats

    @classmethod
    def from_seed(
        cls,
        seed: int,
        count: int,
    ) -> _Weights:
        """Draw the buffer."""
        generator = np.random.default_rng(seed)
        numbers = generator.standard_normal(count, dtype=np.float32)
        return cls(generator, numbers * np.float32(WEIGHT_SPREAD))

    def draw_matrix(self, rows: int, columns: int) -> Floats:
        """Return a matrix of the buffer's numbers from a random place on."""
        size = rows * columns
        first = int(self.generator.integers(0, self.buffer.size - size + 1))
        return self.buffer[first : first + size].reshape(rows, columns)


def count_visited_experts(
    dims: Any,
    tokens: int = TOKENS,
    layers: int | None = None,
    seed: int = 0,
    numbers: int = _BUFFER,
) -> list[float]:
    """Return the share of experts that any token of a prompt visits, layer by layer.

    Matrices are parts of a buffer of ``numbers``, which none may exceed.
    """
    weights = _Weights.from_seed(seed, numbers)
    hidden = weights.draw_matrix(tokens, dims.hidden)
    shares = []
    for layer in range(min(layers or dims.layers, dims.layers)):
        hidden = hidden + _attend(_normalise(hidden), dims, weights)
        inputs = _normalise(hidden)
        if layer < _count_dense_layers(dims):
            hidden = hidden + _feed_forward(inputs, dims.intermediate, weights)
            continue
        chosen, shares_of_token = _route(inputs, dims, weights)
        shares.append(len(np.unique(chosen)) / dims.experts)
        hidden = hidden + _mix_experts(inputs, chosen, shares_of_token, dims, weights)
        if dims.shared_intermediate:
            hidden = hidden + _share_expert(inputs, dims, weights)
    return shares


@cache
def load_visited_shares() -> dict[str, float]:
    """Read the mean share of experts that ``TOKENS`` tokens visit, by model."""
    rows = read_shipped_table("wattcast.lab.fit", COUNTS_FILE)
    return {row["model"]: float(row["visited"]) for row in rows}


def find_skew(dims: Any, visited: float) -> float:
    """Find the ``--skew`` with which ``TOKENS`` tokens visit a share of the experts."""
    least = 0.0
    most = 1.0
    while most - least > _SKEW_STEP:
        middle = 0.5 * (least + most)
        experts = FusedExperts(
            TOKENS,
            dims.experts,
            dims.experts_chosen,
            dims.hidden,
            dims.expert_intermediate,
            skew=middle,
        )
        is_even = experts.active > visited * dims.experts
        least, most = (middle, most) if is_even else (least, middle)
    return least


def _count_dense_layers(dims: Any) -> int:
    """Return how many layers at the beginning have no experts."""
    if hasattr(dims, "dense_layers"):
        return int(dims.dense_layers)
    count = 0
    for group in dims.groups:
        if group.feed_forward != "dense":
            break
        count += group.layers
    return count


def _normalise(values: Floats) -> Floats:
    mean_square = np.square(values).mean(axis=-1, keepdims=True)
    return np.asarray(values / np.sqrt(mean_square + np.float32(_LEAST)))


def _feed_forward(
    inputs: Floats,
    inner: int,
    weights: _Weights,
) -> Floats:
    width = inputs.shape[1]
    gate = inputs @ weights.draw_matrix(width, inner)
    up = inputs @ weights.draw_matrix(width, inner)
    gated = gate / (1.0 + np.exp(-gate)) * up
    return np.asarray(gated @ weights.draw_matrix(inner, width))


def _share_expert(
    inputs: Floats,
    dims: Any,
    weights: _Weights,
) -> Floats:
    output = _feed_forward(inputs, dims.shared_intermediate, weights)
    if getattr(dims, "shared_gate", False):
        gate = inputs @ weights.draw_matrix(dims.hidden, 1)
        output = output / (1.0 + np.exp(-gate))
    return output


def _attend(
    inputs: Floats,
    dims: Any,
    weights: _Weights,
) -> Floats:
    """Attend causally, with plain or latent keys and values."""
    tokens = len(inputs)
    rank = getattr(dims, "kv_rank", 0)
    head = dims.plain_dim if rank else dims.head_dim or dims.hidden // dims.heads
    pairs = dims.heads if rank else dims.kv_heads
    source = inputs
    if rank:
        source = _normalise(inputs @ weights.draw_matrix(dims.hidden, rank))
    query = inputs @ weights.draw_matrix(dims.hidden, dims.heads * head)
    key = source @ weights.draw_matrix(source.shape[1], pairs * head)
    value = source @ weights.draw_matrix(source.shape[1], pairs * head)
    if getattr(dims, "qk_norm_wide", False):
        query = _normalise(query)
        key = _normalise(key)
    queries = query.reshape(tokens, dims.heads, head)
    keys = key.reshape(tokens, pairs, head)
    values = value.reshape(tokens, pairs, head)
    if getattr(dims, "qk_norm", False):
        queries = _normalise(queries)
        keys = _normalise(keys)
    queries = _rotate(queries)
    keys = _rotate(keys)

    later = np.triu(np.full((tokens, tokens), -np.inf, dtype=np.float32), 1)
    outputs = np.empty_like(queries)
    for place in range(dims.heads):
        pair = place * pairs // dims.heads
        scores = queries[:, place] @ keys[:, pair].T / np.float32(np.sqrt(head)) + later
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        outputs[:, place] = chances @ values[:, pair]
    output = outputs.reshape(tokens, dims.heads * head)
    return np.asarray(output @ weights.draw_matrix(dims.heads * head, dims.hidden))


def _rotate(values: Floats) -> Floats:
    """Rotate halves of each head by its place, as rotary embeddings do."""
    tokens, _, head = values.shape
    frequency = _ROTARY_BASE ** (-np.arange(0, head, 2) / head)
    angle = np.arange(tokens)[:, np.newaxis, np.newaxis] * frequency
    first, second = values[..., : head // 2], values[..., head // 2 :]
    turned = [
        first * np.cos(angle) - second * np.sin(angle),
        first * np.sin(angle) + second * np.cos(angle),
    ]
    return np.concatenate(turned, axis=-1).astype(np.float32)


def _route(
    inputs: Floats,
    dims: Any,
    weights: _Weights,
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the experts of each token and their weights."""
    scores = inputs @ weights.draw_matrix(dims.hidden, dims.experts)
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    picks = dims.experts_chosen
    chosen = np.argpartition(-chances, picks - 1, axis=1)[:, :picks]
    shares = np.take_along_axis(chances, chosen, axis=1)
    if dims.router_renormalise:
        shares = shares / shares.sum(axis=1, keepdims=True)
    return chosen, shares


def _mix_experts(
    inputs: Floats,
    chosen: npt.NDArray[np.int64],
    shares: Floats,
    dims: Any,
    weights: _Weights,
) -> Floats:
    """Add up the outputs of each token's experts."""
    output = np.zeros_like(inputs)
    for expert in np.unique(chosen):
        token, place = np.nonzero(chosen == expert)
        parts = _feed_forward(inputs[token], dims.expert_intermediate, weights)
        output[token] += shares[token, place][:, np.newaxis] * parts
    return output


def main() -> None:
    """Print a row of ``random_routing.csv`` for each model that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model that was measured")
    models = parser.parse_args().models
    for model in models:
        visited = count_visited_experts(load_measured_model(model).dims)
        print(f"{model},{TOKENS},{len(visited)},{np.mean(visited):.3f}", flush=True)


if __name__ == "__main__":
    run_module(main)
