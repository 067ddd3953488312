"""records -> coefficients"""
