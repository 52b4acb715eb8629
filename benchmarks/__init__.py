"""Measurements over the frameworks' pipelines."""
