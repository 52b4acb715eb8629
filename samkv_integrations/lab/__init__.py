"""Judging, tuning and looking at what the engine does."""
