"""Power over time: of a step, an engine, a training job, a node, a rack and a hall."""
