"""Shares and times of training jobs that no measurement here decides.

``docs/method/training-jobs.md`` says what each rests on.
"""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class TrainingCoefficients(Coefficients):
    """How exchanges and compute share a GPU, and what a job loses beyond both."""

    overlap: float  # of compute time that an exchange beside it can use
    compute_slowed: float  # share by which compute slows while an exchange runs
    persistent_slowed: float  # the same where products hold all SMs from start to end
    tensor_overlap: float  # of exchanges between tensor-parallel GPUs that products hide
    expert_host_s: float  # to launch a layer of experts, forward and backward, without CUDA graphs
    blackwell_attention: float  # time of attention on Blackwell over its forecast
    ultra_attention: float  # the same on Blackwell Ultra over Blackwell
    fp8_attention: float  # time of attention that multiplies in fp8, over that in bf16
    document_spread: float  # of documents' lengths around their mean, relative
    # passes of memory that a kernel takes which finds scales and casts, over those of its bytes
    compiled_casts: float
    row_products: float  # time of fp8 products with scales of rows, over scales of a tensor
    block_products: float  # the same with scales of blocks
    widening: float  # time of a kernel that widens 4-bit weights, over that of its bytes
    host_link: float  # of a PCIe direction's rate that copies from pinned memory reach
    usable_memory: float  # of a card's memory
    job_interval: float  # by which intervals of jobs on several GPUs are wider, in the logarithm
    limit_delay: float  # of a job's time, for which a lower power limit is recommended at most
    node_spread: float  # of the time of exchanges inside a node, to either side
    cluster_spread: float  # of the time of exchanges between nodes, to either side
    short_row: int  # elements up to which a generated kernel reduces several in a block
    loss_chunks: int  # parts of the tokens whose logits a fused loss holds at a time
    forward_host: float  # of the host's time for a layer of experts; the backward pass has the rest
    gather_beside: float  # of the backward pass, beside which gathered weights travel


TRAINING = load_coefficients("training", TrainingCoefficients)
