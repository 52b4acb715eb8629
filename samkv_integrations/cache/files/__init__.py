"""Chunk files: one safetensors file for each chunk."""
