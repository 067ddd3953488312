"""Measurements -> coefficients."""
