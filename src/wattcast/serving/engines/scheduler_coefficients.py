"""What engines other than vLLM decide by, and what they take by default."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class SchedulerCoefficients(Coefficients):
    """Constants of SGLang's and TensorRT-LLM's schedulers, from their sources."""

    sglang_new_token_ratio: float  # of what requests are still to get that is kept free, at first
    sglang_least_ratio: float  # share of the first ratio to which it falls
    sglang_ratio_steps: int  # decode steps in which it falls
    sglang_retract_steps: int  # tokens of each request that are kept free after a retraction
    sglang_clipped_tokens: int  # the most output that is expected of a request
    sglang_reserved_byte: float  # memory of neither weights nor cache, besides what grows
    sglang_seqs: int  # the most sequences of a step
    trtllm_seqs: int
    trtllm_tokens: int  # the most tokens of a step
    trtllm_block_tokens: int  # of a block of the cache
    trtllm_free_share: float  # of the memory that weights and activations leave


SCHEDULERS = load_coefficients("engine_schedulers", SchedulerCoefficients)
