"""Read the served language models of the ML.ENERGY Leaderboard v3 on B200s.

Prompt lengths are not published. One for each task was fixed before any row was compared
(``PROMPT_TOKENS``): a question of a chat, a graduate's question with four answers, a file around a
gap. Models are halved by the crc32 of their names, before any row was compared: those with
crc32 mod 4 = 2 are evidence for the card's energies (``served_evidence``), the others judge.

Rows are left out for these reasons alone: chat about pictures and videos (how many tokens a picture
takes in each row is not published), models of which no catalogue entry exists (Nemotron Nano v2),
and, as the reference's README says, the questions of models below 35e9 parameters on one GPU up to
64 sequences, which its host holds up.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("mlenergy") / "llm.csv.gz"
GPU = "b200"
# tokens of a prompt, of each task; fixed beforehand
PROMPT_TOKENS = {
    "lm-arena-chat": 128,
    "gpqa": 256,
    "sourcegraph-fim": 1024,
}
HOST_BOUND_SEQS = 64  # of questions on one GPU, by the README of the reference
_BLOCK = {"quantization": "fp8-block"}
# model of the leaderboard -> catalogue name, and how its weights are kept
_MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "Qwen/Qwen3-14B": ("qwen3-14b", {}),
    "Qwen/Qwen3-32B": ("qwen3-32b", {}),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b", {}),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3-30b-a3b", {}),
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": ("qwen3-235b-a22b", _BLOCK),
    "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8": ("qwen3-235b-a22b", _BLOCK),
    "Qwen/Qwen3-235B-A22B-Thinking-2507": ("qwen3-235b-a22b", {}),
    "deepseek-ai/DeepSeek-R1-0528": ("deepseek-v3", _BLOCK),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek-v3", _BLOCK),
    "google/gemma-3-12b-it": ("gemma-3-12b", {}),
    "google/gemma-3-27b-it": ("gemma-3-27b", {}),
    "meta-llama/Llama-3.1-405B-Instruct": ("llama-3.1-405b", {}),
    "meta-llama/Llama-3.1-70B-Instruct": ("llama3-70b", {}),
    "openai/gpt-oss-20b": ("gpt-oss-20b", {"quantization": "mxfp4"}),
}


@dataclass(frozen=True)
class ServedRow:
    """One published row of a served model."""

    model_id: str
    task: str
    gpus: int
    expert_gpus: int
    batch: int
    mean_tokens: float  # of an answer
    median_tokens: float
    power_w: float  # of one GPU
    between_tokens_s: float
    joules_per_token: float

    @property
    def name(self) -> str:
        """Name the row as a ledger does."""
        return f"{self.model_id} {self.task} x{self.gpus} batch {self.batch}"

    @property
    def step_s(self) -> float:
        """Return the mean time of a step, in which every sequence of the batch gets a token."""
        return self.batch * self.joules_per_token / (self.power_w * self.gpus)

    @property
    def mean_context_tokens(self) -> float:
        """Return the answer's tokens of a sequence met at a random moment, of lognormal answers: it
        belongs to a long one more often.
        """
        spread = 2.0 * math.log(max(self.mean_tokens / self.median_tokens, 1.0))
        return self.mean_tokens * math.exp(spread) / 2.0

    @property
    def is_evidence(self) -> bool:
        """Whether the row may be fitted to: by the half that its model is in."""
        return zlib.crc32(self.model_id.encode()) % 4 == 2

    @property
    def model(self) -> tuple[str, dict[str, str]]:
        """Return the catalogue's name of the model and how its weights are kept."""
        return _MODELS[self.model_id]


def read_served_rows(reference: Path) -> list[ServedRow]:
    """Read the rows of language models that are judged or fitted to."""
    with gzip.open(reference / TABLE, "rt", encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    return [_parse_row(line) for line in lines if not reason_left_out(line)]


def reason_left_out(line: Mapping[str, str]) -> str:
    """Say why a row cannot be asked; empty where it can."""
    if line["task"] not in PROMPT_TOKENS:
        return "pictures, whose tokens are not published"
    if line["model_id"] not in _MODELS:
        return "no entry in the catalogue"
    is_small = int(line["num_gpus"]) == 1 and float(line["total_params_billions"]) < 35.0
    few = int(line["max_num_seqs"]) <= HOST_BOUND_SEQS
    if line["task"] == "gpqa" and is_small and few:
        return "held up by the host, as the README of the reference says"
    return ""


def _parse_row(line: Mapping[str, str]) -> ServedRow:
    gpus = int(line["num_gpus"])
    return ServedRow(
        model_id=line["model_id"],
        task=line["task"],
        gpus=gpus,
        expert_gpus=int(line["ep"]),
        batch=max(round(float(line["avg_batch_size"])), 1),
        mean_tokens=float(line["avg_output_len"]),
        median_tokens=float(line["output_len_p50"]),
        power_w=float(line["avg_power_watts"]) / gpus,
        between_tokens_s=1e-3 * float(line["median_itl_ms"]),
        joules_per_token=float(line["energy_per_token_joules"]),
    )


def select_half(rows: Sequence[ServedRow], evidence: bool) -> list[ServedRow]:
    """Return the rows of the models that are evidence, or of those that judge."""
    return [row for row in rows if row.is_evidence is evidence]
