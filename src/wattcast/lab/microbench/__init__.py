"""Microbenchmarks: kernels that drive one unit of a GPU, their time and energy, and tuning advice
from them.
"""
