"""The catalogue: every model loads, has its published number of weights, and answers to the names
people use.
"""

from __future__ import annotations

import pytest

import wattcast
from wattcast.core.errors import BadInput, UnknownName
from wattcast.workload import ModelOptions, build_graph, model_catalogue
from wattcast.workload.build_model import count_parameters
from wattcast.workload.model_catalogue import make_model, parse_model

# Weights of the published checkpoints, as commonly quoted; written down from memory, not looked up
# again, so a mismatch may be this table's. BERT and ViT without a task head, DiT without its fixed
# positions.
WEIGHTS = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "clip-base": 151_277_313,
    "clip-l-text": 123_060_480,
    "cogvideox-2b": 1_693_783_872,
    "cogvideox1.5-5b": 5_570_676_352,
    "clip-large": 427_616_513,
    "convnext-base": 88_591_464,
    "deepseek-v3": 671_026_419_200,
    "dit-xl-2": 674_834_720,
    "flux-vae-decoder": 49_545_475,
    "flux.1-dev": 11_901_408_320,
    "flux.1-schnell": 11_891_178_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "hunyuan-dit": 1_499_952_032,
    "hunyuan-video": 12_821_012_544,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mobilevit-s": 5_578_632,
    "openclip-bigg-text": 694_659_840,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "nemotron-h-8b": 8_100_852_736,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "pixart-sigma": 610_856_096,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-xxl-encoder": 4_762_310_656,
    "umt5-xxl-encoder": 5_680_910_336,
    "swin-tiny": 28_288_354,
    "swin-base": 87_768_224,
    "sd-vae-decoder": 49_490_199,
    "sd1.5-unet": 859_520_964,
    "sd3-medium": 2_028_328_000,
    "sd3.5-large": 8_056_627_520,
    "sdxl-unet": 2_567_463_684,
    "vit-base": 86_389_248,
    "vit-large": 304_351_232,
    "wan2.1-1.3b": 1_418_996_800,
    "whisper-small": 241_734_912,
    "whisper-large-v3": 1_543_490_560,
    "xlm-roberta-base": 278_043_648,
}
# Billions of weights that the makers publish, as commonly quoted (written down from memory), of the
# language part.
PUBLISHED = {
    "llama-3.1-405b": 405.9,
    "llama-3.2-3b": 3.21,
    "llama-4-scout": 109.0,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.7,
    "qwen3-235b-a22b": 235.0,
    "qwen3-next-80b-a3b": 80.0,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "kimi-k2": 1000.0,
    "deepseek-v2-lite": 15.7,
    "mistral-small-24b": 23.6,
    "mixtral-8x22b": 141.0,
    "phi-4": 14.7,
    "glm-4-9b": 9.4,
    "glm-4.5-air": 106.0,
    "minimax-m2": 230.0,
    "granite-3.3-8b": 8.17,
    "smollm3-3b": 3.08,
    "exaone-4.0-32b": 32.0,
    "mamba-codestral-7b": 7.29,
    "falcon-h1-7b": 7.59,
    "olmo-2-7b": 7.3,
    "olmo-2-13b": 13.7,
    "phi-4-multimodal": 3.8,
    "command-r7b": 8.03,
    "qwen2.5-vl-7b": 7.62,
    "xlm-roberta-large": 0.56,
}
PROMISED = (
    "bert-base bert-large gpt2 gpt2-medium gpt2-large gpt2-xl opt-1.3b opt-6.7b opt-30b qwen2-1.5b qwen2-7b qwen3-8b "
    "llama2-7b llama3-8b llama3-70b mistral-7b mixtral-8x7b vit-base vit-large resnet50 resnet101 mobilevit-s"
).split()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_model_has_its_published_number_of_weights(name: str) -> None:
    assert count_parameters(model_catalogue.load_model(name)) == WEIGHTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_about_its_published_weights(name: str) -> None:
    assert count_parameters(model_catalogue.load_model(name)) / 1e9 == pytest.approx(
        PUBLISHED[name], rel=0.03
    )


@pytest.mark.parametrize(
    ("said", "name", "positions"),
    [
        ("llama-3.1-8b", "llama3-8b", 131072),
        ("llama-3.1-70b", "llama3-70b", 131072),
        ("llama-3.3-70b", "llama3-70b", 131072),
        ("deepseek-r1", "deepseek-v3", 163840),
        ("openai/gpt-oss-120b", "gpt-oss-120b", 131072),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", 131072),
        ("falcon-h1", "falcon-h1-7b", 262144),
        ("nemotron-h", "nemotron-h-8b", 8192),
        ("xlm-roberta", "xlm-roberta-base", 514),
    ],
)
def test_common_checkpoints_have_names(said: str, name: str, positions: int) -> None:
    model = model_catalogue.load_model(said)
    assert (model.name, model.dims.max_positions) == (name, positions)


def test_roberta_counts_positions_from_two() -> None:
    """Its table of 514 positions holds 512 tokens; 513 were taken without a word."""
    said = [
        wattcast.predict("xlm-roberta", "h200", seq=seq, force=True).assumptions
        for seq in (512, 513)
    ]
    assert [
        "513 positions are more than the 512 this model was made for" in words for words in said
    ] == [False, True]


def test_all_promised_names_are_there_with_a_source() -> None:
    assert set(PROMISED) <= set(model_catalogue.list_models())
    for name in model_catalogue.list_models():
        model = model_catalogue.load_model(name)
        assert model.name == name
        assert "arXiv" in model.source or "config.json" in model.source


@pytest.mark.parametrize(
    "said", ["Llama3 8B", "LLAMA_3.8b", "meta-llama/Meta-Llama-3-8B", "llama-3-8b"]
)
def test_spelling_does_not_matter(said: str) -> None:
    assert model_catalogue.load_model(said).name == "llama3-8b"


def test_every_alias_leads_to_a_model_and_hides_none() -> None:
    from wattcast.core.errors import fold_name

    names = set(model_catalogue.list_models())
    assert {alias["name"] for alias in model_catalogue.load_aliases().values()} <= names
    folded = {fold_name(name) for name in names}
    assert len(folded) == len(names)
    clashes = {
        alias
        for alias, meant in model_catalogue.load_aliases().items()
        if fold_name(alias) in folded - {fold_name(meant["name"])}
    }
    assert clashes == set()


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match="llama3-8b") as error:
        model_catalogue.load_model("lama3-8b")
    assert "wattcast models" in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        (b"title: x\narchitecture: decodr\nsource: y\ndims: {}", "Closest: decoder"),
        (b"title: x\narchitecture: gpt\nsource: y\ndims: {layrs: 2}", "Closest: layers"),
        (
            b"title: x\narchitecture: gpt\nsource: y\ndims: {layers: 2}",
            "missing required field `hidden`",
        ),
        (b"title: x\narchitecture: gpt\ndims: {}", "missing required field `source`"),
        (b"title: x\narchitecture: resnet\nsource: y\ndims: {blocks: [3, a]}", "expected `int`"),
    ],
)
def test_a_bad_model_file_is_explained(yaml: bytes, says: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_model(yaml, "mine.yaml", "mine")
    assert says in str(error.value)
    assert "mine" in str(error.value)


def test_a_model_of_ones_own_builds() -> None:
    dims = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 100}
    graph = build_graph(
        make_model("mine", "Mine", "decoder", dims, "me"),
        ModelOptions(stack="eager", batch=2, seq=16),
    )
    assert graph.name == "mine prefill b2 s16 bf16 eager"
    assert graph.blocks[1].repeat == 3
    with pytest.raises(BadInput, match="from 0 to"):
        make_model("mine", "Mine", "decoder", dims | {"window": -1}, "me")
