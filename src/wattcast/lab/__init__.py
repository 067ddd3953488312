"""The lab: where the numbers of the product are made, and where researchers work. The product never
imports it.
"""
