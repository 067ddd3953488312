"""Whole models on a GPU: a test set for prediction, never fitted on."""
