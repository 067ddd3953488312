"""Training jobs: how long, how many kWh, what they cost, and how to share them out over GPUs."""
