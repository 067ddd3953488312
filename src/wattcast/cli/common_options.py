"""Options that several commands share, each declared once."""

from __future__ import annotations

from wattcast.core.option_declaration import Option

JSON = Option("Print JSON.")
GPU = Option("GPU, board or YAML file.")
MODEL = Option("Model name or Hugging Face config.json.", positional=True)
WORKLOAD = Option(
    "Model name, workload JSON, EnergAIzer list, Hugging Face config.json, profiler trace or ONNX.",
    positional=True,
)
HOST = Option("Address to listen on; the default is this machine only.")
DEVICE = Option("Card, by NVML index; default: the first that CUDA_VISIBLE_DEVICES shows.", least=0)
DEVICES = Option("Cards of one job, by NVML index: 0-7 or 0,1,4. All get one decision.")
TTFT = Option("Longest p99 of the time to first token.")
TPOT = Option("Longest p99 of the time per token.")
SOCKET = Option("Socket of the daemon; default: /run/wattcast/socket.")
