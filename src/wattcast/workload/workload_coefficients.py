"""What a workload runs where neither its file nor its options say it."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class WorkloadCoefficients(Coefficients):
    """What a workload runs where nothing says it."""

    graph_tokens: int  # of a step that replays a CUDA graph at most
    graph_splits: int  # of a sequence in such a step at most
    power_exponent: float  # by which visits of experts fall with their rank in public tables
    skewed_exponent: float  # the same where a workload says skewed
    trained_rows: int  # of which the rows of an expert are a multiple
    shared_launches: int  # of a shared expert, eagerly
    engine_shared_launches: int  # the same in an engine
    small_tensor: int  # times smaller than another is kept for the backward pass
    special_operations: float  # that an exponential or a reciprocal counts as
    workspace_byte: float  # of cuBLAS, for a handle and stream
    chunk: int  # parameters of a block's part of a list of tensors
    most_chunks: int  # of one kernel
    opt_layer_host: float  # what a layer of OPT costs the host besides its operators, over GPT-2's
    vit_layer_host: float  # the same of ViT
    muon_iterations: int  # of Newton and Schulz in an update by Muon


WORKLOADS = load_coefficients("workloads", WorkloadCoefficients)
