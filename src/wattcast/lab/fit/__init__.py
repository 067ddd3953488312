"""Fit bundles to measured rows: kernel databases, whole models, and the few rows of a new card."""
