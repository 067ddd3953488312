"""Compare a service that runs with what its plan promised, and say what would explain
differences.
"""
