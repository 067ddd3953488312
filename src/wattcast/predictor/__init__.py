"""Graph to prediction: timeline, governor, pipeline, uncertainty, and what was fitted for each
device.
"""
