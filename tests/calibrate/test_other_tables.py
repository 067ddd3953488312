"""Tables of AMD's tuner and of vLLM's layers, and rows of tables that say something else."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.calibrate.kernel_rows import ROW_NUMBERS, KernelRows
from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.table_fit import beside_s, fit_beside, start_bundle
from wattcast.calibrate.table_rows import TableRows, read_tables
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import RunCondition
from wattcast.workload.engine_operators import (
    BlockProduct,
    FusedExperts,
    PagedAttention,
    ScaledProduct,
)
from wattcast.workload.engine_row_operators import Quantize
from wattcast.workload.operator_types import Linear


def _write(path: Path, lines: list[str]) -> Path:
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    return path


def test_tuned_products_of_amd(tmp_path: Path) -> None:
    lines = ["b,M,N,K,format,preshuffled,out_dtype,bias,us,tflops,bw,source,libtype,splitK,kernel"]
    formats = ("bf16", "fp8", "fp8_block", "mxfp4", "int8")
    lines += [f"1,4096,2048,8192,{form},False,bfloat16,,250.5,1,1,t,,0,k" for form in formats]
    lines.append("16,32,1280,8192,bf16,False,bfloat16,,68.9,1,1,t,,0,k")
    table = read_tables([_write(tmp_path / "mi355x.gemm.csv.gz", lines)], load_gpu("mi355x"))
    np.testing.assert_allclose(table.rows.column("latency_s"), 250.5e-6)
    kinds = {(type(op), op.dtype) for op in table.rows.ops}
    assert kinds == {
        (Linear, Dtype.BF16),
        (ScaledProduct, Dtype.FP8),
        (BlockProduct, Dtype.FP8),
        (BlockProduct, Dtype.FP4),
        (ScaledProduct, Dtype.INT8),
    }
    assert all((op.m, op.n, op.k) == (4096, 2048, 8192) for op in table.rows.ops)  # type: ignore[attr-defined]
    assert table.beside == ((),) * 5  # nothing is quantised inside
    assert set(table.engine) == {"aiter"}
    assert any("batched" in note for note in table.notes)


def test_layers_of_vllm(tmp_path: Path) -> None:
    """Layers become products of the model's sizes, batches of attention groups of sequences."""
    layers = ["model,tp,layer,counts,tokens,activated_experts,time_us"]
    layers += [f"Llama-3.1-8B,1,{name},tokens,64,,100.0" for name in ("qkv_proj", "act_fn")]
    layers.append("Llama-3.1-8B,1,down_proj,tokens,64,,80.0")
    attention = ["model,tp,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    attention.append("Llama-3.1-8B,1,256,512,8,1024,55.0")
    _write(tmp_path / "rtx4090.layers.csv.gz", layers)
    _write(tmp_path / "rtx4090.attention.csv.gz", attention)
    table = read_tables([tmp_path], load_gpu("rtx-4090"))
    products = [op for op in table.rows.ops if isinstance(op, Linear)]
    assert {(op.m, op.n, op.k) for op in products} == {(64, 6144, 4096), (64, 4096, 14336)}
    (paged,) = [op for op in table.rows.ops if isinstance(op, PagedAttention)]
    assert paged.groups == ((1, 256, 768), (8, 1, 1025))
    assert (paged.heads, paged.kv_heads, paged.head_dim) == (32, 8, 128)


def test_host_bound_products_are_passed_over(tmp_path: Path) -> None:
    """GB200's fp8_block rows below 0.6 ms tell how fast the host is, whatever their size.

    Their tiny products took 0.25 to 0.58 ms; rows of 0.3 ms and more were fitted to, and products
    were 20 % off.
    """
    lines = ["kernel_source,gemm_dtype,m,n,k,latency"]
    lines += [f"DeepGemm,fp8_block,{m},128,512,{0.3 + 0.01 * m}" for m in range(1, 31)]
    lines += [f"DeepGemm,fp8_block,{m},65536,8192,{2.0 + 0.001 * m}" for m in range(4000, 4004)]
    path = tmp_path / "gb200.vllm-0.24.0.gemm.csv.gz"
    table = read_tables([_write(path, lines)], load_gpu("gb200"))
    assert sorted(op.m for op in table.rows.ops) == [4000, 4001, 4002, 4003]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("source", "count"), [("trtllm_mha", 1), ("triton", 0)])
def test_other_backends_of_sglang_are_passed_over(tmp_path: Path, source: str, count: int) -> None:
    """A table times one shape by several backends, four times apart; an engine takes one."""
    columns = "kernel_source,attn_dtype,kv_cache_dtype,batch_size,isl,num_heads,num_key_value_heads"
    lines = [f"{columns},head_dim,step,window_size,latency"]
    lines.append(f"{source},fp8,fp8,4,2048,32,8,128,0,0,0.2")
    lines.append("trtllm_mha,bfloat16,bfloat16,4,1024,32,8,128,0,0,0.1")
    path = tmp_path / "b200_sxm.sglang-0.5.14.context_attention.csv.gz"
    table = read_tables([_write(path, lines)], load_gpu("b200"), engine="sglang")
    assert len(table.rows) == 1 + count


def test_quantising_is_fitted_where_it_takes_most_of_the_time() -> None:
    """A B200's SGLang products of many tokens and few outputs were predicted to take up to three
    times as long as they do: quantising their input was the H200's, three launches a tensor.
    """
    chip = load_gpu("b200")
    start = start_bundle(chip)
    sizes = [(m, n, 4096 * k) for m in (4096, 8192, 16384) for n in (32, 64) for k in range(1, 9)]
    products = [ScaledProduct(m, n, k, "tensor", dtype=Dtype.FP8) for m, n, k in sizes]
    inputs = tuple((Quantize(m, k, "tensor", dtype=Dtype.BF16),) for m, _, k in sizes)
    rows = _make_rows(products)
    own_s = predict_with_bundle(start, rows, chip, 1.0)[:, 0]
    table = TableRows(rows, inputs, ("sglang",) * len(rows), ())
    quantising_s = 0.4 * beside_s(table, chip, start)
    timed = replace(rows, number={**rows.number, "latency_s": own_s + quantising_s})
    moved = fit_beside(replace(table, rows=timed), chip, start, start)
    np.testing.assert_allclose(beside_s(table, chip, moved), quantising_s, rtol=0.1)
    changed = {
        name for name in moved.corrections if moved.corrections[name] != start.corrections.get(name)
    }
    assert changed == {"elementwise.engine.rows.quantize.tensor"}


def _make_rows(ops: list[ScaledProduct]) -> KernelRows:
    count = len(ops)
    return KernelRows(
        kind=("burst",) * count,
        ops=tuple(ops),
        conditions=(RunCondition(rotated="weights"),) * count,
        data=("random",) * count,
        spec=("",) * count,
        repeat=np.zeros(count, dtype=np.int64),
        names=((),) * count,
        blocks=((),) * count,
        uuid=("",) * count,
        run=("",) * count,
        chosen=("plan",) * count,
        number={name: np.full(count, np.nan) for name in ROW_NUMBERS},
        fit=np.ones(count, dtype=bool),
        source="made up",
        card="b200",
    )


def _read_products(folder: Path, gpu: str, engine: str, form: str) -> TableRows:
    system = {"h200": "h200_sxm", "b200": "b200_sxm"}[gpu]
    lines = ["kernel_source,gemm_dtype,m,n,k,latency", f"deepgemm,{form},16,4096,4096,0.02"]
    path = folder / f"{system}.{engine}-1.0.0.gemm.csv.gz"
    return read_tables([_write(path, lines)], load_gpu(gpu), engine=engine)


@pytest.mark.parametrize(("engine", "beside"), [("sglang", 1), ("trtllm", 3)])
def test_tensorrt_llms_rows_look_for_the_scale_of_a_tensor(
    tmp_path: Path, engine: str, beside: int
) -> None:
    """Engines that serve know the scale: TensorRT-LLM's Llama in fp8 was predicted up to 42 % too
    slow on a B200.
    """
    (others,) = _read_products(tmp_path, "h200", engine, "fp8").beside
    assert len(others) == beside
    assert isinstance(others[0], Quantize)
    assert others[0].mode == "tensor"


def test_sglangs_rows_spread_scales_of_weights_on_blackwell(tmp_path: Path) -> None:
    """Its tiny products by block take 12 us on a B200, and 4 on an H200."""
    (on_hopper,) = _read_products(tmp_path, "h200", "sglang", "fp8_block").beside
    assert [type(op) for op in on_hopper] == [Quantize]
    (others,) = _read_products(tmp_path, "b200", "sglang", "fp8_block").beside
    assert len(others) == 5
    # 32 values of a row of 4096 weights, of four bytes, are spread and then packed
    assert sum(op.read_byte for op in others[1:]) == pytest.approx(2 * 4096 * 32 * 4, rel=0.1)


@pytest.mark.parametrize(
    ("source", "form", "hidden", "kernel"),
    [
        ("moe_torch_flow_min_latency", "nvfp4", 7168, "trtllm"),
        ("moe_torch_flow_cutlass", "nvfp4", 7168, "cutlass"),
        ("moe_torch_flow", "w4a16_mxfp4", 2880, "trtllm"),
        ("deepgemm", "fp8_block", 7168, "deepgemm"),
    ],
)
def test_libraries_of_tensorrt_llms_experts(
    tmp_path: Path, source: str, form: str, hidden: int, kernel: str
) -> None:
    """Experts in nvfp4 were not read at all, and a B200's were predicted 1.7 times too slow."""
    columns = "kernel_source,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts"
    lines = [f"{columns},moe_tp_size,moe_ep_size,distribution,latency"]
    lines.append(f"{source},{form},64,{hidden},2048,8,256,1,1,balanced,0.5")
    path = tmp_path / "b200_sxm.trtllm-1.3.0rc20.moe.csv.gz"
    table = read_tables([_write(path, lines)], load_gpu("b200"), engine="trtllm")
    (op,) = table.rows.ops
    assert isinstance(op, FusedExperts)
    assert op.kernel == kernel
    assert (op.dtype is Dtype.FP4) == (form == "nvfp4")
