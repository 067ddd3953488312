"""Text encoders and decoders of pictures against the modules of transformers and diffusers, cut to
a few layers, on tensors without data.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from comparing import moved_byte, split

torch = pytest.importorskip("torch", reason="PyTorch and transformers are needed")

from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.build_model import count_parameters
from wattcast.workload.graph import Graph, compute_totals
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.readers.from_torch import capture

BATCH = 2


def compare(ours: Graph, theirs: Graph) -> None:
    """Products, norms and attention are equal; elementwise work is within a fill."""
    large, small = split(theirs)
    our_large, our_small = split(ours)
    assert our_large == large, f"only theirs: {large - our_large}; ours: {our_large - large}"
    assert sum(our_small.values()) == sum(small.values())
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=1e-4)


@pytest.mark.parametrize("name", ["clip-l-text", "clip-l-projected", "openclip-bigg-text"])
def test_a_text_tower_is_that_of_transformers(name: str) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    model = load_model(name)
    dims = replace(model.dims, layers=2)
    with torch.device("meta"):
        config = CLIPTextConfig(
            vocab_size=dims.vocab,
            hidden_size=dims.hidden,
            intermediate_size=dims.intermediate,
            projection_dim=dims.projection or dims.hidden,
            num_hidden_layers=dims.layers,
            num_attention_heads=dims.heads,
            hidden_act=dims.activation,
            eos_token_id=2,
        )
        tower = CLIPTextModelWithProjection if dims.projection else CLIPTextModel
        module = tower(config).to(torch.bfloat16).eval()
        tokens = torch.empty(BATCH, 77, dtype=torch.int64)
    cut = replace(model, dims=dims)
    ours = build_graph(cut, ModelOptions(phase="forward", batch=BATCH, seq=77))
    compare(ours, capture(module, {"input_ids": tokens}))
    assert count_parameters(cut) == sum(p.numel() for p in module.parameters())


def test_the_encoder_of_umt5_is_that_of_transformers() -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    model = load_model("umt5-xxl-encoder")
    dims = replace(model.dims, layers=2)
    with torch.device("meta"):
        config = UMT5Config(
            vocab_size=dims.vocab,
            d_model=dims.hidden,
            d_kv=dims.head_dim,
            d_ff=dims.intermediate,
            num_layers=dims.layers,
            num_heads=dims.heads,
            feed_forward_proj="gated-gelu",
        )
        module = UMT5EncoderModel(config).to(torch.bfloat16).eval()
        tokens = torch.empty(BATCH, 64, dtype=torch.int64)
    cut = replace(model, dims=dims)
    ours = build_graph(cut, ModelOptions(phase="forward", batch=BATCH, seq=64))
    large, small = split(capture(module, {"input_ids": tokens}))
    our_large, our_small = split(ours)
    assert our_large == large
    assert sum(our_small.values()) == pytest.approx(sum(small.values()), rel=0.05)
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=0.05)
    assert count_parameters(cut) == sum(p.numel() for p in module.parameters())


# Operations of products, calls of large operators and of small ones at 256 by 256, as the modules
# of diffusers run them (the slow test below)
COUNTED = {
    "sd-vae-decoder": (1_244_374_564_864, 71, 108),
    "flux-vae-decoder": (1_244_600_991_744, 70, 107),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_decoder_is_as_large_as_was_counted(name: str) -> None:
    ours = build_graph(name, ModelOptions(batch=BATCH, image=256))
    large, small = split(ours)
    flop = compute_totals(ours).product_flop_dense
    assert (flop, sum(large.values()), sum(small.values())) == COUNTED[name]


@pytest.mark.slow  # importing diffusers takes longer than all of it
@pytest.mark.parametrize("name", COUNTED)
def test_a_decoder_is_that_of_diffusers(name: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="no diffusers: pip install 'wattcast[dev]'")
    dims = load_model(name).dims
    with torch.device("meta"):
        whole = diffusers.AutoencoderKL(
            block_out_channels=dims.widths,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            layers_per_block=dims.blocks,
            latent_channels=dims.channels,
            use_quant_conv=dims.mixed,
            use_post_quant_conv=dims.mixed,
        )

        class Decoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.whole = whole.to(torch.bfloat16)

            def forward(self, latent):
                return self.whole.decode(latent, return_dict=False)[0]

        latent = torch.empty(BATCH, dims.channels, 32, 32, dtype=torch.bfloat16)
        theirs = capture(Decoder().eval(), {"latent": latent})
    compare(build_graph(name, ModelOptions(batch=BATCH, image=256)), theirs)
    weights = sum(p.numel() for p in whole.decoder.parameters())
    if dims.mixed:
        weights += sum(p.numel() for p in whole.post_quant_conv.parameters())
    assert count_parameters(load_model(name)) == weights
