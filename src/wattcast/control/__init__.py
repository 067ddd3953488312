"""Control the clocks and power limits of GPUs while programs run: the verb ``wattcast manage``."""
