"""Multimedia workloads of paper 000 on a synthetic full-HD clip: the test set of counter models."""
