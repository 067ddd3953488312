"""Compare a training job that ran with its prediction."""
