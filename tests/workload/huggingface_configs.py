"""Fifty configurations of the Hugging Face hub: the fields that decide their operators, and where
they were read.

Dimensions were read in public repositories that quote the files, or are the defaults of
transformers 5.22's configuration classes, which name the model they describe. ``published`` is the
number of weights that the makers give, in billions, as commonly quoted (written down from memory);
of models with pictures, the language part's."""

from __future__ import annotations

from typing import Any, NamedTuple


class CollectedConfig(NamedTuple):
    """A ``config.json``: its hub id, where its fields were read, and the published billions of
    weights (0: none).
    """

    id: str
    source: str
    published: float
    config: dict[str, Any]


_DEFAULTS = "defaults of transformers.{}"
_QUOTED = "config.json as quoted in {}"


def _sizes(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    """Return fields by the names that most configurations share."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocab,
        "max_position_embeddings": 32768, **more,
    }  # fmt: skip


def _by_default(id: str, published: float, name: str, config: dict[str, Any]) -> CollectedConfig:
    return CollectedConfig(id, _DEFAULTS.format(name), published, config)


def _quoted(id: str, published: float, repository: str, config: dict[str, Any]) -> CollectedConfig:
    return CollectedConfig(id, _QUOTED.format(repository), published, config)


_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
}  # fmt: skip
_KQI, _ARCHITECTURES = (
    "a benchmark of torchKQI",
    "a regression test of architectures (mlx-llm, candle-llm)",
)
_DUMP = "a dump of shapes and configurations of hub models"
_SCALED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0}

TAKEN = [
    _quoted(
        "meta-llama/Llama-2-7b-hf", 6.74, _KQI, _sizes("llama", 32, 4096, 32, 32, 11008, 32000)
    ),
    _quoted(
        "meta-llama/Meta-Llama-3-8B", 8.03, _KQI, _sizes("llama", 32, 4096, 32, 8, 14336, 128256)
    ),
    _quoted(
        "meta-llama/Llama-3.1-8B",
        8.03,
        _ARCHITECTURES,
        _sizes("llama", 32, 4096, 32, 8, 14336, 128256),
    ),
    _quoted(
        "meta-llama/Llama-3.2-3B",
        3.21,
        "a viewer of Llama 3.2's weights",
        _sizes("llama", 28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
    ),
    _quoted(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        1.71,
        _DUMP,
        _sizes("llama", 24, 2048, 32, 32, 8192, 49152, tie_word_embeddings=True),
    ),
    _by_default(
        "HuggingFaceTB/SmolLM3-3B",
        3.08,
        "SmolLM3Config",
        _sizes("smollm3", 36, 2048, 16, 4, 11008, 128256),
    ),
    _quoted(
        "Qwen/Qwen2-7B",
        7.62,
        _KQI,
        _sizes("qwen2", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=False),
    ),
    _quoted(
        "Qwen/Qwen2-72B",
        72.7,
        _KQI,
        _sizes("qwen2", 80, 8192, 64, 8, 29568, 152064, use_sliding_window=False),
    ),
    _quoted(
        "Qwen/Qwen2.5-3B-Instruct",
        3.09,
        "a model built on it",
        _sizes("qwen2", 36, 2048, 16, 2, 11008, 151936, tie_word_embeddings=True),
    ),
    _quoted(
        "Qwen/Qwen3-8B",
        8.19,
        _ARCHITECTURES,
        _sizes("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    ),
    _quoted(
        "Qwen/Qwen3-VL-8B-Instruct",
        8.19,
        _ARCHITECTURES,
        {
            "model_type": "qwen3_vl",
            "vision_config": {"depth": 27},
            "text_config": _sizes("qwen3_vl_text", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
        },
    ),
    _by_default(
        "Qwen/Qwen2.5-VL-72B-Instruct",
        72.7,
        "Qwen2_5_VLTextConfig",
        {
            "model_type": "qwen2_5_vl",
            "vision_config": {},
            "text_config": _sizes("qwen2_5_vl_text", 80, 8192, 64, 8, 29568, 152064),
        },
    ),
    _quoted(
        "Qwen/Qwen1.5-MoE-A2.7B",
        14.3,
        _ARCHITECTURES,
        _sizes(
            "qwen2_moe",
            24,
            2048,
            16,
            16,
            5632,
            151936,
            num_experts=60,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
    ),
    _by_default(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        80.0,
        "Qwen3NextConfig",
        _sizes(
            "qwen3_next",
            48,
            2048,
            16,
            2,
            5632,
            151936,
            head_dim=256,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts_per_tok=10,
            num_experts=512,
            norm_topk_prob=True,
        ),
    ),
    _quoted(
        "google/gemma-2-2b",
        2.61,
        _KQI,
        _sizes("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256, sliding_window=4096),
    ),
    _quoted(
        "google/gemma-2-9b",
        9.24,
        _KQI,
        _sizes("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256, sliding_window=4096),
    ),
    _quoted(
        "google/gemma-2-27b",
        27.2,
        "MaxText's conversion of checkpoints",
        _sizes("gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128, sliding_window=4096),
    ),
    _quoted(
        "google/gemma-3-4b-it",
        3.88,
        "a test of Gemma 3's loader",
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
    ),
    _quoted(
        "google/gemma-3-12b-it",
        11.8,
        "a text encoder of a video model",
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
        },
    ),
    _by_default(
        "openai/gpt-oss-120b",
        116.8,
        "GptOssConfig",
        _sizes(
            "gpt_oss",
            36,
            2880,
            64,
            8,
            2880,
            201088,
            head_dim=64,
            num_local_experts=128,
            num_experts_per_tok=4,
            sliding_window=128,
        ),
    ),
    _by_default(
        "meta-llama/Llama-4-Scout-17B-16E",
        109.0,
        "Llama4TextConfig",
        {
            "model_type": "llama4",
            "vision_config": {},
            "text_config": _sizes(
                "llama4_text",
                48,
                5120,
                40,
                8,
                8192,
                202048,
                head_dim=128,
                intermediate_size_mlp=16384,
                num_local_experts=16,
                num_experts_per_tok=1,
                interleave_moe_layer_step=1,
            ),
        },
    ),
    _quoted(
        "deepseek-ai/DeepSeek-V2-Lite",
        15.7,
        _ARCHITECTURES,
        _sizes(
            "deepseek_v2",
            27,
            2048,
            16,
            16,
            10944,
            102400,
            q_lora_rank=None,
            n_routed_experts=64,
            num_experts_per_tok=6,
            n_shared_experts=2,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            norm_topk_prob=False,
            **_LATENT,
        ),
    ),
    _quoted(
        "deepseek-ai/DeepSeek-V3",
        671.0,
        _DUMP,
        _sizes(
            "deepseek_v3",
            61,
            7168,
            128,
            128,
            18432,
            129280,
            q_lora_rank=1536,
            n_routed_experts=256,
            n_group=8,
            topk_group=4,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            norm_topk_prob=True,
            topk_method="noaux_tc",
            **_LATENT,
        ),
    ),
    _quoted(
        "moonshotai/Kimi-K2-Instruct",
        1000.0,
        "launch recipes of Miles and a loader of Kimi K2",
        _sizes(
            "kimi_k2",
            61,
            7168,
            64,
            64,
            18432,
            163840,
            q_lora_rank=1536,
            n_routed_experts=384,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            topk_method="noaux_tc",
            **_LATENT,
        ),
    ),
    _quoted(
        "THUDM/GLM-4-9B-0414",
        9.4,
        _ARCHITECTURES,
        _sizes(
            "glm4",
            40,
            4096,
            32,
            2,
            13696,
            151552,
            head_dim=128,
            partial_rotary_factor=0.5,
            attention_bias=True,
        ),
    ),
    _by_default(
        "zai-org/GLM-4.5-Air",
        106.0,
        "Glm4MoeConfig",
        _sizes(
            "glm4_moe",
            46,
            4096,
            96,
            8,
            10944,
            151552,
            head_dim=128,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            partial_rotary_factor=0.5,
        ),
    ),
    _quoted(
        "ibm-granite/granite-3.3-8b-instruct",
        8.17,
        _DUMP,
        _sizes("granite", 40, 4096, 32, 8, 12800, 49159, tie_word_embeddings=True, **_SCALED),
    ),
    _quoted(
        "ibm-granite/granite-4.0-h-small",
        32.0,
        "a guide to memory of hybrid models",
        _sizes(
            "granitemoehybrid",
            40,
            4096,
            32,
            8,
            768,
            100352,
            num_local_experts=72,
            num_experts_per_tok=10,
            shared_intermediate_size=1536,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_chunk_size=256,
            tie_word_embeddings=True,
            position_embedding_type="nope",
            layer_types=[*(["mamba"] * 9 + ["attention"]) * 4],
            **_SCALED,
        ),
    ),
    _by_default(
        "mistralai/Mamba-Codestral-7B-v0.1",
        7.29,
        "Mamba2Config",
        {
            "model_type": "mamba2",
            "num_heads": 128,
            "head_dim": 64,
            "vocab_size": 32768,
            "hidden_size": 4096,
            "state_size": 128,
            "num_hidden_layers": 64,
            "expand": 2,
            "conv_kernel": 4,
            "n_groups": 8,
            "chunk_size": 256,
        },
    ),
    _by_default(
        "a Falcon-H1 of transformers' defaults",
        0.0,
        "FalconH1Config",
        _sizes(
            "falcon_h1",
            32,
            4096,
            32,
            8,
            14336,
            128000,
            mamba_d_ssm=1024,
            mamba_n_heads=128,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_chunk_size=256,
            mamba_rms_norm=False,
        ),
    ),
    _by_default(
        "an OLMo 2 of transformers' defaults",
        0.0,
        "Olmo2Config",
        _sizes("olmo2", 32, 4096, 32, 32, 11008, 50304),
    ),
    _by_default(
        "CohereForAI/c4ai-command-r-v01",
        35.0,
        "CohereConfig",
        _sizes("cohere", 40, 8192, 64, 64, 22528, 256000, logit_scale=0.0625),
    ),
    _by_default(
        "a Cohere 2 of transformers' defaults",
        0.0,
        "Cohere2Config",
        _sizes(
            "cohere2",
            40,
            8192,
            64,
            64,
            22528,
            256000,
            logit_scale=0.0625,
            sliding_window=4096,
            head_dim=128,
        ),
    ),
    _by_default(
        "MiniMaxAI/MiniMax-M2",
        230.0,
        "MiniMaxM2Config",
        _sizes(
            "minimax_m2",
            62,
            3072,
            48,
            8,
            1536,
            200064,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
        ),
    ),
    _by_default(
        "a MiniMax of transformers' defaults",
        0.0,
        "MiniMaxConfig",
        _sizes(
            "minimax",
            32,
            4096,
            32,
            8,
            14336,
            32000,
            num_local_experts=8,
            num_experts_per_tok=2,
            block_size=256,
        ),
    ),
    _by_default(
        "baidu/ERNIE-4.5-0.3B-PT",
        0.36,
        "Ernie4_5Config",
        _sizes("ernie4_5", 18, 1024, 16, 2, 3072, 103424, head_dim=128),
    ),
    _by_default(
        "baidu/ERNIE-4.5-21B-A3B-PT",
        21.8,
        "Ernie4_5_MoeConfig",
        _sizes(
            "ernie4_5_moe",
            28,
            2560,
            20,
            4,
            12288,
            103424,
            moe_intermediate_size=1536,
            moe_k=6,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
        ),
    ),
    _by_default(
        "bigcode/starcoder2-3b",
        3.03,
        "Starcoder2Config",
        _sizes("starcoder2", 30, 3072, 24, 2, 12288, 49152),
    ),
    _by_default(
        "stabilityai/stablelm-3b-4e1t",
        2.8,
        "StableLmConfig",
        _sizes("stablelm", 32, 2560, 32, 32, 6912, 50304, partial_rotary_factor=0.25),
    ),
    _quoted(
        "internlm/internlm2-7b",
        7.74,
        "a test of InternLM 2's loader",
        _sizes("internlm2", 32, 4096, 32, 8, 14336, 92544, bias=False),
    ),
    _quoted(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        32.0,
        "TensorRT-LLM's tests",
        _sizes(
            "exaone4",
            64,
            5120,
            40,
            8,
            27392,
            102400,
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern=4,
        ),
    ),
    _quoted(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        23.6,
        "a text encoder of an image model",
        {
            "model_type": "mistral3",
            "vision_config": {},
            "text_config": _sizes(
                "mistral", 40, 5120, 32, 8, 32768, 131072, head_dim=128, sliding_window=None
            ),
        },
    ),
    _by_default(
        "microsoft/Phi-3.5-MoE-instruct",
        41.9,
        "PhimoeConfig",
        _sizes(
            "phimoe",
            32,
            4096,
            32,
            8,
            6400,
            32064,
            num_local_experts=16,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
        ),
    ),
    _by_default(
        "microsoft/Phi-3-mini-4k-instruct",
        3.82,
        "Phi3Config",
        _sizes("phi3", 32, 3072, 32, 32, 8192, 32064),
    ),
    _by_default(
        "EleutherAI/gpt-neox-20b",
        20.6,
        "GPTNeoXConfig",
        {
            **_sizes("gpt_neox", 44, 6144, 64, 64, 24576, 50432),
            "hidden_act": "gelu",
            "rotary_pct": 0.25,
        },
    ),
    _by_default(
        "ai21labs/Jamba-v0.1", 51.6, "JambaConfig", _sizes("jamba", 32, 4096, 32, 8, 14336, 65536)
    ),
    _quoted(
        "LiquidAI/LFM2-1.2B",
        1.17,
        "a test of a Rust port",
        _sizes(
            "lfm2",
            16,
            2048,
            32,
            8,
            8192,
            65536,
            block_ff_dim=12288,
            full_attn_idxs=[2, 5, 8, 10, 12, 14],
            block_auto_adjust_ff_dim=True,
            block_multiple_of=256,
            conv_L_cache=3,
            conv_bias=False,
        ),
    ),
    _quoted(
        "google-t5/t5-small",
        0.0605,
        _KQI,
        {
            "model_type": "t5",
            "d_model": 512,
            "num_layers": 6,
            "d_ff": 2048,
            "d_kv": 64,
            "num_heads": 8,
            "vocab_size": 32128,
            "n_positions": 512,
            "architectures": ["T5ForConditionalGeneration"],
        },
    ),
]
ENCODERS = [
    _by_default(
        "answerdotai/ModernBERT-base",
        0.149,
        "ModernBertConfig",
        _sizes("modernbert", 22, 768, 12, 12, 1152, 50368),
    ),
]

REFUSED = [  # and the word that the reason must have
    (
        _by_default(
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            30.0,
            "NemotronHConfig",
            _sizes(
                "nemotron_h",
                4,
                4096,
                32,
                8,
                21504,
                131072,
                hybrid_override_pattern="ME*-",
                mamba_num_heads=128,
                mamba_head_dim=64,
                ssm_state_size=128,
                n_groups=8,
                conv_kernel=4,
                chunk_size=128,
            ),
        ),
        "experts without a gate",
    ),
]
