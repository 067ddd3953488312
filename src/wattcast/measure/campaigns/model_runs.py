"""Plan the whole-model rows, build each model with random weights, and capture one iteration of it.

``model_plan.csv`` lists the rows; ``models.csv`` has the published dimensions, so that a bare GPU node needs no
catalogue reader (a test compares both with ``workload/catalogue``). A tier is measured whole before the next, and
rows of one model lie together inside a tier, so that a model is built once a tier.
"""

from __future__ import annotations

import contextlib
import csv
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wattcast.core.errors import BadInput, MissingTool, bad_value
from wattcast.measure.campaigns.campaign_engine import TorchDevice, import_cuda_torch
from wattcast.measure.campaigns.elementwise_calls import torch_dtype

_FOLDER = Path(__file__).parent
VISION = ("vit", "resnet")


@dataclass(frozen=True)
class ModelDims:
    """Published dimensions of one model; zero where an architecture has no such size."""

    model: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool

    @property
    def vision(self) -> bool:
        """Whether it takes pictures."""
        return self.architecture in VISION


@dataclass(frozen=True)
class ModelRunSpec:
    """One row to measure: the options of ``wattcast predict``, and who launches the kernels.

    ``graph`` true: one CUDA graph of a whole iteration, so that the GPU never waits for the host.
    """

    model: str
    phase: str
    batch: int
    seq: int | None
    attention: str = "flash"
    graph: bool = True
    tier: int = 1
    dtype: str = "bf16"

    @property
    def id(self) -> str:
        """The same in every run, so that a campaign can be continued."""
        size = f"-s{self.seq}" if self.seq else ""
        run = "graph" if self.graph else "eager-launch"
        return f"model-{self.model}-{self.phase}-b{self.batch}{size}-{self.attention}-{self.dtype}-{run}"

    @property
    def head(self) -> str:
        """For which tokens the language-model head runs; empty for a model of pictures."""
        if find_dims(self.model).vision:
            return ""
        if self.phase == "train":
            return "all"
        return "none" if find_dims(self.model).architecture == "bert" else "last"

    @property
    def workload(self) -> dict[str, Any]:
        """The options of ``wattcast predict`` that say the same."""
        options = {name: getattr(self, name) for name in ("batch", "seq", "phase", "dtype", "attention", "head")}
        return {name: value for name, value in (options | {"stack": "eager"}).items() if value not in (None, "")}


@cache
def read_model_plan() -> tuple[ModelRunSpec, ...]:
    """Read every planned row, the most valuable first."""
    specs = []
    for row in _read_plan_table("model_plan.csv"):
        sizes = int(row["batch"]), int(row["seq"]) if row["seq"] else None
        graph, tier = row["run"] == "graph", int(row["tier"])
        specs.append(ModelRunSpec(row["model"], row["phase"], *sizes, row["attention"], graph, tier))
    return tuple(sorted(specs, key=lambda spec: spec.tier))


@cache
def find_dims(model: str) -> ModelDims:
    """Return the published dimensions of a planned model."""
    for row in _read_plan_table("models.csv"):
        if row["model"] == model:
            numbers = {
                name: int(row[name]) for name in ModelDims.__annotations__ if name in row and row[name].isdigit()
            }
            return ModelDims(model=model, architecture=row["architecture"], tied=row["tied"] == "yes", **numbers)
    known = ", ".join(row["model"] for row in _read_plan_table("models.csv"))
    raise BadInput(f"no dimensions of {model} in models.csv, which has {known}.")


@cache
def _read_plan_table(name: str) -> tuple[dict[str, str], ...]:
    with (_FOLDER / name).open(newline="", encoding="utf-8") as stream:
        return tuple(csv.DictReader(stream))


_IMAGE, _CLASSES = 224, 1000
_RESNET_DEPTHS = [3, 4, 6, 3]
_CLASSES_OF = {
    "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "mistral": "Mistral",
    "gemma": "Gemma", "phi3": "Phi3", "smollm3": "SmolLM3",
}  # fmt: skip
LEARNING_RATE = 1e-6  # weights hardly move over a row, so that every iteration sees the same kind of data


@dataclass
class BuiltModel:
    """A module on the device, and what for: rows of one model share it where they can."""

    module: Any
    model: str
    training: bool
    parameters: int


def build_model(spec: ModelRunSpec, torch: Any, device: str, dims: ModelDims | None = None) -> BuiltModel:
    """Build the module of a row with random weights; ``dims`` makes it smaller for a test."""
    config, kind = _make_config(dims or find_dims(spec.model), spec, _import_transformers())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(torch, spec.dtype))
    try:
        with torch.device(device):
            module = getattr(_import_transformers(), kind)(config)
    finally:
        torch.set_default_dtype(before)
    module = module.train() if spec.phase == "train" else module.eval()
    # looks at the tokens' values, for which the host would wait
    module.apply(lambda part: setattr(part, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None))
    return BuiltModel(module, spec.model, spec.phase == "train", sum(p.numel() for p in module.parameters()))


def fits_model(built: BuiltModel | None, spec: ModelRunSpec) -> bool:
    """Return whether a module built for another row can run this one: same model, same mode."""
    return built is not None and built.model == spec.model and built.training == (spec.phase == "train")


def make_iteration(
    built: BuiltModel, spec: ModelRunSpec, torch: Any, device: str, dims: ModelDims | None = None
) -> Callable[[], Any]:
    """Return one iteration of the row as a function that can be called any number of times."""
    dims = dims or find_dims(spec.model)
    module = built.module
    if dims.architecture != "resnet":  # every layer reads this at each call
        module.config._attn_implementation = "sdpa" if spec.attention == "flash" else "eager"
    if spec.phase == "train":
        return _make_training_step(module, _draw_inputs(spec, dims, torch, device), torch, device)
    given = _draw_inputs(spec, dims, torch, device)
    if spec.phase == "decode":
        return _make_decoding_step(module, given, spec, dims, torch, device)

    def forward() -> Any:
        with torch.no_grad():
            return module(**given)

    return forward


def _draw_inputs(spec: ModelRunSpec, dims: ModelDims, torch: Any, device: str) -> dict[str, Any]:
    """Return what the module is called with, drawn at random."""
    if dims.vision:
        shape = (spec.batch, 3, _IMAGE, _IMAGE)
        return {"pixel_values": torch.randn(shape, device=device).to(torch_dtype(torch, spec.dtype))}
    if spec.seq is None:
        raise bad_value(f"{spec.id}: seq", "a sequence length for a language model", None)
    length = 1 if spec.phase == "decode" else spec.seq
    tokens = torch.randint(1, dims.vocab, (spec.batch, length), device=device)
    if spec.phase == "train":
        given = {"input_ids": tokens, "labels": tokens.clone()}
        return given if dims.architecture == "bert" else {**given, "use_cache": False}
    if dims.architecture == "bert":
        return {"input_ids": tokens}
    return {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1}


def _make_training_step(module: Any, given: dict[str, Any], torch: Any, device: str) -> Callable[[], Any]:
    captured = str(device).startswith("cuda")
    optimiser = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True, capturable=captured)

    def step() -> Any:
        optimiser.zero_grad(set_to_none=True)
        loss = module(**given).loss
        loss.backward()
        optimiser.step()
        return loss

    return step


def _make_decoding_step(
    module: Any, given: dict[str, Any], spec: ModelRunSpec, dims: ModelDims, torch: Any, device: str
) -> Callable[[], Any]:
    """Return a step of one token behind a cache of ``seq``, which is as long as before after each step."""
    cache = _import_transformers().DynamicCache(config=module.config)
    shape = (spec.batch, dims.kv_heads, spec.seq, dims.head_dim)
    dtype = torch_dtype(torch, spec.dtype)
    for layer in range(dims.layers):
        cache.update(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), layer)
    full = [(layer.keys, layer.values) for layer in cache.layers]

    def step() -> Any:
        for layer, (keys, values) in zip(cache.layers, full, strict=True):
            layer.keys, layer.values = keys, values
        with torch.no_grad():
            return module(**given, past_key_values=cache)

    return step


def _make_config(dims: ModelDims, spec: ModelRunSpec, transformers: Any) -> tuple[Any, str]:
    """Return the configuration and the name of the class in transformers."""
    sizes = {
        "num_hidden_layers": dims.layers,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "intermediate_size": dims.intermediate,
    }
    match dims.architecture:
        case "gpt2":
            own = {"n_layer": dims.layers, "n_embd": dims.hidden, "n_head": dims.heads, "vocab_size": dims.vocab}
            return transformers.GPT2Config(**own, n_positions=dims.max_positions), "GPT2LMHeadModel"
        case "bert":
            config = transformers.BertConfig(vocab_size=dims.vocab, **sizes)
            return config, "BertForMaskedLM" if spec.phase == "train" else "BertModel"
        case "vit":
            return transformers.ViTConfig(image_size=_IMAGE, **sizes), "ViTModel"
        case "resnet":
            depths = _RESNET_DEPTHS if dims.layers == 50 else [1, 1, 1, 1]
            return transformers.ResNetConfig(depths=depths, num_labels=_CLASSES), "ResNetForImageClassification"
        case "opt":
            own = {"ffn_dim": dims.intermediate, "word_embed_proj_dim": dims.hidden, "vocab_size": dims.vocab}
            return transformers.OPTConfig(**sizes, **own), "OPTForCausalLM"
    name = _CLASSES_OF[dims.architecture]
    config = getattr(transformers, f"{name}Config")(
        **sizes,
        **({"head_dim": dims.head_dim} if name.startswith("Qwen3") else {}),
        **({"norm_topk_prob": True} if name == "Qwen3Moe" else {}),
        num_key_value_heads=dims.kv_heads,
        vocab_size=dims.vocab,
        max_position_embeddings=dims.max_positions,
        tie_word_embeddings=dims.tied,
        pad_token_id=None,
    )
    return config, f"{name}ForCausalLM"


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingTool(
            "measuring whole models needs transformers 5. Install it: pip install 'wattcast[torch]'."
        ) from None
    return transformers


WARM_UP = 3


class ModelDevice(TorchDevice):
    """A device that runs iterations of whole models. ``open`` starts it."""

    name = "cuda"

    @classmethod
    def open(cls) -> ModelDevice:
        """Open the first CUDA device, or raise an error that says what is missing."""
        torch = import_cuda_torch("measuring whole models")
        torch.manual_seed(0)
        return cls(torch)

    def warm(self, run: Callable[[], Any]) -> float:
        """Run a few iterations on the stream; seconds of the last, with whatever the host costs."""
        begin = end = self.mark()
        with self.on_stream():
            self.stream.wait_stream(self.torch.cuda.default_stream())
            for _ in range(WARM_UP):
                begin = self.mark()
                run()
                end = self.mark()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture one iteration as a CUDA graph and return what replays it."""
        graph = self.torch.cuda.CUDAGraph()
        with eager_settings(self.torch), self.torch.cuda.graph(graph, stream=self.stream):
            held = run()
        kept = [held]  # outputs live in the graph's pool as long as it may be replayed

        def replay() -> None:
            graph.replay()

        def drop() -> None:
            kept.clear()
            graph.reset()

        replay.drop = drop  # type: ignore[attr-defined]
        return replay

    def issue(self, run: Callable[[], Any], times: int) -> None:
        """Queue iterations on the stream; an eager iteration is launched by the host as it goes."""
        with self.on_stream():
            for _ in range(times):
                run()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Send the work inside to the stream that is timed."""
        with self.torch.cuda.stream(self.stream):
            yield

    def recover(self) -> None:
        """Give cached memory back, and count the most that is held from now on."""
        gc.collect()
        super().recover()
        self.torch.cuda.reset_peak_memory_stats()

    @property
    def peak_byte(self) -> int:
        """Most memory held since the last ``recover``."""
        return int(self.torch.cuda.max_memory_reserved())


@contextlib.contextmanager
def eager_settings(torch: Any) -> Iterator[None]:
    """Make Hugging Face choose what it does in an eager run on unpadded sequences, with scalars on the device."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    changed = [
        (import_utils, "is_cuda_stream_capturing", lambda: False),
        (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
        (torch, "tensor", _scalar_on_device(torch, torch.tensor)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed if hasattr(owner, name)]
    for owner, name, value in changed:
        if hasattr(owner, name):
            setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _scalar_on_device(torch: Any, tensor: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch.tensor`` that fills scalars on their device, since no capture allows copying them there."""

    def make(data: Any, *, device: Any = None, dtype: Any = None, **rest: Any) -> Any:
        if device is not None and isinstance(data, (bool, int, float)) and not rest:
            return torch.full((), data, device=device, dtype=dtype or tensor(data).dtype)
        return tensor(data, device=device, dtype=dtype, **rest)

    return make
