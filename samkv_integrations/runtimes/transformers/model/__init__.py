"""A transformers model, run layer by layer."""
