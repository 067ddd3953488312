"""Microbenchmarks: kernels that drive one unit of a GPU, or a chosen mix, and what each costs in time and energy."""
