"""Energies, leakage and area of a chip built up from transistors, wires and arrays."""
