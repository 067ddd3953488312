"""Denoisers against the modules of diffusers, cut to a few layers, on tensors without data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from comparing import moved_byte, split

torch = pytest.importorskip("torch", reason="PyTorch and transformers are needed")

from wattcast.workload import ModelOptions, build_graph, model_catalogue
from wattcast.workload.build_model import count_parameters
from wattcast.workload.graph import compute_totals
from wattcast.workload.readers.from_torch import capture

BATCH = 2
SMALL = {
    "sd1.5-unet": ({}, 16),
    "sdxl-unet": ({"depths": (0, 1, 2), "middle": 2}, 16),
    "sd3-medium": ({"layers": 3}, 32),
    "sd3.5-large": ({"layers": 3}, 32),
    "sd3.5-medium": ({"layers": 3, "dual_layers": 1}, 32),
    "flux.1-dev": ({"layers": 2, "single_layers": 2}, 16),
    "pixart-sigma": ({"layers": 2}, 32),
    "hunyuan-dit": ({"layers": 4}, 32),
    "cogvideox-2b": ({"layers": 2, "frames": 3, "image": 16, "columns": 24}, 16),
    "cogvideox1.5-5b": ({"layers": 2, "frames": 4, "image": 16, "columns": 24}, 16),
    "hunyuan-video": (
        {"layers": 2, "single_layers": 2, "frames": 3, "image": 16, "columns": 24},
        16,
    ),
    "wan2.1-1.3b": ({"layers": 2, "frames": 3, "image": 16, "columns": 24}, 16),
}


def make_unet(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    level = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in dims.depths]
    more = {}
    if dims.added:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "use_linear_projection": True,
        }
        more |= {"projection_class_embeddings_input_dim": dims.added}
    heads = dims.heads or tuple(width // dims.head_dim for width in dims.widths)
    module = UNet2DConditionModel(
        sample_size=image,
        block_out_channels=dims.widths,
        layers_per_block=dims.blocks,
        cross_attention_dim=dims.text_hidden,
        attention_head_dim=heads,
        down_block_types=level,
        up_block_types=[name.replace("Down", "Up") for name in reversed(level)],
        transformer_layers_per_block=(*(max(depth, 1) for depth in dims.depths[:-1]), dims.middle),
        **more,
    )
    given = {
        "sample": empty(BATCH, 4, image, image),
        "timestep": torch.empty(BATCH),
        "encoder_hidden_states": text,
    }
    if dims.added:
        given["added_cond_kwargs"] = {
            "text_embeds": empty(BATCH, dims.added - 1536),
            "time_ids": empty(BATCH, 6),
        }
    return module, given


def make_joint(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

    shared = {
        "num_layers": dims.layers,
        "attention_head_dim": dims.head_dim,
        "num_attention_heads": dims.heads,
        "joint_attention_dim": dims.text_hidden,
        "pooled_projection_dim": dims.pooled,
    }
    given = {
        "encoder_hidden_states": text,
        "pooled_projections": empty(BATCH, dims.pooled),
        "timestep": empty(BATCH),
    }
    if not dims.axes:
        norm = "rms_norm" if dims.normed else None
        width = dims.hidden
        module = SD3Transformer2DModel(
            sample_size=128, in_channels=dims.channels, caption_projection_dim=width, qk_norm=norm, **shared,
            pos_embed_max_size=192, dual_attention_layers=tuple(range(dims.dual_layers)),
        )  # fmt: skip
        return module, {"hidden_states": empty(BATCH, dims.channels, image, image), **given}
    module = FluxTransformer2DModel(
        in_channels=4 * dims.channels, num_single_layers=dims.single_layers, guidance_embeds=True, **shared,
        axes_dims_rope=dims.axes,
    )  # fmt: skip
    tokens = (image // dims.patch) ** 2
    given |= {
        "hidden_states": empty(BATCH, tokens, 4 * dims.channels),
        "guidance": torch.empty(BATCH),
    }
    return module, {"img_ids": empty(tokens, 3), "txt_ids": empty(dims.text_length, 3), **given}


def make_video(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        num_layers=dims.layers,
        num_attention_heads=dims.heads,
        attention_head_dim=dims.head_dim,
        ffn_dim=dims.intermediate,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    video = empty(BATCH, dims.channels, dims.frames, image, dims.columns)
    time = torch.empty(BATCH, dtype=torch.int64)
    return module, {"hidden_states": video, "encoder_hidden_states": text, "timestep": time}


def make_pixart(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import PixArtTransformer2DModel

    module = PixArtTransformer2DModel(
        num_layers=dims.layers,
        num_attention_heads=dims.heads,
        attention_head_dim=dims.hidden // dims.heads,
        cross_attention_dim=dims.hidden,
        caption_channels=dims.text_hidden,
        sample_size=image,
        use_additional_conditions=False,
    )
    return module, {
        "hidden_states": empty(BATCH, dims.channels, image, image),
        "encoder_hidden_states": text,
        "timestep": integers(BATCH),
        "encoder_attention_mask": integers(BATCH, dims.text_length),
    }


def make_hunyuan_dit(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import HunyuanDiT2DModel

    head_dim = dims.hidden // dims.heads
    module = HunyuanDiT2DModel(
        num_attention_heads=dims.heads,
        attention_head_dim=head_dim,
        in_channels=dims.channels,
        patch_size=dims.patch,
        sample_size=image,
        hidden_size=dims.hidden,
        num_layers=dims.layers,
        mlp_ratio=4.3637,
        use_style_cond_and_image_meta_size=False,
    )
    places = (image // dims.patch) ** 2
    table = torch.empty(places, head_dim, dtype=torch.float32)
    return module, {
        "hidden_states": empty(BATCH, dims.channels, image, image),
        "timestep": empty(BATCH),
        "encoder_hidden_states": text,
        "text_embedding_mask": integers(BATCH, dims.text_length),
        "encoder_hidden_states_t5": empty(BATCH, dims.second_length, dims.second_hidden),
        "text_embedding_mask_t5": integers(BATCH, dims.second_length),
        "image_rotary_emb": (table, table.clone()),
    }


def make_cogvideo(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import CogVideoXTransformer3DModel

    module = CogVideoXTransformer3DModel(
        num_layers=dims.layers,
        num_attention_heads=dims.heads,
        patch_size_t=dims.patch_frames if dims.patch_frames > 1 else None,
        use_rotary_positional_embeddings=dims.rotated,
        patch_bias=not dims.rotated,
        sample_width=dims.columns,
        sample_height=image,
        sample_frames=4 * dims.frames - 3,
    )
    given = {
        "hidden_states": empty(BATCH, dims.frames, dims.channels, image, dims.columns),
        "encoder_hidden_states": text,
        "timestep": integers(BATCH),
    }
    if dims.rotated:
        rows = dims.frames // dims.patch_frames * (image // 2) * (dims.columns // 2)
        table = torch.empty(rows, dims.head_dim, dtype=torch.float32)
        given["image_rotary_emb"] = (table, table.clone())
    return module, given


def make_hunyuan_video(dims: Any, image: int, text: Any) -> tuple[Any, dict[str, Any]]:
    from diffusers import HunyuanVideoTransformer3DModel

    module = HunyuanVideoTransformer3DModel(
        num_layers=dims.layers,
        num_single_layers=dims.single_layers,
        num_attention_heads=dims.heads,
    )
    # a patch of one frame: the convolution over time is one over pictures
    flat = torch.nn.Conv2d(dims.channels, dims.hidden, dims.patch, dims.patch)

    class PatchEmbed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = flat

        def forward(self, x: Any) -> Any:
            frames = x.transpose(1, 2).reshape(-1, dims.channels, *x.shape[3:])
            patches = self.proj(frames).view(BATCH, dims.frames, dims.hidden, -1)
            return patches.transpose(2, 3).reshape(BATCH, -1, dims.hidden)

    module.x_embedder = PatchEmbed()
    return module, {
        "hidden_states": empty(BATCH, dims.channels, dims.frames, image, dims.columns),
        "timestep": integers(BATCH),
        "encoder_hidden_states": text,
        "encoder_attention_mask": integers(BATCH, dims.text_length),
        "pooled_projections": empty(BATCH, dims.pooled),
        "guidance": empty(BATCH),
    }


def empty(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16)


def integers(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.int64)


# Operations of products, calls of large operators and calls of small ones in a pass of each cut
# model, as diffusers' modules run them (the slow test below).
COUNTED = {
    "sd1.5-unet": (91_693_916_160, 423, 415),
    "sdxl-unet": (109_043_712_000, 395, 339),
    "sd3-medium": (193_547_145_216, 62, 110),
    "sd3.5-large": (465_460_888_576, 62, 206),
    "sd3.5-medium": (204_044_439_552, 67, 227),
    "flux.1-dev": (1_103_499_362_304, 77, 215),
    "pixart-sigma": (54_394_159_104, 36, 59),
    "hunyuan-dit": (180_409_155_584, 97, 257),
    "cogvideox-2b": (197_517_500_416, 38, 82),
    "cogvideox1.5-5b": (399_433_203_712, 38, 116),
    "hunyuan-video": (1_264_890_937_344, 89, 382),
    "wan2.1-1.3b": (139_033_313_280, 46, 114),
}
MAKERS = {
    "unet": make_unet,
    "joint": make_joint,
    "video": make_video,
    "pixart": make_pixart,
    "hunyuan_dit": make_hunyuan_dit,
    "cogvideo": make_cogvideo,
    "hunyuan_video": make_hunyuan_video,
}


def cut_denoiser(name: str) -> tuple[Any, Any]:
    """Return a model cut to a few layers, and its graph."""
    model = model_catalogue.load_model(name)
    changes, image = SMALL[name]
    model = replace(model, dims=replace(model.dims, **changes))
    options = ModelOptions(phase="forward", batch=BATCH, image=8 * image, attention="flash")
    return model, build_graph(model, options)


@pytest.mark.parametrize("name", SMALL)
def test_operators_are_as_many_as_were_counted(name: str) -> None:
    _, graph = cut_denoiser(name)
    large, small = split(graph)
    flop = compute_totals(graph).product_flop_dense
    assert (flop, sum(large.values()), sum(small.values())) == COUNTED[name]


@pytest.mark.slow  # importing diffusers takes longer than all of it
@pytest.mark.parametrize("name", SMALL)
def test_operators_and_weights_are_those_of_the_module(name: str) -> None:
    pytest.importorskip("diffusers", reason="no diffusers: pip install 'wattcast[dev]'")
    model, graph = cut_denoiser(name)
    image = SMALL[name][1]
    with torch.device("meta"):
        text = empty(BATCH, model.dims.text_length, model.dims.text_hidden)
        module, given = MAKERS[model.architecture](model.dims, image, text)
        module = module.to(torch.bfloat16).eval()
    found = capture(module, given | {"return_dict": False})
    found, graph = (_leave_out_pooler(each) for each in (found, graph))
    assert not [line for line in found.assumptions if "has no rule" in line]
    large, small = split(found)
    ours, our_small = split(graph)
    assert ours == large, f"only diffusers: {large - ours}; only ours: {ours - large}"
    assert sum(our_small.values()) == pytest.approx(sum(small.values()), rel=0.05)
    assert moved_byte(our_small) == pytest.approx(moved_byte(small), rel=0.05)
    assert count_parameters(model) == sum(p.numel() for p in module.parameters())


def _leave_out_pooler(graph: Any) -> Any:
    """Return a graph without the pooler of HunyuanDiT's text, of one query, whose attention PyTorch
    runs operator by operator and we as one kernel.
    """
    blocks = []
    for block in graph.blocks:
        ops = tuple(op for op in block.ops if "pooler" not in op.label)
        blocks.append(replace(block, ops=ops))
    return replace(graph, blocks=tuple(blocks))
