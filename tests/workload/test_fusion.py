"""Fusion: which operators join, what a fused kernel reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import wattcast
from wattcast.core.units import Dtype
from wattcast.workload import model_catalogue, tensor_functions
from wattcast.workload.model_catalogue import ModelKind
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.models import shared_layers
from wattcast.workload.models.segment_anything import SamDims
from wattcast.workload.operator_base import Operator
from wattcast.workload.program import PassSettings, fuse_entries
from wattcast.workload.readers.load_workload import load_workload
from wattcast.workload.symbolic_tensor import Tape, Tensor, fill

RUN = PassSettings(batch=2, length=8)


def fused(tape: Tape, *kept: Tensor) -> list[Operator]:
    return [entry.op for entry in fuse_entries(tape.entries, [t.storage for t in kept])]


def tensor(tape: Tape, *shape: int) -> Tensor:
    return tape.empty(shape, Dtype.BF16)


def test_a_chain_is_one_kernel_that_reads_and_writes_once() -> None:
    tape = Tape()
    x = tensor(tape, 64, 32)
    out = tensor_functions.activation("tanh", x * 2.0 + 1.0)
    (op,) = fused(tape, out)
    assert (op.read_byte, op.write_byte) == (x.byte, out.byte)
    assert op.name == "tanh"


def test_products_are_walls() -> None:
    tape = Tape()
    x, w = tensor(tape, 64, 32), tape.parameter(32, 32, dtype=Dtype.BF16)
    out = tensor_functions.linear(x * 2.0, w) + 1.0
    assert [op.name for op in fused(tape, out)] == ["scale", "linear", "shift"]


def test_a_spelled_out_norm_and_the_residual_before_it_are_one_row_kernel() -> None:
    tape = Tape()
    x, y = tensor(tape, 2, 8, 64), tensor(tape, 2, 8, 64)
    total = x + y
    out = shared_layers.rms_norm(RUN, total)
    (op,) = fused(tape, out, total)
    assert (op.name, op.rows, op.dim) == ("rmsnorm", 16, 64)
    assert op.read_byte == x.byte + y.byte + 64 * 2
    assert op.write_byte == 2 * x.byte


def test_gate_and_up_meet_in_one_kernel_after_both_products() -> None:
    tape = Tape()
    x = tensor(tape, 64, 32)
    gate = tensor_functions.activation("silu", shared_layers.project(RUN, x, 128))
    out = gate * shared_layers.project(RUN, x, 128)
    assert [op.name for op in fused(tape, out)] == ["linear", "linear", "silu_mul"]


def test_rotary_embedding_is_one_kernel() -> None:
    tape = Tape()
    x, cos, sin = tensor(tape, 2, 4, 8, 64), tensor(tape, 1, 1, 8, 64), tensor(tape, 1, 1, 8, 64)
    out = shared_layers.rotate(x, cos, sin)
    (op,) = fused(tape, out)
    assert op.name == "rotary"
    assert (op.read_byte, op.write_byte) == (x.byte + cos.byte + sin.byte, x.byte)


def test_what_nobody_reads_is_dropped_and_constants_are_folded() -> None:
    tape = Tape()
    x = tensor(tape, 64)
    x * 3.0  # dead
    out = x + fill(tape, (64,), Dtype.BF16)
    (op,) = fused(tape, out)
    assert op.name == "add"
    assert (op.read_byte, op.write_byte) == (x.byte, x.byte)


def test_gradients_are_kept_though_nobody_reads_them_here() -> None:
    tape = Tape()
    x = tensor(tape, 64)
    (x * 3.0) + 1.0
    assert fuse_entries(tape.entries) == []
    assert len(fuse_entries(tape.entries, keep_unread=True)) == 1


def test_a_lookup_fetches_rows_not_the_table() -> None:
    tape = Tape()
    table = tape.parameter(50_000, 64, dtype=Dtype.BF16)
    out = tensor_functions.embedding(table, (2, 8)) * 2.0
    (op,) = fused(tape, out)
    assert op.read_byte == 16 * 64 * 2 + 16 * 8


def test_a_cache_that_grows_is_copied_by_itself() -> None:
    """The rotary embedding of one new token was fused with the copy of a whole cache, and priced
    over all of it.
    """
    tape, run = Tape(), PassSettings(batch=2, length=1, past=64, cached=True)
    table = tensor(tape, 1, 1, 1, 32)
    key = shared_layers.rotate(tensor(tape, 2, 4, 1, 32), table, table)
    grown = shared_layers.append_cache(run, key)
    assert [(op.name, op.n) for op in fused(tape, grown)] == [
        ("rotary", 2 * 4 * 32),
        ("cat", 2 * 4 * 65 * 32),
    ]


LANGUAGE = [{"phase": phase, "batch": 8, "seq": 256} for phase in ("prefill", "decode", "train")]
PICTURES = [{"phase": phase, "batch": 8} for phase in ("forward", "train")]


def choose_architectures() -> list[str]:
    """Return one model of each architecture, of decoders one with experts as well."""
    chosen: dict[tuple[str, bool], str] = {}
    for name in model_catalogue.list_models():
        model = model_catalogue.load_model(name)
        chosen.setdefault((model.architecture, bool(getattr(model.dims, "experts", 0))), name)
    return list(chosen.values())


@pytest.mark.parametrize(
    ("gpu", "choose_models"),
    [
        ("h200", choose_architectures),
        pytest.param("h200", model_catalogue.list_models, marks=pytest.mark.slow),
        pytest.param("a100-sxm-80gb", model_catalogue.list_models, marks=pytest.mark.slow),
    ],
)
def test_compiled_is_never_slower_than_eager(
    gpu: str, choose_models: Callable[[], list[str]]
) -> None:
    """Decode of llama3-8b, batch 64 behind 4096 tokens, once took 42 ms compiled and 34 ms eager."""
    runs = [("llama3-8b", {"phase": "decode", "batch": 64, "seq": 4096})]
    for name in choose_models():
        model = model_catalogue.load_model(name)
        of = LANGUAGE if model.kind is ModelKind.LANGUAGE else PICTURES
        refused = any(getattr(model.dims, name, None) for name in ("state", "pooled"))  # gradients
        refused = refused or isinstance(model.dims, SamDims)
        runs += [(name, options) for options in of if not (refused and options["phase"] == "train")]
    eager, compiled = (
        [load_workload(name, ModelOptions.from_names(**o, stack=stack)) for name, o in runs]
        for stack in ("eager", "compiled")
    )
    found = [
        wattcast.predict_many(graphs, gpu, host_launch=0.0, force=True)
        for graphs in (eager, compiled)
    ]
    slower = [a.name for a, b in zip(*found, strict=True) if b.latency_s > a.latency_s * (1 + 1e-9)]
    assert slower == []
