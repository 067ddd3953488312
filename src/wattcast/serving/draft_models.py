"""How a model that drafts tokens runs beside the model that checks them."""

from __future__ import annotations

from wattcast.core import Dtype
from wattcast.workload.model_options import ModelOptions


def choose_draft_options(options: ModelOptions) -> ModelOptions:
    """Return how a draft model runs beside its target: on the same GPUs, which all share it.

    Recipes for narrow weights and adapters are the target's alone. A draft model has the format
    that it was published in, and the format of the target's cache.
    """
    is_narrow = options.dtype in (Dtype.FP8, Dtype.INT8)
    return ModelOptions(
        dtype=Dtype.BF16 if is_narrow else options.dtype,
        kv_dtype=options.kv_dtype,
        attention=options.attention,
        stack=options.stack,
        tp=options.tp,
    )
