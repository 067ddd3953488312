"""Templates of model architectures: each traces the operators one pass of a model runs."""
