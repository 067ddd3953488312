"""Kernels of an inference engine, as vLLM runs them; one file a family of kernels.

Tiles are read off the names and grids of the kernels that an H200 ran. ``families`` imports these
files when it first meets an operator of an engine: most predictions do without them.
"""
