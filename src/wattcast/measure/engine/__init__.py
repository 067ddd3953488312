"""Measure a serving engine (vLLM) from inside its process: single steps, serving runs, and its kernels one by one."""
