"""Ledger rows that take minutes to make; each module runs by itself and keeps its rows for the
ledger.
"""
