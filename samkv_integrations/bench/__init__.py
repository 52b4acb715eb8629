"""Measurements: answers and time."""
