"""Run ``measure models``: time, power and clock of whole models, a test set that is never used for
fitting.

``model_plan.csv`` lists the rows; ``models.csv`` has the published dimensions, so that a bare GPU
node needs no catalogue reader (a test compares both with ``workload/catalogue``). A tier is
measured whole before the next, and rows of one model lie together inside a tier, so that a model is
built once a tier, with random weights.

Each row is saved as soon as it is measured. Profiles of eager iterations come last, because the
profiler's hooks stay in the process; in them only shares of time count, since the clock is whatever
it happened to be."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.core.errors import (
    BadInput,
    bad_value,
    check_names,
    import_extra,
)
from wattcast.core.measured_rows import ModelKernels, ModelRow
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import read_lines
from wattcast.core.whole_files import hold_folder
from wattcast.lab.campaigns import campaign_engine
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.operator_calls import torch_dtype
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    SettlingRule,
    await_clock,
    format_now,
    hold_load,
    say,
)

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
        sizes = f"{self.model}-{self.phase}-b{self.batch}{size}"
        return f"model-{sizes}-{self.attention}-{self.dtype}-{run}"

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
        options = {
            "batch": self.batch,
            "seq": self.seq,
            "phase": self.phase,
            "dtype": self.dtype,
            "attention": self.attention,
            "head": self.head,
            "stack": "eager",
        }
        return {name: value for name, value in options.items() if value not in (None, "")}


@cache
def read_model_plan() -> tuple[ModelRunSpec, ...]:
    """Read every planned row, the most valuable first."""
    specs = []
    for row in read_shipped_table("wattcast.lab.campaigns", "model_plan.csv"):
        spec = ModelRunSpec(
            row["model"],
            row["phase"],
            int(row["batch"]),
            int(row["seq"]) if row["seq"] else None,
            row["attention"],
            row["run"] == "graph",
            int(row["tier"]),
        )
        specs.append(spec)
    return tuple(sorted(specs, key=lambda spec: spec.tier))


@cache
def find_dims(model: str) -> ModelDims:
    """Return the published dimensions of a planned model."""
    rows = {
        row.pop("model"): row for row in read_shipped_table("wattcast.lab.campaigns", "models.csv")
    }
    if model not in rows:
        raise BadInput(f"no dimensions of {model} in models.csv, which has {', '.join(rows)}.")
    numbers = {name: int(cell) for name, cell in rows[model].items() if cell.isdigit()}
    return ModelDims(
        model, rows[model]["architecture"], tied=rows[model]["tied"] == "yes", **numbers
    )


_TRANSFORMERS = (
    "measuring whole models needs transformers 5",
    "torch",
)  # why, and the extra that brings it
_IMAGE = 224
_RESNET_DEPTHS = [3, 4, 6, 3]
# weights hardly move over a row, so that every iteration sees the same kind of data
LEARNING_RATE = 1e-6


@dataclass
class BuiltModel:
    """A module on the device, and what for: rows of one model share it where they can."""

    module: Any
    model: str
    training: bool
    parameters: int


def build_model(
    spec: ModelRunSpec,
    torch: Any,
    device: str,
    dims: ModelDims | None = None,
) -> BuiltModel:
    """Build the module of a row with random weights, by ``model_classes.jsonl``; ``dims`` makes it
    smaller.
    """
    dims = dims or find_dims(spec.model)
    transformers = import_extra("transformers", *_TRANSFORMERS)
    lines = read_lines(Path(__file__).with_name("model_classes.jsonl"))
    model_class = next(line for line in lines if line["architecture"] == dims.architecture)
    sizes = {
        name: getattr(dims, size) for name, size in model_class["sizes"].items()
    } | model_class.get("fixed", {})
    if dims.architecture == "resnet":
        sizes["depths"] = _RESNET_DEPTHS if dims.layers == 50 else [1, 1, 1, 1]
    kind = (
        model_class["class"]
        if spec.phase != "train"
        else model_class.get("training_class") or model_class["class"]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(torch, spec.dtype))
    try:
        with torch.device(device):
            module = getattr(transformers, kind)(
                getattr(transformers, model_class["config"])(**sizes)
            )
    finally:
        torch.set_default_dtype(before)
    module = module.train() if spec.phase == "train" else module.eval()
    # looks at the tokens' values, for which the host would wait
    module.apply(
        lambda part: setattr(part, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None)
    )
    return BuiltModel(
        module, spec.model, spec.phase == "train", sum(p.numel() for p in module.parameters())
    )


def make_iteration(
    built: BuiltModel,
    spec: ModelRunSpec,
    torch: Any,
    device: str,
    dims: ModelDims | None = None,
) -> Callable[[], Any]:
    """Return one iteration of the row as a function that can be called any number of times.

    A decoding step adds one token to a cache of ``seq``, which is as long as before after each
    step."""
    dims = dims or find_dims(spec.model)
    module = built.module
    if dims.architecture != "resnet":  # every layer reads this at each call
        module.config._attn_implementation = "sdpa" if spec.attention == "flash" else "eager"
    inputs = _draw_inputs(spec, dims, torch, device)
    dtype = torch_dtype(torch, spec.dtype)
    if spec.phase == "train":
        captured = str(device).startswith("cuda")
        optimiser = torch.optim.AdamW(
            module.parameters(),
            lr=LEARNING_RATE,
            fused=True,
            capturable=captured,
        )

        def train() -> Any:
            optimiser.zero_grad(set_to_none=True)
            loss = module(**inputs).loss
            loss.backward()
            optimiser.step()
            return loss

        return train
    full: list[tuple[Any, Any]] = []
    if spec.phase == "decode":
        new_cache = import_extra("transformers", *_TRANSFORMERS).DynamicCache(config=module.config)
        inputs["past_key_values"] = cache = new_cache
        shape = (spec.batch, dims.kv_heads, spec.seq, dims.head_dim)
        for layer in range(dims.layers):
            cache.update(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), layer)
        full = [(layer.keys, layer.values) for layer in cache.layers]

    def forward() -> Any:
        for place, (keys, values) in enumerate(full):
            cache.layers[place].keys = keys
            cache.layers[place].values = values
        with torch.no_grad():
            return module(**inputs)

    return forward


def _draw_inputs(
    spec: ModelRunSpec,
    dims: ModelDims,
    torch: Any,
    device: str,
) -> dict[str, Any]:
    """Return what the module is called with, drawn at random."""
    if dims.vision:
        shape = (spec.batch, 3, _IMAGE, _IMAGE)
        return {
            "pixel_values": torch.randn(shape, device=device).to(torch_dtype(torch, spec.dtype))
        }
    if spec.seq is None:
        raise bad_value(f"{spec.id}: seq", "a sequence length for a language model", None)
    length = 1 if spec.phase == "decode" else spec.seq
    inputs = {"input_ids": torch.randint(1, dims.vocab, (spec.batch, length), device=device)}
    if spec.phase == "train":
        inputs["labels"] = inputs["input_ids"].clone()
    if dims.architecture == "bert":
        return inputs
    return inputs | (
        {"use_cache": False} if spec.phase == "train" else {"use_cache": True, "logits_to_keep": 1}
    )


WARM_UP = 3


@dataclass
class CapturedIteration:
    """An iteration as a CUDA graph; a call replays it."""

    graph: Any
    outputs: Any  # they live in the graph's pool as long as it may be replayed

    def __call__(self) -> None:
        self.graph.replay()

    def drop(self) -> None:
        """Give the graph's memory back."""
        self.outputs = None
        self.graph.reset()


class ModelDevice(campaign_engine.TorchDevice):
    """A device that runs iterations of whole models. ``open`` starts it."""

    name = "cuda"

    @classmethod
    def open(cls) -> ModelDevice:
        """Open the first CUDA device, or raise an error that says what is missing."""
        torch = campaign_engine.import_cuda_torch("measuring whole models")
        torch.manual_seed(0)
        return cls(torch)

    def warm(self, run: Callable[[], Any]) -> float:
        """Run a few iterations on the stream; seconds of the last, with whatever the host costs."""
        self.stream.wait_stream(self.torch.cuda.default_stream())
        return float(campaign_engine.time_calls(self, run, WARM_UP, warm=0)[-1])

    def capture(self, run: Callable[[], Any]) -> CapturedIteration:
        """Capture one iteration as a CUDA graph and return what replays it.

        A capture that fails leaves the random generator waiting for its end, so that a fresh state
        takes its place: without it every later row would fail."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        try:
            with eager_settings(torch), torch.cuda.graph(graph, stream=self.stream):
                return CapturedIteration(graph, run())
        except Exception:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(torch.Generator(self.name).graphsafe_get_state())
            raise

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
    """Make Hugging Face choose what it does in an eager run on unpadded sequences, with scalars on
    the device.
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    tensor = torch.tensor

    def fill_scalar(
        data: Any,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Any:
        """Fill scalars on their device, since no capture allows copying them there."""
        if device is not None and isinstance(data, (bool, int, float)) and not options:
            return torch.full((), data, device=device, dtype=dtype or tensor(data).dtype)
        return tensor(
            data,
            device=device,
            dtype=dtype,
            **options,
        )

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (import_utils, "is_cuda_stream_capturing", lambda: False),
        (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
        (torch, "tensor", fill_scalar),
    ]
    changes = [change for change in changes if hasattr(*change[:2])]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


LONGEST_NAME = 200


def profile_iteration(
    device: Any,
    row_id: str,
    run: Callable[[], Any],
    bench_run: str,
) -> ModelKernels:
    """Record names and durations of the kernels of one iteration."""
    torch = device.torch
    device.warm(run)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        device.issue(run, 1)
        device.synchronize()
    return total_kernels(row_id, campaign_engine.list_trace_events(profiler), bench_run)


DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")  # of events in a chrome trace


def total_kernels(
    row_id: str,
    events: Iterable[dict[str, Any]],
    run: str,
) -> ModelKernels:
    """List the kernels of a chrome trace in the order they started."""
    device_events = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    kernel_events = [event for event in device_events if "dur" in event]
    kernel_events.sort(key=lambda event: float(event["ts"]))
    names: dict[str, int] = {}
    order = []
    for event in kernel_events:
        name = str(event["name"])[:LONGEST_NAME]
        order.append(names.setdefault(name, len(names)))
    seconds = tuple(round(float(event["dur"]) * 1e-6, 9) for event in kernel_events)
    return ModelKernels(
        row_id,
        tuple(names),
        tuple(order),
        seconds,
        run=run,
        error="" if kernel_events else "no kernel seen",
    )


CHUNK_S = 0.020  # iterations are queued in chunks of about this length, a few ahead
LONGEST_BURST_S = 0.060  # the governor answers after about 90 ms
BURST_S = 0.020
REST_S = 0.05  # before a burst
CLIMB_S = 1.2  # to wait for the top clock
SETTLE = SettlingRule(longest_s=5.0)


def make_blank_model_row(bench: OperatorBench, spec: ModelRunSpec) -> ModelRow:
    """Return a row that names what is to be measured, with nothing measured yet."""
    fields = {name: getattr(spec, name) for name in ("id", "model", "graph")} | spec.workload
    return ModelRow(
        **fields,
        run=bench.run,
        date=format_now(),
    )


def measure_model(
    bench: OperatorBench,
    spec: ModelRunSpec,
    built: BuiltModel,
    run: Callable[[], Any],
) -> ModelRow:
    """Measure time, power and clock of one iteration, captured in a graph where asked and
    possible.
    """
    row = replace(make_blank_model_row(bench, spec), parameters=built.parameters)
    device = bench.gpu
    flags: tuple[str, ...] = ()
    once_s = device.warm(run)
    load = run
    if spec.graph:
        try:
            load = device.capture(run)
        except (
            Exception
        ) as error:  # an operation that no graph can hold: the row is still worth having
            device.synchronize()
            flags = (f"not captured: {type(error).__name__}: {error}"[:200],)
            row = replace(row, graph=False)
    try:
        device.issue(load, 1)  # then a burst, after a rest
        device.synchronize()
        time.sleep(REST_S)
        top_hz = bench.sampler.identity.top_clock_hz
        at_top = not top_hz or await_clock(bench.sampler, TOP_CLOCK_SHARE * top_hz, CLIMB_S)
        count = int(min(max(BURST_S / max(once_s, 1e-6), 2), 40))
        count = 1 if once_s * (count + 1) > LONGEST_BURST_S else count
        once_s = float(np.median(campaign_engine.time_calls(device, load, count)))
        burst_s = once_s if at_top and once_s * 2 <= LONGEST_BURST_S else None
        per_chunk = max(int(CHUNK_S / max(once_s, 1e-6)), 1)
        steady_load = hold_load(
            bench.sampler,
            device,
            lambda: device.issue(load, per_chunk),
            bench.rule,
            bench.spinner,
        )
    finally:
        if isinstance(load, CapturedIteration):
            load.drop()
    fields = steady_load.describe(per_chunk)
    fields |= {
        "flags": (*flags, *fields["flags"]),
        "energy_j": fields["power_w"] * fields["latency_s"],
    }
    fields |= {"iterations": per_chunk * steady_load.chunks, "peak_memory_byte": device.peak_byte}
    return replace(row, **fields, burst_latency_s=burst_s)


# time kept back for one more of each
ROW_S = 6.0
PROFILE_S = 4.0


@dataclass
class ModelCampaign(campaign_engine.Campaign):
    """One call of ``measure models``. ``cut`` makes a model small, for tests."""

    cut: Callable[[ModelDims], ModelDims] = field(default=lambda dims: dims)
    built: BuiltModel | None = None

    def prepared(self, spec: ModelRunSpec) -> tuple[BuiltModel, Callable[[], Any]]:
        """Return the module of a row, the one at hand where it serves, and one iteration of it."""
        device = self.bench.gpu
        dims = self.cut(find_dims(spec.model))
        built = self.built
        if not (built and built.model == spec.model and built.training == (spec.phase == "train")):
            self.recover()
            built = self.built = build_model(spec, device.torch, device.name, dims)
        return built, make_iteration(
            built,
            spec,
            device.torch,
            device.name,
            dims,
        )

    def recover(self) -> None:
        """Forget the module and give its memory back."""
        self.built = None
        super().recover()


def measure_step(campaign: ModelCampaign, specs: list[ModelRunSpec]) -> None:
    """Measure a row of every planned workload that is not on file yet."""
    bench = campaign.bench
    done = campaign.journal("models").ids

    def measure(spec: ModelRunSpec) -> ModelRow:
        return measure_model(bench, spec, *campaign.prepared(spec))

    for spec in campaign.within([s for s in specs if s.id not in done], ROW_S, "models", every=1):
        began_s = time.monotonic()
        row = campaign.record("models", make_blank_model_row(bench, spec), partial(measure, spec))
        assert row is not None
        power = f"{row.power_w:.0f} W" if row.power_w else "no power"
        outcome = (
            row.error or f"{1e3 * (row.latency_s or 0.0):.3f} ms, {power}, {len(row.flags)} flags"
        )
        say(f"  {spec.id}: {outcome} ({time.monotonic() - began_s:.1f} s)")
        bench.gpu.recover()
    campaign.recover()


def profile_step(campaign: ModelCampaign, specs: list[ModelRunSpec]) -> None:
    """Profile the kernels of each row's iteration, launched eagerly."""
    bench = campaign.bench
    done = campaign.journal("model_kernels").ids

    def profile(spec: ModelRunSpec) -> ModelKernels:
        return profile_iteration(bench.gpu, spec.id, campaign.prepared(spec)[1], bench.run)

    for spec in campaign.within(
        [s for s in specs if s.id not in done], PROFILE_S, "profile", every=1
    ):
        campaign.record(
            "model_kernels", ModelKernels(spec.id, run=bench.run), partial(profile, spec)
        )
        bench.gpu.recover()
    campaign.recover()


STEPS = {"models": measure_step, "profile": profile_step}


def run_models(
    out: Path,
    budget_s: float,
    steps: tuple[str, ...] = ("models", "profile"),
    only: str = "",
    few: int = 0,
    tier: int = 0,
) -> Counter[str]:
    """Measure the plan within ``budget_s``; ``only`` keeps one model, ``tier`` one tier, ``few`` so
    many rows.
    """
    check_names("step", steps, STEPS)
    specs = choose_model_specs(only, few, tier)
    began_s = time.monotonic()
    device = ModelDevice.open()
    with hold_folder(out), Sampler("nvml") as sampler:
        campaign = ModelCampaign(
            OperatorBench.open(device, sampler, out, rule=SETTLE), out, began_s + budget_s
        )
        say(f"ready after {time.monotonic() - began_s:.1f} s; {len(specs)} rows planned")
        for step in steps:
            STEPS[step](campaign, specs)
        return campaign.finish()


def choose_model_specs(
    only: str = "",
    few: int = 0,
    tier: int = 0,
) -> list[ModelRunSpec]:
    """Choose rows of the plan: all, those of one model or one tier, or the first few."""
    planned = list(dict.fromkeys(spec.model for spec in read_model_plan()))
    check_names("planned model", only or (), planned, f"Planned: {', '.join(planned)}.")
    tiers = sorted({str(spec.tier) for spec in read_model_plan()})
    check_names("tier", str(tier) if tier else (), tiers, f"Planned: {', '.join(tiers)}.")
    specs = [
        spec for spec in read_model_plan() if only in ("", spec.model) and tier in (0, spec.tier)
    ]
    return specs[:few] if few else specs
