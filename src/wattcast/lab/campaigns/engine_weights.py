"""Fill the weights and the cache of an engine with numbers, and check that it computes with them.

An engine that starts with dummy weights draws less power than one with a trained model: zeros
toggle nothing, and under some norms all tokens look alike. So matrices get N(0, 0.02), as a model
has before training. Two faults stay silent without a check: packed weights that no list of
parameters shows keep their zeros, and numbers that overflow make every hidden state NaN. A third
one is an engine that quantizes nothing: started on a GPTQ configuration with dummy weights, vLLM
0.25.1 multiplies in bf16.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wattcast.measure.steady_state import say

WEIGHT_SPREAD = 0.02  # standard deviation of the weights of an untrained model
FP8_SPREAD = 64.0  # of codes in fp8, whose scale makes WEIGHT_SPREAD of them
FP4_SCALE = 120  # the byte of an e8m0 scale of 2^-7: makes N(0, 0.02) of equally likely fp4 codes
INT8_SPREAD = 42.0
INT4_SPREAD = 4.6  # standard deviation of uniform codes of four bits
# Two codes of the zero that symmetric weights have. Random zeros would shift whole columns: all
# tokens would then look alike, and a router would send them to the same few experts.
INT4_ZEROS = 0x88
LARGE_BYTE = 2**20  # smaller tensors (norms, biases, tables) may well be constant
_INDEX_NAMES = ("g_idx", "sort_indices", "expert_map", "workspace")  # places, not numbers


@dataclass(frozen=True)
class WeightReport:
    """What filling the weights of an engine came to."""

    filled: int  # numbers
    zero: tuple[str, ...]  # names of large tensors that still hold nothing but zeros
    is_finite: bool  # whether the engine's own log-probabilities are numbers
    is_narrow: bool = True  # whether it keeps the narrow weights that its configuration names

    @property
    def fault(self) -> str:
        """Why no row of this engine can be believed; empty where none is known."""
        if self.zero:
            return f"weights stayed zero: {', '.join(self.zero[:3])}"
        if not self.is_narrow:
            return "the configuration names a quantization, but all weights are 16 bit or wider"
        return "" if self.is_finite else "hidden states became NaN"


def fill_weights(engine: Any, torch: Any) -> int:
    """Fill matrices with N(0, 0.02), norms with 1 and biases with 0; return how many numbers.

    A matrix in fp8 gets N(0, 64), and its scales what makes N(0, 0.02) of that. Packed codes become
    random bits, and their scales what makes N(0, 0.02) of these. Returns 0 where nothing is
    reached.
    """
    filled = 0
    try:
        with torch.no_grad():
            for name, parameter in _model_of(engine).named_parameters():
                filled += _fill_parameter(name, parameter, torch)
        with torch.inference_mode():
            for codes, are_scales in list_packed_weights():
                low, high = (FP4_SCALE, FP4_SCALE + 1) if are_scales else (0, 256)
                filled += codes.random_(low, high).numel()
        torch.cuda.synchronize()
    except Exception as error:
        say(f"the weights stay dummies: {type(error).__name__}: {error}")
        return 0
    return filled


def _fill_parameter(
    name: str,
    parameter: Any,
    torch: Any,
) -> int:
    """Fill one parameter by its name and format; return the numbers filled, scales not counted."""
    if any(word in name for word in _INDEX_NAMES):
        return 0
    if "scale" in name:
        _fill_scales(name, parameter, torch)
        return 0
    if parameter.ndim <= 1:
        parameter.fill_(1.0 if "norm" in name else 0.0)
        return 0
    if parameter.dtype is torch.int8:
        _fill_integers(parameter, torch)
    elif not parameter.is_floating_point():
        codes = parameter.view(torch.uint8)
        if "zero" in name:
            codes.fill_(INT4_ZEROS)
        else:
            codes.random_(0, 256)
    elif parameter.element_size() > 1:
        parameter.normal_(0.0, WEIGHT_SPREAD)
    elif parameter.dtype is torch.float8_e4m3fn:
        rows = max(2**26 // parameter[0].numel(), 1)  # not all at once: they are drawn in fp32
        for part in parameter.split(rows):
            normal = torch.randn(part.shape, device=part.device)
            part.copy_(normal.mul_(FP8_SPREAD).to(part.dtype))
    else:
        return 0
    return int(parameter.numel())


def _fill_integers(parameter: Any, torch: Any) -> None:
    """Fill a matrix of int8 as rows of normal weights are quantized: three sigmas reach 127.

    Uniform codes would toggle more bits than a model's weights do, and products draw more.
    """
    rows = max(2**26 // parameter[0].numel(), 1)
    for part in parameter.split(rows):
        normal = torch.randn(part.shape, device=part.device)
        part.copy_(normal.mul_(INT8_SPREAD).round_().clamp_(-127, 127).to(part.dtype))


def _fill_scales(
    name: str,
    parameter: Any,
    torch: Any,
) -> None:
    """Fill the scales of weights; those of activations stay as they are."""
    if "weight_scale" in name:
        if parameter.dtype in (torch.uint8, torch.float8_e8m0fnu):
            parameter.view(torch.uint8).fill_(FP4_SCALE)
        else:
            parameter.fill_(WEIGHT_SPREAD / FP8_SPREAD)
    elif name.rpartition(".")[2].endswith("scales"):  # of AWQ and GPTQ, and of their experts
        parameter.fill_(WEIGHT_SPREAD / INT4_SPREAD)


def list_packed_weights() -> Iterator[tuple[Any, bool]]:
    """Yield the bytes of experts in mxfp4 and whether they are scales.

    They are Triton's own tensors and no parameters. The engine freezes the garbage collector when
    it has captured its graphs, after which only unfreezing shows them.
    """
    gc.unfreeze()
    for item in gc.get_objects():
        is_wrapped = type(item).__name__ == "Tensor" and "triton_kernels" in type(item).__module__
        if is_wrapped and item.storage.data.element_size() == 1:
            yield item.storage.data, "Scale" in type(item.storage.layout).__name__


def has_narrow_weights(engine: Any) -> bool:
    """Tell whether any large weight of an engine is packed or has 8 bits."""
    for name, tensor in _model_of(engine).named_parameters():
        byte = tensor.numel() * tensor.element_size()
        is_place = any(word in name for word in _INDEX_NAMES)
        is_packed = not tensor.is_floating_point() or tensor.element_size() == 1
        if byte >= LARGE_BYTE and is_packed and not is_place:
            return True
    return any(codes.numel() >= LARGE_BYTE for codes, _ in list_packed_weights())


def find_zero_weights(engine: Any, torch: Any) -> tuple[str, ...]:
    """Return the names of large weights of which a sample holds nothing but zeros."""
    weights = [(name, p) for name, p in _model_of(engine).named_parameters() if "bias" not in name]
    packed = [(f"packed {i}", codes) for i, (codes, _) in enumerate(list_packed_weights())]
    zero = []
    for name, tensor in weights + packed:
        byte = tensor.numel() * tensor.element_size()
        if byte < LARGE_BYTE or any(word in name for word in _INDEX_NAMES):
            continue
        sample = tensor.detach().reshape(-1)[: 2**16].contiguous().view(torch.uint8)
        if not bool(sample.any()):
            zero.append(name)
    return tuple(zero)


def has_finite_outputs(
    engine: Any,
    sampling: Any,
    prompt: list[int],
) -> bool:
    """Tell whether the engine hands out log-probabilities that are numbers for a prompt."""
    engine.add_request("finite", {"prompt_token_ids": prompt}, sampling)
    values: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            for position in output.outputs[0].logprobs or ():
                values += [entry.logprob for entry in position.values()]
    return bool(values) and all(math.isfinite(value) for value in values)


def fill_cache(engine: Any, torch: Any) -> int:
    """Fill the key-value cache with normally distributed numbers and return the bytes filled.

    A fresh cache holds zeros, and reading zeros takes less power than reading numbers. Returns 0
    where the cache cannot be reached.
    """
    try:
        tensors = engine.model_executor.driver_worker.model_runner.kv_caches
        by_storage = {t.untyped_storage().data_ptr(): t for t in reversed(_flatten(tensors))}
        filled = 0
        for tensor in by_storage.values():
            dtype = torch.float8_e4m3fn if tensor.element_size() == 1 else tensor.dtype
            pattern = torch.randn(2**24, device=tensor.device).to(dtype).view(torch.uint8)
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw = empty.set_(tensor.untyped_storage())
            for part in raw.split(pattern.numel()):
                part.copy_(pattern[: part.numel()])
            filled += raw.numel()
        torch.cuda.synchronize()
        return filled
    except Exception as error:
        say(f"the cache keeps its zeros: {type(error).__name__}: {error}")
        return 0


def _flatten(tensors: Any) -> list[Any]:
    """Return the tensors of all layers; linear attention keeps a list of states a layer."""
    flat: list[Any] = []
    for item in tensors:
        flat += _flatten(item) if isinstance(item, list | tuple) else [item]
    return flat


def _model_of(engine: Any) -> Any:
    return engine.model_executor.driver_worker.model_runner.get_model()
