"""Readers of workloads: our JSON, Hugging Face configurations, ONNX, PyTorch modules and profiler
traces.
"""
