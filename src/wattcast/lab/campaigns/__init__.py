"""Campaigns that run many operators or whole models on a GPU and save a row for each."""
