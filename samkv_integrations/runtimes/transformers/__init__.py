"""Models of transformers."""
