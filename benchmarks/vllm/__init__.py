"""vLLM on a GPU, beside our own steps."""
