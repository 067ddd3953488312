"""Measuring: the only place that touches a GPU. Reads sensors and runs kernels; never sets a clock or a limit."""
