"""Plan how many GPUs serve a language model."""
