"""Passes over computed and cached tokens."""
