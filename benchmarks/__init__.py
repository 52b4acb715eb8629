"""Measurements of time, memory, answers and stores."""
