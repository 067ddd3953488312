"""How the engines behind served points were started, as far as it is published.

InferenceMAX keeps the command line of every benchmark that it runs; rows of aiconfigurator's sample
whose origin is ``db-dump`` or ``daily csv`` look like its runs. What those command lines set is
asked for: the format of the cache, tokens and sequences of a step, the share of the memory, and how
long a scheduler waits before it takes requests in. They are public in
github.com/SemiAnalysisAI/InferenceX, ``benchmarks``; each recipe names its file and the first
digits of a commit. They change from month to month, and the sample does not say with which one a
row ran: the ones of late 2025 are taken, when most rows were measured. Nothing here was chosen by
comparing with measured times.

MiniMax and gpt-oss ran with what vLLM takes by itself in 2025; later files give it an fp8 cache,
and which of them a row ran with is not known. Rows of ``gap analysis`` are asked with defaults.
"""

from __future__ import annotations

from typing import Any

Recipe = dict[str, Any]
# tokens that the longest request may have beyond the prompt and the output of the benchmark
_SPARE_TOKENS = {(1024, 1024): 20}
_USUAL_SPARE_TOKENS = 200


def find_recipe(
    engine: str,
    gpu: str,
    model: str,
    quantization: str,
    gpus: int,
    concurrency: int,
    lengths: tuple[int, int],
) -> Recipe:
    """Return the keywords of ``simulate`` that say how the engine behind a point was started."""
    if model == "llama3-70b":
        if engine == "vllm":
            return _vllm_llama(gpu, concurrency)
        if engine == "trtllm":
            return _trtllm_llama(gpu, quantization, gpus, lengths)
    if model == "deepseek-v3":
        if engine == "trtllm":
            return _trtllm_deepseek(gpu, quantization, gpus, concurrency, lengths)
        if engine == "sglang":
            return _sglang_deepseek(gpu, quantization, concurrency, lengths)
    return {}


def _vllm_llama(gpu: str, concurrency: int) -> Recipe:
    """``70b_fp8_h200_slurm.sh`` (409e9a48), ``70b_fp8_b200_docker.sh`` and
    ``70b_fp4_b200_docker.sh`` (bb4c7f93).
    """
    return {
        "kv_dtype": "fp8",
        "prefix_caching": False,
        "max_batched_tokens": 8192,
        "max_seqs": max(concurrency, 16) if gpu == "h200" else 512,
        "memory_utilisation": 0.9,
    }


def _trtllm_llama(
    gpu: str,
    quantization: str,
    gpus: int,
    lengths: tuple[int, int],
) -> Recipe:
    """``70b_fp8_h200_trt_slurm.sh``, ``70b_fp4_b200_trt_slurm.sh`` (73ef9225) and
    ``70b_fp8_b200_trt_slurm.sh`` (a267b4bd).
    """
    longest = sum(lengths) + _SPARE_TOKENS.get(lengths, _USUAL_SPARE_TOKENS)
    recipe: Recipe = {
        "kv_dtype": "fp8",
        "prefix_caching": False,
        "max_batched_tokens": 16384 if (gpu, quantization) == ("b200", "fp8") else longest,
    }
    if lengths == (1024, 1024) and gpus < 8:
        recipe["engine_args"] = "batch_wait_timeout_iters=20,batch_wait_max_tokens_ratio=0.9"
    return recipe


def _trtllm_deepseek(
    gpu: str,
    quantization: str,
    gpus: int,
    concurrency: int,
    lengths: tuple[int, int],
) -> Recipe:
    """``dsr1_fp8_h200_trt.sh`` (1fc5d73c), ``dsr1_fp8_b200_trt.sh`` (0a919c5f) and
    ``dsr1_fp4_b200_trt.sh`` (111f0312).
    """
    rounded = (concurrency + lengths[0] + 64 + 63) // 64 * 64
    recipe: Recipe = {
        "kv_dtype": "fp8",
        "prefix_caching": False,
        "max_batched_tokens": max(rounded, 8192),
        "memory_utilisation": 0.75 if gpu == "h200" else 0.8,
    }
    is_block = quantization == "fp8-block" and gpu != "h200"
    if is_block and lengths[1] < 8192 < lengths[0] + 1 and gpus == 4:
        recipe["memory_utilisation"] = 0.75
    if is_block and lengths[0] < 8192 and concurrency >= 256:
        recipe["memory_utilisation"] = 0.7
    if is_block and lengths == (1024, 1024) and 64 <= concurrency < 256:
        recipe["engine_args"] = "batch_wait_timeout_iters=40,batch_wait_max_tokens_ratio=0.8"
    return recipe


def _sglang_deepseek(
    gpu: str,
    quantization: str,
    concurrency: int,
    lengths: tuple[int, int],
) -> Recipe:
    """``dsr1_fp8_h200.sh``, ``dsr1_fp8_b200.sh`` and ``dsr1_fp4_b200.sh`` (1fc5d73c)."""
    if gpu == "h200":
        return {
            "prefix_caching": False,
            "max_batched_tokens": 32768,
            "max_seqs": 512 if lengths == (1024, 1024) else 256,
            "memory_utilisation": 0.82,
        }
    is_narrow = quantization == "nvfp4"
    return {
        "kv_dtype": "fp8",
        "prefix_caching": False,
        "max_batched_tokens": 16384 if is_narrow else 32768,
        "max_seqs": 256 if is_narrow else 128,
        "memory_utilisation": 0.85 if is_narrow else 0.82,
        "engine_args": f"scheduler_recv_interval={30 if concurrency >= 16 else 10}",
    }
