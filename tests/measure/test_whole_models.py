"""Whole models without a GPU: the plan says what the catalogue says, no captured iteration waits
for the GPU's answer, rows come out whole, and a model that fails costs only its rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
if find_spec("transformers") is None:  # a test that needs it imports it, which takes seconds
    pytest.skip("transformers is not installed", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode

from standin import StandIn
from wattcast.core.errors import UnknownName
from wattcast.core.measured_rows import ModelKernels, ModelRow, row_from_plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.row_tables import MODELS_FILE, read_table
from wattcast.lab.__main__ import main
from wattcast.lab.campaigns import database_files as packing
from wattcast.lab.campaigns import model_campaign as module
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.model_campaign import (
    ModelCampaign,
    ModelDevice,
    ModelDims,
    ModelRunSpec,
    choose_model_specs,
    eager_settings,
    find_dims,
    measure_step,
    profile_step,
    read_model_plan,
    total_kernels,
)
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule
from wattcast.workload import model_catalogue as catalogue
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import ModelOptions


def tiny(dims: ModelDims) -> ModelDims:
    """Two layers and small sizes, the architecture as it is."""
    if dims.architecture == "resnet":
        return replace(dims, layers=4)
    heads = 4 if dims.kv_heads == dims.heads else 8
    sizes = {
        "layers": 2,
        "hidden": 64,
        "heads": heads,
        "head_dim": 64 // heads,
        "intermediate": 128,
    }
    kv = heads if dims.kv_heads == dims.heads else 2
    return replace(dims, **sizes, kv_heads=kv, vocab=min(dims.vocab, 500))


@dataclass
class Moment:
    """An event of a device that does everything at once."""

    at_s: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.at_s - self.at_s)


class CpuDevice:
    """Same methods as ``Device``, on the host's processor."""

    name = "cpu"
    peak_byte = 1000

    def __init__(self) -> None:
        self.torch, self.captured, self.refuses = torch, 0, False

    def warm(self, run: Callable[[], Any]) -> float:
        began_s = time.monotonic()
        run()
        return time.monotonic() - began_s

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        return lambda: run()

    def issue(self, run: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            run()

    def mark(self) -> Moment:
        return Moment(time.monotonic())

    def synchronize(self) -> None:
        pass

    def recover(self) -> None:
        pass


@pytest.fixture
def bench(standin: StandIn) -> Iterator[OperatorBench]:
    with Sampler("nvml") as sampler:
        yield OperatorBench(CpuDevice(), sampler, "run-1", rule=SettlingRule(longest_s=3.0))


def read(path: Path) -> list[ModelRow]:
    return [row_from_plain(row, ModelRow) for row in read_lines(path)]


def test_the_plan_has_the_rows_it_promises() -> None:
    specs = read_model_plan()
    assert len(specs) >= 36
    assert len({spec.id for spec in specs}) == len(specs)
    assert {spec.phase for spec in specs} == {"prefill", "decode", "train", "forward"}
    assert {spec.attention for spec in specs} == {"flash", "eager"}
    assert len({spec.model for spec in specs}) >= 7
    assert [spec.tier for spec in specs] == sorted(spec.tier for spec in specs)
    assert sum(not spec.graph for spec in specs) >= 8  # what the host costs comes from these


@pytest.mark.parametrize(
    "name",
    sorted(row["model"] for row in read_shipped_table("wattcast.lab.campaigns", "models.csv")),
)
def test_dimensions_are_those_of_the_catalogue(name: str) -> None:
    dims, published = find_dims(name), catalogue.load_model(name).dims
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "intermediate",
        "vocab",
        "max_positions",
    ):
        if hasattr(published, field) and not (
            dims.architecture == "vit" and field in ("vocab", "max_positions")
        ):
            assert getattr(dims, field) == getattr(published, field), field
    if hasattr(published, "dim"):
        assert dims.head_dim == published.dim
    if hasattr(published, "tied"):
        assert dims.tied == published.tied
    if dims.architecture == "resnet":
        assert list(published.blocks) == module._RESNET_DEPTHS


@pytest.mark.parametrize("spec", read_model_plan(), ids=lambda spec: spec.id)
def test_every_row_is_a_workload_that_can_be_predicted(spec: ModelRunSpec) -> None:
    graph = build_graph(spec.model, ModelOptions(**spec.workload))
    assert graph.flop > 1e8
    assert graph.memory_byte < 120e9


KINDS = sorted(
    {
        (find_dims(s.model).architecture, s.phase, s.attention): s
        for s in reversed(read_model_plan())
    }.values(),
    key=lambda s: s.id,
)


class NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading a value, or copying from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ), func
        result = func(*args, **(kwargs or {}))
        moved = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if moved and isinstance(result, torch.Tensor) and result.device.type == "meta":
            sources = [a for a in args if isinstance(a, torch.Tensor) and a.numel()]
            assert all(a.device.type == "meta" for a in sources), f"{func} copies from the host"
        return result


@pytest.mark.parametrize(
    "spec",
    [
        spec if place % 3 == 0 else pytest.param(spec, marks=pytest.mark.slow)
        for place, spec in enumerate(KINDS)
    ],
    ids=lambda spec: spec.id,
)
def test_a_captured_iteration_never_waits_for_the_device(
    spec: ModelRunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = SimpleNamespace(zero_grad=lambda set_to_none: None, step=lambda: None)
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *_, **__: still
    )  # the fused one needs a real device
    dims = tiny(find_dims(spec.model))
    built = module.build_model(spec, torch, "meta", dims)
    small = replace(spec, batch=2, seq=16 if spec.seq else None)
    run = module.make_iteration(built, small, torch, "meta", dims)
    with eager_settings(torch), NoWaiting():
        run()


class FakeCuda:
    """The names of ``torch.cuda`` that ``Device`` uses; a stream that does everything at once."""

    def __init__(self) -> None:
        self.replayed = self.dropped = 0
        self.now_ms = 0.0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_ms = 0.0

            def record(self, stream: object) -> None:
                cuda.now_ms += 1.0
                self.at_ms = cuda.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, later: Event) -> float:
                return later.at_ms - self.at_ms

        class CUDAGraph:
            def replay(self) -> None:
                cuda.replayed += 1

            def reset(self) -> None:
                cuda.dropped += 1

        self.Event, self.CUDAGraph = Event, CUDAGraph
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.default_stream = lambda: None
        self.stream = lambda stream: contextlib.nullcontext()
        self.graph = lambda graph, stream: contextlib.nullcontext()
        self.synchronize = self.empty_cache = self.reset_peak_memory_stats = lambda: None
        self.max_memory_reserved = lambda: 4096


def test_the_device_captures_once_and_replays() -> None:
    cuda = FakeCuda()
    for name in vars(cuda):
        if name not in ("replayed", "dropped", "now_ms"):
            assert hasattr(torch.cuda, name), f"PyTorch has no torch.cuda.{name}"
    calls: list[int] = []
    device = ModelDevice(SimpleNamespace(cuda=cuda, tensor=torch.tensor, full=torch.full))
    assert device.warm(lambda: calls.append(1)) == pytest.approx(1e-3)
    load = device.capture(lambda: calls.append(1))
    ran = len(calls)
    device.issue(load, 5)
    assert cuda.replayed == 5
    assert len(calls) == ran  # nothing of Python runs again
    load.drop()
    device.recover()
    assert cuda.dropped == 1
    assert device.peak_byte == 4096


def test_patches_are_taken_back() -> None:
    before = torch.tensor
    with contextlib.suppress(RuntimeError), eager_settings(torch):
        assert float(torch.tensor(2.0, device="cpu", dtype=torch.float32)) == 2.0
        assert torch.tensor([1, 2]).shape == (2,)
        raise RuntimeError
    assert torch.tensor is before


def specs_of(model: str, *wanted: tuple[str, bool]) -> list[ModelRunSpec]:
    """Return rows in fp32, which a processor without instructions for bf16 computes a hundred times
    faster.
    """
    return [
        ModelRunSpec(
            model, phase, 2, None if phase == "forward" else 16, "flash", graph, dtype="fp32"
        )
        for phase, graph in wanted
    ]


def test_rows_hold_time_power_energy_and_the_workload(bench: OperatorBench, tmp_path: Path) -> None:
    campaign = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    measure_step(campaign, specs_of("qwen2-1.5b", ("prefill", True), ("decode", False)))
    prefill, decode = read(tmp_path / "models.jsonl")
    assert prefill.error == decode.error == ""
    assert prefill.power_w == pytest.approx(300.0, rel=0.01)
    assert prefill.energy_j == pytest.approx(prefill.power_w * prefill.latency_s)
    assert prefill.latency_s > 1e-4
    assert (prefill.graph, decode.graph) == (True, False)
    assert bench.gpu.captured == 1
    assert (prefill.head, prefill.stack, prefill.phase, prefill.seq) == (
        "last",
        "eager",
        "prefill",
        16,
    )
    assert prefill.parameters > 10_000


def test_training_changes_weights_and_decoding_keeps_its_cache() -> None:
    spec = ModelRunSpec("gpt2", "train", 2, 16)
    dims = tiny(find_dims("gpt2"))
    built = module.build_model(spec, torch, "cpu", dims)
    before = [p.detach().clone() for p in built.module.parameters()]
    step = module.make_iteration(built, spec, torch, "cpu", dims)
    step()
    changed = [
        not torch.equal(a, b) for a, b in zip(before, built.module.parameters(), strict=True)
    ]
    assert any(changed)
    decode = replace(spec, phase="decode")
    again = module.build_model(decode, torch, "cpu", dims)
    one = module.make_iteration(again, decode, torch, "cpu", dims)
    lengths = [one().past_key_values.get_seq_length() for _ in range(3)]
    assert lengths == [17, 17, 17]


def test_a_model_that_fails_costs_only_its_rows(
    bench: OperatorBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = module.build_model

    def failing(spec: ModelRunSpec, *rest: Any) -> Any:
        if spec.model == "bert-large":
            raise RuntimeError("CUDA out of memory")
        return build(spec, *rest)

    monkeypatch.setattr(module, "build_model", failing)
    wanted = [*specs_of("bert-large", ("prefill", True)), *specs_of("gpt2", ("prefill", True))]
    campaign = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    measure_step(campaign, wanted)
    failed, good = read(tmp_path / "models.jsonl")
    assert failed.error == "RuntimeError: CUDA out of memory"
    assert good.power_w == pytest.approx(300.0, rel=0.01)
    monkeypatch.setattr(module, "build_model", build)
    again = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    measure_step(again, wanted)
    assert again.counts == {"models": 1}  # only the failed row, a second time


def test_what_cannot_be_captured_is_measured_eagerly_and_says_so(
    bench: OperatorBench, tmp_path: Path
) -> None:
    bench.gpu.refuses = True
    campaign = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    measure_step(campaign, specs_of("vit-large", ("forward", True)))
    (row,) = read(tmp_path / "models.jsonl")
    assert row.graph is False
    assert any("not captured" in flag for flag in row.flags)
    assert row.latency_s > 0


def test_the_budget_ends_the_campaign(bench: OperatorBench, tmp_path: Path) -> None:
    campaign = ModelCampaign(bench, tmp_path, time.monotonic() + 1.0, cut=tiny)
    measure_step(campaign, specs_of("gpt2", ("prefill", True)))
    assert campaign.counts["models left for another call"] == 1
    assert not (tmp_path / "models.jsonl").exists()


def test_profiles_follow_in_the_time_that_is_left(
    bench: OperatorBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(device: Any, row_id: str, run: Callable[[], Any], name: str) -> ModelKernels:
        if "decode" in row_id:
            raise RuntimeError("CUPTI is busy")
        run()
        return ModelKernels(row_id, ("k",), (0, 0), (1e-6, 2e-6), run=name)

    monkeypatch.setattr(module, "profile_iteration", seen)
    campaign = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    wanted = specs_of("gpt2", ("decode", True), ("prefill", True))
    profile_step(campaign, wanted)
    failed, good = (
        row_from_plain(row, ModelKernels) for row in read_lines(tmp_path / "model_kernels.jsonl")
    )
    assert "CUPTI" in failed.error
    assert good.kernel_s == (1e-6, 2e-6)
    again = ModelCampaign(bench, tmp_path, time.monotonic() + 60, cut=tiny)
    profile_step(again, wanted)
    assert again.counts == {
        "model_kernels": 1,
        "model_kernels errors": 1,
    }  # only what failed is tried again


def test_packing_puts_models_in_their_own_table(tmp_path: Path) -> None:
    row = ModelRow(
        "a",
        "gpt2",
        "prefill",
        1,
        "bf16",
        "flash",
        "eager",
        True,
        seq=8,
        latency_s=1e-3,
        power_w=300.0,
    )
    Journal(tmp_path / "in" / "models.jsonl").append(row)
    trace = [
        {"cat": "kernel", "name": "k", "ts": 2, "dur": 3},
        {"cat": "kernel", "name": "j", "ts": 1, "dur": 4},
    ]
    Journal(tmp_path / "in" / "model_kernels.jsonl").append(total_kernels("a", trace, "run"))
    assert packing.pack_database([tmp_path / "in"], tmp_path / "out") == {
        "models": 1,
        "profiles": 1,
    }
    (back,) = read_table(tmp_path / "out" / MODELS_FILE)
    assert back["latency_s"] == 1e-3
    (kernels,) = read_table(tmp_path / "out" / "model_kernels.parquet")
    assert [kernels["names"][i] for i in kernels["order"]] == ["j", "k"]
    assert kernels["kernel_s"] == [4e-6, 3e-6]


def test_a_model_that_is_not_planned_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UnknownName, match="gpt2"):
        choose_model_specs("gpt3")
    assert len(choose_model_specs("gpt2", 2)) == 2
    assert {spec.tier for spec in choose_model_specs(tier=3)} == {3}
    with pytest.raises(UnknownName, match="1, 2, 3, 4"):
        choose_model_specs(tier=9)
    assert main(["models", "--out", str(tmp_path), "--steps", "sleep"]) == 2
    assert "step" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["models", "--out", str(tmp_path)]) == 4
    assert "CUDA" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "model", ["gpt2", "bert-large", "qwen2-1.5b", "llama3-8b", "qwen3-8b", "vit-large"]
)
def test_attention_is_switched_between_rows_of_one_module(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows share a module: the second must run its own attention, not that of the first."""
    functional, fused = torch.nn.functional, []
    real = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a, **k: fused.append(1) or real(*a, **k)
    )
    phase = "forward" if find_dims(model).vision else "prefill"
    dims = tiny(find_dims(model))
    built, calls = None, []
    for attention in ("flash", "eager", "flash"):
        spec = ModelRunSpec(model, phase, 2, None if phase == "forward" else 16, attention)
        built = built or module.build_model(spec, torch, "meta", dims)
        fused.clear()
        module.make_iteration(built, spec, torch, "meta", dims)()
        calls.append(len(fused))
    assert calls == [dims.layers, 0, dims.layers]


def test_a_capture_that_fails_leaves_a_generator_that_works() -> None:
    """Seen on an H200: one model that no graph holds, and random numbers of all later rows failed."""
    states: list[str] = []
    fresh = SimpleNamespace(graphsafe_get_state=lambda: "fresh")
    cuda = SimpleNamespace(
        CUDAGraph=object,
        graph=lambda *_, **__: contextlib.nullcontext(),
        current_device=lambda: 0,
        default_generators=[SimpleNamespace(graphsafe_set_state=states.append)],
    )
    device = object.__new__(ModelDevice)
    device.torch = SimpleNamespace(cuda=cuda, tensor=None, Generator=lambda _: fresh)
    device.stream = None
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 // 0)
    assert states == ["fresh"]
    assert device.capture(lambda: 1).outputs == 1
    assert states == ["fresh"]
