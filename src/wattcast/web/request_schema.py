"""Define what may be asked over HTTP, as strict structs from which the OpenAPI schema is made.

No field names a file: models and GPUs are catalogue names, and an upload travels inside the
request."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from wattcast import hardware
from wattcast.core import Dtype, bad_value
from wattcast.core.strict_files import decode_json
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.hardware.node_systems import system_names
from wattcast.options.keywords import PriceKeywords
from wattcast.options.training_options import MINIMISE
from wattcast.report.figure_style import ENDINGS
from wattcast.report.prediction_figures import FIGURES
from wattcast.serving.arrivals import ARRIVAL_PROCESSES
from wattcast.serving.service_demand import PlanAim
from wattcast.timeseries.hall_file import DAY_SHAPES
from wattcast.workload import model_catalogue, model_options

MOST_BYTE = (
    2 << 20
)  # of a request; a configuration is a few kilobytes, an operator list some hundred
MOST_DEPTH = 32  # of an upload's nesting
MOST_ITEMS = 300_000  # brackets of an upload: entries it may hold
MOST_CONFIGURATIONS = 4
MOST_SIMULATED = 20_000  # requests of one simulation
PLAN_REQUESTS = 120  # simulated for each answer of a plan, a few seconds for one kind of GPU

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Gpus = Annotated[int, Meta(ge=1, le=4096)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Rate = Annotated[float, Meta(ge=1e-6, le=10_000)]
Hertz = Annotated[float, Meta(gt=0, le=1e10)]
Watts = Annotated[float, Meta(gt=0, le=1e5)]
Price = Annotated[float, Meta(ge=0, le=1e4)]


def _one_of(names: Any) -> Meta:
    return Meta(extra_json_schema={"enum": [str(name) for name in names]}, max_length=64)


GpuName = Annotated[str, _one_of([*hardware.gpu_names(), *list_boards()])]
NumberFormat = Annotated[str, _one_of(model_options.RUNNABLE_DTYPES)]


DATA = ("random", "zeros", "ones", "relu")


class Upload(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a config.json, a workload file, an EnergAIzer list or a profiler trace."""

    name: Annotated[str, Meta(max_length=120)]  # a label, never a path
    content: msgspec.Raw


class Workload(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every question has: a model or a file, and what a GPU hour and a kWh cost in US
    dollars.
    """

    model: Annotated[str, _one_of(model_catalogue.list_models())] | None = None
    file: Upload | None = None
    price_per_h: Price | None = None
    electricity_per_kwh: Price | None = None

    def prices(self) -> PriceKeywords:
        """Return the prices as ``parse_prices`` takes them."""
        rent = self.price_per_h
        tariff = self.electricity_per_kwh
        return {
            "price": None if rent is None else f"{rent}USD/h",
            "electricity": None if tariff is None else f"{tariff}USD/kWh",
        }


class Configuration(Workload, kw_only=True):
    """One workload on one GPU. Left out is the default; numbers are SI."""

    gpu: GpuName
    batch: Count = 1
    seq: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    tokens: Count | None = None
    phase: Annotated[str, _one_of(model_options.WorkloadPhase)] | None = None
    dtype: NumberFormat = str(Dtype.BF16)
    attention: Annotated[str, _one_of(model_options.AttentionMode)] = str(
        model_options.AttentionMode.FLASH
    )
    head: Annotated[str, _one_of(model_options.OutputHead)] | None = None
    stack: Annotated[str, _one_of(model_options.SoftwareStack)] | None = None
    tp: Gpus = 1
    pp: Gpus = 1
    dp: Gpus = 1
    ep: Gpus = 1
    cp: Gpus = 1
    skew: Annotated[float, Meta(ge=0, le=1)] = 0.0
    recompute: bool = False
    image: Annotated[int, Meta(ge=1, le=16384)] | None = None
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    quantization: Annotated[str, _one_of(model_options.RECIPES)] | None = None
    weights: Annotated[str, _one_of(model_options.WEIGHT_ONLY)] | None = None
    kv_dtype: Annotated[str, _one_of(model_options.KV_DTYPES)] | None = None
    lora: Annotated[int, Meta(ge=1, le=1024)] | None = None
    adapters: Annotated[int, Meta(ge=1, le=1024)] | None = None
    sampling: Annotated[str, _one_of(model_options.TokenSampling)] | None = None
    channels_last: bool = False
    update: Annotated[str, _one_of(model_options.WeightUpdate)] | None = None
    clock_hz: Hertz | None = None
    power_limit_w: Watts | None = None
    host_launch_s: Annotated[float, Meta(ge=0, le=1)] | None = None
    temperature_c: Annotated[float, Meta(ge=0, le=110)] | None = None
    duration_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    data: Annotated[str, _one_of(DATA)] = "random"

    def options(self) -> model_options.ModelOptions:
        """Return the options of the model."""
        served = [name for name in model_options.OPTION_NAMES if hasattr(self, name)]
        return model_options.ModelOptions(**{name: getattr(self, name) for name in served})


class ConfigurationList(msgspec.Struct, forbid_unknown_fields=True):
    """Up to four configurations, in order."""

    configurations: Annotated[
        list[Configuration], Meta(min_length=1, max_length=MOST_CONFIGURATIONS)
    ]


class FigureRequest(ConfigurationList):
    """One figure; only ``clocks`` draws more than the first configuration."""

    figure: Annotated[str, _one_of(FIGURES)] = "breakdown"
    format: Annotated[str, _one_of(ENDINGS)] = "svg"


class KernelRequest(Configuration, kw_only=True):
    """One operator of a configuration, by its number among the distinct ones in order of
    appearance.
    """

    kernel: Annotated[int, Meta(ge=1, le=100_000)] = 1


class ServingQuestion(Workload, kw_only=True):
    """What a plan and a simulation have in common: requests of so many tokens, and how long they
    may wait.
    """

    prompt: Tokens = 512
    output: Tokens = 128
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    dtype: NumberFormat = str(Dtype.BF16)
    weights: Annotated[str, _one_of(model_options.WEIGHT_ONLY)] | None = None
    kv_dtype: Annotated[str, _one_of(model_options.KV_DTYPES)] | None = None
    sampling: Annotated[str, _one_of(model_options.TokenSampling)] | None = None


class PlanRequest(ServingQuestion, kw_only=True):
    """How many GPUs serve a rate of requests within latency bounds, which hold for ``percentile``
    of them.
    """

    gpus: Annotated[list[GpuName], Meta(min_length=1, max_length=MOST_CONFIGURATIONS)]
    rate_per_s: Rate
    percentile: Annotated[float, Meta(ge=50, le=99.9)] = 99.0
    minimise: Annotated[str, _one_of(PlanAim)] = str(PlanAim.GPUS)
    headroom: Annotated[float, Meta(ge=0, le=2)] = 0.1
    site_power_w: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    pools: Annotated[str, Meta(max_length=40, pattern=r"^\d+:\d+(,\d+:\d+)*$")] | None = None


class SimulationRequest(ServingQuestion, kw_only=True):
    """A model under traffic, drawn at a rate or from the text of a trace file (CSV or JSON
    Lines).
    """

    gpu: GpuName
    rate_per_s: Rate | None = None
    seconds: Seconds = 120.0
    arrivals: Annotated[str, _one_of(ARRIVAL_PROCESSES)] = "poisson"
    trace_name: Annotated[str, Meta(max_length=120)] = "trace.csv"  # a label, never a path
    trace: str | None = None
    replicas: Annotated[int, Meta(ge=1, le=16)] = 1
    tp: Annotated[int, Meta(ge=1, le=64)] = 1
    concurrency: Annotated[int, Meta(ge=1, le=4096)] | None = None
    shared_prefix: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    prefix_hit_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    speculative_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    acceptance_rate: Annotated[float, Meta(ge=0, le=1)] = 0.7
    draft: Annotated[str, _one_of(model_catalogue.list_models())] | None = None
    clock_hz: Hertz | None = None
    power_limit_w: Watts | None = None


class TrainingRequest(Workload, kw_only=True):
    """A training job on so many GPUs; what is left out is chosen so that it fits and is fast."""

    gpu: GpuName
    gpus: Gpus = 8
    tokens: Annotated[float, Meta(gt=0, le=1e17)] = 1e9
    seq: Tokens | None = None
    precision: Annotated[str, _one_of(("bf16", "fp16", "fp32", "fp8", "nvfp4"))] = "bf16"
    lora: Annotated[int, Meta(ge=0, le=4096)] = 0
    clock_hz: Hertz | None = None
    power_limit_w: Watts | None = None
    minimise: Annotated[str, _one_of(MINIMISE)] = "time"


class HallRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Racks that serve, train and idle over a day; or a minute of it, ``around_s`` after
    midnight."""

    model: Annotated[str, _one_of(model_catalogue.list_models())]
    system: Annotated[str, _one_of(system_names())] = "dgx-h200"
    serving_racks: Annotated[int, Meta(ge=0, le=40)] = 12
    training_racks: Annotated[int, Meta(ge=0, le=40)] = 6
    idle_racks: Annotated[int, Meta(ge=0, le=40)] = 2
    # of one replica, mean over the day; some minutes of it are simulated
    rate_per_s: Annotated[float, Meta(ge=1e-3, le=30)] = 4.0
    tp: Annotated[int, Meta(ge=1, le=64)] = 1
    prompt: Tokens = 512
    output: Tokens = 128
    day: Annotated[str, _one_of(DAY_SHAPES)] = "office"
    limit_w: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    around_s: Annotated[float, Meta(ge=0, le=86400)] | None = None


def read_request(data: bytes, kind: type[Any]) -> Any:
    """Read a request's body, or raise an error that names the bad key."""
    if len(data) > MOST_BYTE:
        raise bad_value("request", f"at most {MOST_BYTE} bytes", f"{len(data)} bytes")
    return decode_json(data, kind, "request")


_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def check_nesting(content: bytes, where: str) -> None:
    """Refuse an upload that is nested too deeply or holds too much, before anything is built from
    it.
    """
    depth = opened = 0
    for bracket in _BRACKET.finditer(content):
        mark = bracket[0]
        if mark in (b"[", b"{"):
            depth += 1
            opened += 1
        elif mark in (b"]", b"}"):
            depth -= 1
        if depth > MOST_DEPTH:
            raise bad_value(where, f"at most {MOST_DEPTH} levels of nesting", "more")
        if opened > MOST_ITEMS:
            raise bad_value(where, f"at most {MOST_ITEMS} lists and objects", "more")
