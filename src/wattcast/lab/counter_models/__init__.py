"""Power from hardware counters: tables, voltage inference, fits, rails, and estimates from kernel
launches.
"""
