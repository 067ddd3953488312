"""The update of the weights at the end of a training step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import wattcast
from wattcast.core.errors import BadInput
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.build_model import compute_footprint, count_parameters
from wattcast.workload.model_catalogue import load_model

STEP: dict[str, Any] = {"phase": "train", "stack": "eager", "batch": 2, "dtype": "fp16"}


def optimiser_bytes(update: str | None, **options: Any) -> float:
    """Return the bytes for each weight that an update of BERT moves."""
    asked = ModelOptions(**{**STEP, "seq": 64, "update": update, **options})
    (block,) = [one for one in build_graph("bert-base", asked).blocks if one.label == "optimiser"]
    moved = [(op.read_byte + op.write_byte) * op.count for op in block.ops]
    return sum(moved) / count_parameters(load_model("bert-base"))


def test_bytes_of_an_update_by_hand() -> None:
    """Fused AdamW in fp16 reads four and writes three values. With masters, gradients are cast
    (6 bytes), summed (4), clipped (8), used (28), and masters copied (6) and gradients cleared (2).
    Separate operators move 33 values.
    """
    assert optimiser_bytes("fused") == optimiser_bytes(None) == pytest.approx(7 * 2, rel=1e-3)
    assert optimiser_bytes("masters") == pytest.approx(54, rel=1e-3)
    assert optimiser_bytes("separate", dtype="fp32") == pytest.approx(33 * 4, rel=1e-3)


def test_every_tensor_is_updated_by_itself() -> None:
    asked = ModelOptions(phase="train", stack="eager", seq=64, dtype="fp32", update="separate")
    (block,) = [one for one in build_graph("bert-base", asked).blocks if one.label == "optimiser"]
    calls: Counter[str] = Counter()
    for op in block.ops:
        calls[op.name] += op.count
    tensors = calls["sqrt"]
    assert 150 < tensors < 250  # 12 layers of 16 tensors, embeddings and a head
    assert calls["scale"] == 6 * tensors


@pytest.mark.parametrize(("dtype", "is_wide"), [("fp16", True), ("bf16", False)])
def test_batch_norm_of_mixed_precision_runs_on_cudnn(dtype: str, is_wide: bool) -> None:
    """PyTorch gives cuDNN batch norms in fp16 whose weights are in fp32, and none in bf16.

    Its own kernels made ResNet-50 in mixed precision 44 % too slow on an A100.
    """
    names = {
        update: {
            op.name
            for op, _ in build_graph(
                "resnet50", ModelOptions(**{**STEP, "dtype": dtype, "update": update})
            ).calls()
        }
        for update in (None, "masters")
    }
    assert ("batchnorm_train_wide" in names["masters"]) is is_wide
    assert ("batchnorm_grad_wide" in names["masters"]) is is_wide
    assert "batchnorm_train_wide" not in names[None]
    if is_wide:
        shared: dict[str, Any] = {"phase": "train", "batch": 256, "dtype": dtype, "force": True}
        plain = wattcast.predict("resnet50", "a100-pcie-40gb", stack="eager", **shared)
        mixed = wattcast.predict(
            "resnet50", "a100-pcie-40gb", stack="eager", update="masters", **shared
        )
        assert mixed.latency_s < 0.9 * plain.latency_s


def test_masters_take_memory() -> None:
    """Masters, their gradients and both moments have four bytes each, for two moments of two."""
    plain, masters = (
        compute_footprint("bert-base", ModelOptions(**{**STEP, "seq": 64, "update": update}))
        for update in (None, "masters")
    )
    assert masters.optimiser_byte == 4 * plain.optimiser_byte


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"update": "masters", "phase": "prefill"}, "phase train"),
        ({"update": "masters", "phase": "train", "dtype": "fp32"}, "their own masters"),
        ({"update": "sometimes", "phase": "train"}, "fused"),
    ],
)
def test_an_update_that_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        ModelOptions(**options)
