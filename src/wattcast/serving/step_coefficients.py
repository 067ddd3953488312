"""How an engine keeps its cache, and where step costs are interpolated."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class StepCoefficients(Coefficients):
    """How an engine keeps its cache, and where step costs are interpolated."""

    block_tokens: int  # of the paged cache
    memory_utilisation: float  # share of the memory that an engine takes
    padded_layers: float  # times the fewest layers, below which groups are padded to the most
    mamba_chunk: int  # tokens of a chunk of the first Mamba, whose scan has none
    waiting_weight: int  # requests that decode, of which one that waits counts as many


STEPS = load_coefficients("serving_steps", StepCoefficients)
