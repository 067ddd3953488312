"""Compare training jobs with published throughput: tokens per second and GPU of configurations
others have run.

Overlaps of ``training.step_time`` were chosen with the rows of ``CHOSEN_WITH`` in view. The other
families were judged once unseen; what they showed missing was then added. Rows are left out, with a
reason, where the model, the GPU or the layout is unknown. Run: ``wattcast lab validate
--ablations`` in the repository (WATTCAST_REFERENCE names the measurements)."""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Iterator
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.core import files
from wattcast.core.errors import WattcastError
from wattcast.core.strict_files import decode_yaml
from wattcast.lab.validate.typed_commands import (
    JudgedRow,
    TypedCommand,
    answer_commands,
    make_file_name,
)
from wattcast.options.training_options import LOSSES
from wattcast.training.train_job import TrainingResult, train
from wattcast.training.training_coefficients import TRAINING
from wattcast.workload.model_catalogue import (
    ModelSpec,
    load_model,
    make_model,
)

CHOSEN_WITH = (
    "llmfoundry",
    "internevo",
    "torchtitan",
)  # families of rows that decided the stated overlaps
GPUS = {
    "A100-SXM-80GB": "a100-sxm-80gb",
    "A100-SXM-40GB": "a100-sxm-80gb",
    "H100-SXM-80GB": "h100-sxm",
    "H100-SXM-96GB-HBM2e-500W": "h100-sxm",
    "H200-SXM-141GB": "h200",
    "B200-SXM": "b200",
    "B300-SXM": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-4090": "rtx-4090",
    "RTX-A6000": "rtx-a6000",
}


@dataclass(frozen=True)
class TrainingComparison:
    """A published row beside its prediction, in tokens per second and GPU."""

    id: str
    family: str
    gpus: int
    measured: float
    predicted: float
    result: TrainingResult

    @property
    def error(self) -> float:
        """Prediction over measurement, less one."""
        return self.predicted / self.measured - 1.0


def read_training_rows(reference: Path) -> list[dict[str, str]]:
    """Read the published rows that state tokens per second and GPU, with the layouts that launch
    configurations add.
    """
    layouts = training_layouts()
    with open(reference / "training" / "rows.csv", newline="", encoding="utf-8") as file:
        return [
            {"interleave": "", **row, **layouts.get(row["id"], {})}
            for row in csv.DictReader(file)
            if row["tokens_per_s_per_gpu"]
        ]


@cache
def training_layouts() -> dict[str, dict[str, str]]:
    """Return what the launch configurations of MLPerf's submissions say of published rows."""
    text = Path(__file__).with_name("training_layouts.yaml").read_bytes()
    layouts = decode_yaml(text, dict[str, dict[str, str | int]], "layouts")
    return {
        name: {field: str(value) for field, value in layout.items() if field != "source"}
        for name, layout in layouts.items()
    }


def compare_training(
    reference: Path, families: tuple[str, ...] | None = None
) -> Iterator[TrainingComparison | str]:
    """Predict every published row; yields a sentence for a row that cannot be predicted."""
    for row in read_training_rows(reference):
        family = row["id"].split("-")[0]
        if families is not None and family not in families:
            continue
        try:
            result = predict_training_row(row)
        except (WattcastError, KeyError) as error:
            yield f"{row['id']}: {error}"
            continue
        yield TrainingComparison(
            row["id"],
            family,
            result.gpus,
            float(row["tokens_per_s_per_gpu"]),
            result.tokens_per_s / result.gpus,
            result,
        )


def predict_training_row(row: dict[str, str]) -> TrainingResult:
    """Predict a published row from its layout; what it does not state is chosen as for any job."""
    result: TrainingResult = answer_commands([ask_training_row(row)])[0]
    return result


def ask_training_row(row: dict[str, str]) -> TypedCommand:
    """Return the command that predicts a published row."""
    if not row["gpus"] or not row["seq"]:
        raise WattcastError("the row does not say how many GPUs or how long a sequence is")
    gpu, gpu_files = _find_gpu(row)
    model, model_files = _find_model(row)
    older = _before_2022(row)
    interleave = row["interleave"] or re.findall(r"VP (\d+)|$", row["notes"])[0]
    options: dict[str, Any] = {
        "gpu": gpu,
        "gpus": int(row["gpus"]),
        "tokens": "1B",
        "seq": int(float(row["seq"])),
        "global_batch": int(row["global_batch"]) if row["global_batch"] else None,
        "micro_batch": _micro_batch(row),
        "tp": int(row["tp"] or 0) or None,
        "pp": int(row["pp"] or 0) or None,
        "cp": int(row["cp"] or 1),
        "ep": int(row["ep"] or 1),
        "interleave": int(interleave or 1),
        "sequence_parallel": not older,
        "attention": "eager" if older or "no flash attention" in row["notes"] else "flash",
        "sharding": _find_sharding(row),
        "recompute": _recompute(row),
        "attention_slowdown": _attention_slowdown(row),
        **_recipe(row),
        "node": _OTHER_NODES.get(gpu),
        "network": _find_network(row),
        "force": True,
    }
    usual = {name: one.default for name, one in inspect.signature(train).parameters.items()}
    typed = {name: value for name, value in options.items() if value != usual[name]}
    return TypedCommand("train", model, typed, gpu_files | model_files)


def _micro_batch(row: dict[str, str]) -> int | None:
    if "micro_batch is the local batch" in row["notes"] and row["pp"] not in ("", "1"):
        return 1  # a pipeline splits the local batch
    return int(row["micro_batch"]) if row["micro_batch"] else None


def _find_sharding(row: dict[str, str]) -> str | None:
    """Return how replicas share their state; MLPerf's submissions with NeMo set
    ``USE_DIST_OPTIMIZER`` in their common configuration.
    """
    if _runs_nemo(row):
        return "zero1"
    layout = row["dp_or_fsdp"].lower()
    if "shard_grad_op" in layout or "zero2" in layout:
        return "zero2"
    if "fsdp" in layout or "full_shard" in layout or "zero3" in layout:
        return "zero3"
    if "zero1" in layout:
        return "zero1"
    if layout.startswith(("dp", "ddp")):
        return "none" if "ddp" in layout else "zero1"
    return None


def _find_network(row: dict[str, str]) -> str | None:
    """Return the bandwidth of a GPU's network, where a row states that of its node of eight."""
    roce = re.search(r"(\d+) x (\d+) Gb RoCE per node", row["notes"])
    pair = re.search(r"(\d+) / (\d+) Gbps network", row["notes"])  # of a node of A100, of H100
    if roce:
        return f"{int(roce[1]) * int(roce[2]) / 8 / 8}GB/s"
    if row["id"].startswith("bigscience"):
        return "6.25GB/s"  # four Omni-Path links of 100 Gb/s a node [BigScience2022]
    if pair:
        return f"{int(pair[2 if 'H100' in row['gpu'] else 1]) / 8 / 8}GB/s"
    return None


def _before_2022(row: dict[str, str]) -> bool:
    """Tell whether a run is older than flash attention and sequence parallelism, both published in
    May 2022.
    """
    return row["id"].startswith(("bigscience", "megatronlm-2021"))


def _attention_slowdown(row: dict[str, str]) -> float:
    """Return how much slower a run's attention was than today's, by what its framework used at the
    time.

    FlashAttention-3 is 1.5 to 2 times as fast on Hopper as FlashAttention-2 [Shah2024], which
    PyTorch runs had. The value for runs older than FlashAttention-2 (July 2023) was set with
    llm-foundry's rows in view."""
    early = 1.4 if row["id"].startswith(("llmfoundry", "internevo", "paper")) else 1.0
    pytorch = row["id"].startswith(
        ("llmfoundry", "fmsfsdp", "torchtitan", "paper", "fsdpqlora", "torchtune")
    )
    pytorch |= _runs_reference_code(row)
    return early * (1.8 if pytorch and row["gpu"].startswith(("H100", "H200")) else 1.0)


def _find_gpu(row: dict[str, str]) -> tuple[str, dict[str, bytes]]:
    """Return the name of a row's GPU, or a file of one that the catalogue has with other memory."""
    if row["gpu"] not in GPUS:
        raise WattcastError(f"no GPU of the catalogue is the {row['gpu']}")
    name = GPUS[row["gpu"]]
    for start, file, changes in _OTHER_BOARDS:
        if row["gpu"].startswith(start):
            text = files("wattcast.hardware").joinpath(f"catalogue/{name}.yaml").read_text()
            for before, after in changes.items():
                assert text.count(before) == 1, f"{before} in {name}.yaml"
                text = text.replace(before, after)
            return file, {file: text.encode()}
    return name, {}


_OTHER_BOARDS = (
    (
        "A100-SXM-40GB",
        "a100-sxm-40gb.yaml",
        {
            "capacity: {value: 80 GB,": "capacity: {value: 40 GB,",
            "{value: 2039 GB/s,": "{value: 1555 GB/s,",
        },
    ),
    (
        "H100-SXM-96GB",
        "h100-sxm-96gb.yaml",
        {
            "capacity: {value: 80 GB,": "capacity: {value: 96 GB,",
            "{value: 3352 GB/s,": "{value: 2400 GB/s,",
            "  limit: {value: 700 W,": "  limit: {value: 500 W,",
        },
    ),
)


_OTHER_NODES = {"a100-sxm-40gb.yaml": "dgx-a100", "h100-sxm-96gb.yaml": "hgx-h100"}


def _find_model(row: dict[str, str]) -> tuple[str, dict[str, bytes]]:
    """Return the name of a row's model, or a file with its sizes where the catalogue does not have
    it.
    """
    name = row["model"].removesuffix("-lora")
    table = training_models()
    if (
        name == "deepseek-v3" and "w/o MTP" not in row["notes"]
    ):  # one more layer predicts the token after the next
        spec = load_model(name)
        return _write_sizes(replace(spec, dims=replace(spec.dims, layers=spec.dims.layers + 1)))
    if name in table:
        return _write_sizes(table[name])
    sizes = {
        key: re.search(rf"{key} (\d+)", row["notes"])
        for key in ("hidden", "layers", "heads", "vocabulary")
    }
    if sizes["hidden"] and sizes["layers"]:
        hidden = int(sizes["hidden"][1])
        layers = int(sizes["layers"][1])
        heads = int(sizes["heads"][1]) if sizes["heads"] else max(hidden // 128, 1)
        vocab = int(sizes["vocabulary"][1]) if sizes["vocabulary"] else 51200
        dims = {
            "kind": "gpt",
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "vocab": vocab,
        }
        return _write_sizes(_make(f"{name}-{layers}x{hidden}", dims))
    return load_model(name).name, {}


def _write_sizes(spec: ModelSpec) -> tuple[str, dict[str, bytes]]:
    """Return a file of a model's sizes, as `predict` and `train` read it."""
    file = make_file_name(spec.name, "json")
    dims = {item.name: getattr(spec.dims, item.name) for item in fields(spec.dims)}
    plain = {
        "name": spec.name,
        "architecture": spec.architecture,
        "dims": dims,
    }
    return file, {file: msgspec.json.format(msgspec.json.encode(plain), indent=1)}


@cache
def training_models() -> dict[str, ModelSpec]:
    """Return the models of the rows that are not in the catalogue."""
    text = Path(__file__).with_name("training_models.yaml").read_bytes()
    return {
        name: _make(name, dims)
        for name, dims in decode_yaml(text, dict[str, dict[str, Any]], "models").items()
    }


def _make(name: str, dimensions: dict[str, Any]) -> ModelSpec:
    dims = dict(dimensions)
    kind = dims.pop("kind")
    source = "published training rows"
    if kind == "llama":
        return make_model(
            name,
            name,
            "decoder",
            {"max_positions": 1 << 20, **dims},
            source,
        )
    sizes = {
        "intermediate": 4 * dims["hidden"],
        "max_positions": 8192,
        "dropout": 0.0,
        "vocab": 50368,
        **dims,
    }
    if kind == "mpt":  # no positions table, no biases
        sizes = {
            "kv_heads": dims["heads"], "norm": "layer", "gated": False,
            "activation": "gelu", "tied": True,
            "rotary_share": 0.0, **sizes,
        }  # fmt: skip
        return make_model(
            name,
            name,
            "decoder",
            {**sizes, "max_positions": 1 << 20},
            source,
        )
    return make_model(
        name,
        name,
        "gpt",
        {
            **sizes,
            "style": "opt",
            "activation": "gelu",
        },
        source,
    )


def _recompute(row: dict[str, str]) -> str | None:
    """Return how much a run computes again, where it or its recipe says so.

    Megatron-Bridge's recipes of Llama and Qwen3 recompute nothing: where activations do not fit,
    layers of them wait in the host's memory. The others recompute an activation or an
    up-projection, from 26.06 on nothing [NVIDIA-NeMo/ Megatron-Bridge, scripts/performance/configs:
    ``cpu_offloading_num_layers``, ``recompute_modules``]. MLPerf's LoRA with NeMo has
    ``activations_checkpoint_granularity: null``."""
    word = row["recompute"]
    if not word and _runs_reference_code(row):
        return "full"
    if not word and _runs_nemo(row) and _uses_lora(row):
        return "none"
    if not word and row["id"].startswith("mbridge"):
        plain = row["model"].startswith(("llama", "qwen3")) or _is_newest(row)
        plain |= row["model"].startswith("gpt-oss") and row["gpu"].startswith(("GB300", "B300"))
        return "none" if plain else "selective"
    if not word:
        return None
    return word.split()[0] if word.split()[0] in ("none", "selective", "full") else "selective"


def _is_newest(row: dict[str, str]) -> bool:
    """Tell whether a run is of Megatron-Bridge's releases whose experts run in one CUDA graph, on
    Blackwell.
    """
    return re.search(r"NeMo container 26\.(06|08)", row["notes"]) is not None


def _expert_kernels(
    row: dict[str, str],
    newest: bool,
    graphs: bool,
) -> str:
    """Return how a run's experts are multiplied.

    ``cutedsl_fused_grouped_mlp`` came with 26.06; Megatron's TEGroupedMLP says that it is for
    SwiGLU alone. One CUDA graph of a step needs counts of rows on the GPU, so a kernel of all
    experts; before, each had its own product."""
    if newest and not row["model"].startswith("gpt-oss"):
        return "fused"
    return "separate" if row["id"].startswith("mbridge") and not (newest and graphs) else "grouped"


def _hides_exchanges(row: dict[str, str]) -> bool:
    """Tell whether a recipe of Megatron-Bridge from before 26.06 sets ``moe_a2a_overlap``."""
    chosen = {("qwen3-235b-a22b", "H100-SXM-80GB"), ("gpt-oss-120b", "GB200")}
    wide = row["model"] == "deepseek-v3" and row["gpu"] == "B200-SXM" and row["ep"] == "32"
    return row["id"].startswith("mbridge-26") and ((row["model"], row["gpu"]) in chosen or wide)


def _sends_copies(row: dict[str, str]) -> bool:
    """Tell whether tokens travel by NCCL's all-to-all: where a recipe of Megatron-Bridge names no
    other dispatcher.

    Dropping tokens needs it (``apply_moe_token_drop``).
    """
    if _is_newest(row) or "token drop" in row["notes"]:
        return "token drop" in row["notes"]
    by_gpu = {"gpt-oss": ("B200", "GB", "H100"), "qwen3-235b": ("B", "H100")}
    return any(
        row["model"].startswith(name) and row["gpu"].startswith(gpus)
        for name, gpus in by_gpu.items()
    )


# the first that a row names counts: the widest
_FORMATS = {
    "fp8": "fp8",
    "float8": "fp8",
    "nvfp4": "nvfp4",
}


def _recipe(row: dict[str, str]) -> dict[str, Any]:
    """Return the options of a training run that its published row tells."""
    is_reference = _runs_reference_code(row)
    is_compiled = row["compile"] != "no" or row["id"].startswith(_COMPILING_FRAMEWORKS)
    is_compiled &= not is_reference
    # fused kernels, gradients reduced in bf16
    is_tuned = row["id"].startswith(_TUNED_FRAMEWORKS) and not is_reference
    uses_lora = _uses_lora(row)
    newest = _is_newest(row) and row["gpu"].startswith(("B", "GB"))
    has_graphs = newest and not _trains_without_graphs(row)
    reduces_bf16 = "PURE" in row["dp_or_fsdp"] or uses_lora or is_tuned
    has_overlap = newest or _hides_exchanges(row)
    return {
        "dtype": _read_format(row),
        "gradient_byte": 2 if reduces_bf16 else 4,
        "fused_loss": is_tuned,
        "loss_share": 0.0 if is_tuned else LOSSES.share,
        "graphs": has_graphs or "token drop" in row["notes"],
        "expert_overlap": TRAINING.overlap if has_overlap else 0.0,
        "expert_copies": _sends_copies(row),
        "expert_kernels": _expert_kernels(row, newest, has_graphs),
        "stack": "compiled" if is_compiled else "eager",
        "lora": 16 if uses_lora else 0,
        "lora_targets": "attention" if uses_lora and _adapts_attention(row) else "all",
        "fp8_attention": _multiplies_attention_in_fp8(row, uses_lora),
        "base_bits": 4 if uses_lora and _has_4_bit_base(row) else 16,
    }


def _read_format(row: dict[str, str]) -> str:
    """Return the number format that a row names; bf16 where it names no narrower one.

    MLPerf's submissions of version 5.1 on Blackwell do not settle it in their configurations.
    NVIDIA's language models of that round trained in NVFP4 on all four kinds of card, and partners
    ran its containers [NVIDIA's blog on MLPerf Training 5.1; vuiseng9/mlperf-t5.1-rundown]. LoRA
    did so in one of nine configurations of published rows on Blackwell, and in FP8 in the others
    (``training_layouts.yaml``).
    """
    precision = row["precision"].lower()
    if precision == "fp8 or nvfp4":
        return "fp8" if _uses_lora(row) else "nvfp4"
    named = [name for word, name in _FORMATS.items() if word in precision]
    return named[0] if named else "bf16"


def _adapts_attention(row: dict[str, str]) -> bool:
    """Whether adapters lie on attention alone: in MLPerf's LoRA, and in NeMo before 2.0."""
    return row["id"].startswith(("mlperf", "nemo"))


def _multiplies_attention_in_fp8(row: dict[str, str], uses_lora: bool) -> bool:
    """Whether a run's configuration sets attention in fp8.

    NVIDIA's code of MLPerf's LoRA does on all cards, that of Llama 3.1 does not (``FP8_DPA=1``;
    ``NVTE_DPA_FP8_RECIPE="F16"``). Megatron-Bridge's MXFP8 recipes do from 26.06 on for gpt-oss on
    Blackwell and for DeepSeek-V3 on B300 and GB300 (``fp8_dot_product_attention``).
    """
    if _runs_nemo(row):
        return uses_lora
    is_deepseek = row["model"] == "deepseek-v3" and row["gpu"].startswith(("B300", "GB300"))
    is_gpt_oss = row["model"].startswith("gpt-oss") and row["gpu"].startswith(("B", "GB"))
    is_narrow = row["precision"].upper() == "MXFP8"
    return _is_newest(row) and is_narrow and (is_deepseek or is_gpt_oss)


def _has_4_bit_base(row: dict[str, str]) -> bool:
    """Whether the frozen weights below the adapters are in 4 bits."""
    precision = row["precision"].lower()
    return "nf4" in precision or "int4" in precision


def _trains_without_graphs(row: dict[str, str]) -> bool:
    """Whether a run of the newest recipes had no CUDA graphs: gpt-oss on B300."""
    return row["model"].startswith("gpt-oss") and row["gpu"].startswith("B300")


def _runs_reference_code(row: dict[str, str]) -> bool:
    """Whether a submission to MLPerf runs the benchmark's own code of Llama 2 70B LoRA.

    It is PEFT under DeepSpeed's ZeRO-3, layer by layer, with checkpoints of all activations and
    FlashAttention-2 [mlcommons/training, ``llama2_70b_lora/README.md``].
    """
    return row["id"].startswith("mlperf") and "deepspeed" in row["id"]


def _runs_nemo(row: dict[str, str]) -> bool:
    """Whether a submission to MLPerf runs NVIDIA's code, which is NeMo's."""
    return row["id"].startswith("mlperf") and not _runs_reference_code(row)


_TUNED_FRAMEWORKS = ("mbridge", "nemo", "mlperf")
_COMPILING_FRAMEWORKS = ("megatron", "bigscience", "internevo")


def _uses_lora(row: dict[str, str]) -> bool:
    if "lora" in row["id"] or "lora" in row["model"]:
        return True
    return "lora" in row["notes"].lower().split(";")[1]


TRAINING_PLACES = {"tokens/s": "tokens_per_s_per_gpu"}


def ask_training_rows(reference: Path) -> list[JudgedRow]:
    """Return the published rows of several GPUs that can be predicted, with their commands."""
    judged_rows = []
    for row in read_training_rows(reference):
        try:
            command = ask_training_row(row)
        except (WattcastError, KeyError):  # `compare_training` says why
            continue
        chosen = row["id"].split("-")[0] in CHOSEN_WITH
        where = "published training, " + (
            "families that chose the overlaps" if chosen else "other families"
        )
        if command.options.get("gpus", 8) > 1:
            measured = {"tokens/s": float(row["tokens_per_s_per_gpu"])}
            judged_rows.append(
                JudgedRow(
                    where,
                    row["id"],
                    command,
                    measured,
                    TRAINING_PLACES,
                )
            )
    return judged_rows


def training_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors of tokens per second, about two minutes; families that chose the overlaps stand
    apart.
    """
    if reference is None or not (reference / "training").is_dir():
        return [
            make_absent_row(
                "published training",
                "tokens/s, median",
                "no reference data",
                10.0,
                6.0,
            )
        ]
    tell("published training rows")
    comparisons = [c for c in compare_training(reference) if isinstance(c, TrainingComparison)]
    rows = []
    for words, chosen in (("families that chose the overlaps", True), ("other families", False)):
        errors = np.array(
            [
                abs(c.error)
                for c in comparisons
                if (c.family in CHOSEN_WITH) == chosen and c.gpus > 1
            ]
        )
        if errors.size:
            name = f"published training, {words}"
            rows.append(
                make_ledger_row(
                    name,
                    "tokens/s, median",
                    len(errors),
                    100 * float(np.median(errors)),
                    must=10.0,
                    aim=6.0,
                )
            )
            rows.append(
                make_ledger_row(
                    name,
                    "tokens/s, 90th percentile",
                    len(errors),
                    100 * float(np.quantile(errors, 0.9)),
                    must=25.0,
                )
            )
    return rows
