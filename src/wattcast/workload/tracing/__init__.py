"""Symbolic tensors: templates run on them, and what PyTorch would launch is recorded as operators."""
