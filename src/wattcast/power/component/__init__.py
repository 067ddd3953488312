"""Component power from simulator or hardware counters, after GPUWattch and AccelWattch."""
