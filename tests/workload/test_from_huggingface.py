"""Hugging Face configurations: the same graph as the catalogue's, and refusal of what we do not
know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wattcast.core.errors import BadInput, UnknownName
from wattcast.workload import ModelOptions, build_graph, model_catalogue
from wattcast.workload.build_model import compute_footprint
from wattcast.workload.readers import from_huggingface, load_workload
from wattcast.workload.readers.from_huggingface import convert_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_configuration_builds_the_catalogue_models_graph(tmp_path: Path) -> None:
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    options = ModelOptions(stack="eager", batch=2, seq=64)
    graph = load_workload.load_workload(folder / "config.json", options)
    ours = build_graph("llama3-8b", options)
    assert list(graph.calls()) == list(ours.calls())
    assert graph.name == "Meta-Llama-3-8B prefill b2 s64 bf16 eager"
    assert list(load_workload.load_workload(LLAMA, options).calls()) == list(ours.calls())


def test_configurations_written_by_transformers_read_as_our_catalogue(tmp_path: Path) -> None:
    """Every supported family, through the file that ``save_pretrained`` writes."""
    hugging_face = pytest.importorskip("hugging_face", reason="PyTorch and transformers are needed")
    names = [
        "gpt2",
        "opt-1.3b",
        "bert-large",
        "llama3-8b",
        "qwen2-7b",
        "qwen3-8b",
        "mistral-7b",
        "mixtral-8x7b",
    ]
    names += [
        "qwen3-30b-a3b",
        "gemma-7b",
        "phi-2",
        "phi-3-mini",
        "deepseek-v3",
        "vit-large",
        "whisper-small",
    ]
    for name in names:
        model = model_catalogue.load_model(name)
        config, kind = hugging_face._config(name, model.dims, "prefill")
        config.architectures = [kind]
        config.save_pretrained(tmp_path / name)
        read = load_workload.find_model(tmp_path / name / "config.json")
        seq = None if model.kind == "vision" else 64
        for phase in ("forward",) if model.kind == "vision" else ("prefill", "train"):
            options = ModelOptions(stack="eager", phase=phase, seq=seq, batch=2)
            assert list(build_graph(read, options).calls()) == list(
                build_graph(model, options).calls()
            ), (
                name,
                phase,
            )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llma"}, "Closest: llama"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM"),
        ({"model_type": None}, "(missing)"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "snake"}, "hidden_act"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 1 << 40}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_the_template_does_not_know_is_refused_by_name(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput) as error:
        from_huggingface.convert_config({**LLAMA, **change}, "config.json")
    assert says in str(error.value)
    assert "config.json" in str(error.value)


def test_remote_code_is_never_run_and_that_is_said() -> None:
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}}
    read = from_huggingface.convert_config({**LLAMA, **remote}, "config.json")
    assert "not run" in read.note
    assert any(
        "not run" in line
        for line in build_graph(read, ModelOptions(stack="eager", seq=8)).assumptions
    )
    with pytest.raises(BadInput, match="never run"):
        from_huggingface.convert_config({"model_type": "evil", **remote}, "config.json")


@pytest.mark.parametrize(
    "text", [b"{", b'{"model_type": "llama"', b"\xff\xfe", b'{"model_type": NaN}']
)
def test_a_broken_file_is_explained(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(BadInput, match=r"config\.json"):
        load_workload.load_workload(path, ModelOptions())


def test_ids_of_the_hub_are_catalogue_models_or_lie_in_the_cache(tmp_path, monkeypatch) -> None:
    known = load_workload.find_model("meta-llama/Llama-3.1-8B-Instruct")
    assert (known.name, known.dims.max_positions) == ("llama3-8b", 131072)
    assert load_workload.find_model("META-LLAMA/llama-3.1-8b-instruct") == known
    assert load_workload.find_model("llama3-8b").dims.max_positions == 8192
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--acme--Tiny-GPT" / "snapshots" / "0f3c"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 128}'
    )
    assert load_workload.find_model("acme/Tiny-GPT").name == "Tiny-GPT"
    assert load_workload.load_workload(str(snapshot), ModelOptions(seq=8)).tokens == 8
    with pytest.raises(UnknownName, match="hf download acme/Other"):
        load_workload.load_workload("acme/Other", ModelOptions())


@pytest.mark.parametrize(
    ("found", "recipe"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-8bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"type": "int", "num_bits": 8},
                        "input_activations": {"num_bits": 8},
                    }
                },
            },
            "w8a8",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": "gptq", "bits": 3}, None),
    ],
)
def test_a_quantization_config_chooses_the_recipe(
    found: dict[str, object], recipe: str | None
) -> None:
    model = convert_config(LLAMA | {"quantization_config": found})
    assert model.quantization == recipe
    wide, narrow = (
        compute_footprint(one, ModelOptions(phase="decode")).weight_byte
        for one in (convert_config(LLAMA), model)
    )
    assert (narrow < 0.7 * wide) == (recipe is not None)
    assert ("is not known" in model.note) == (recipe is None)
    eager = compute_footprint(model, ModelOptions(phase="decode", stack="eager")).weight_byte
    assert eager == wide


@pytest.mark.parametrize(
    ("scheme", "cache"),
    [({"type": "float", "num_bits": 8, "strategy": "tensor"}, "fp8"), ({"type": "int"}, None)],
)
def test_a_cache_scheme_sets_the_format_of_the_cache(
    scheme: dict[str, object], cache: str | None
) -> None:
    """A checkpoint with scales for an fp8 cache is served with one: half of the bytes that a token
    keeps.
    """
    groups = {
        "group_0": {
            "weights": {"type": "float", "num_bits": 8},
            "input_activations": {"num_bits": 8},
        }
    }
    found = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "kv_cache_scheme": scheme,
    }
    model = convert_config(LLAMA | {"quantization_config": found})
    assert (model.quantization, model.kv_dtype) == ("fp8", cache)
    assert ("kv_cache_scheme" in model.note) == (cache is None)
    asked = ({}, {"kv_dtype": "bf16"})
    published, wide = (
        compute_footprint(
            model, ModelOptions(phase="decode", batch=64, seq=4096, **more)
        ).cache_byte
        for more in asked
    )
    assert published == (0.5 if cache else 1.0) * wide
