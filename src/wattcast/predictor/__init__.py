"""Graph to prediction: timeline, governor, pipeline, intervals, and what was fitted for each
device.
"""
