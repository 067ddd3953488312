"""Ledger rows judged by measurements of others, which lie outside the project."""
