"""Runs GGUF files with llama.cpp, on any processor and graphics card, without torch."""
