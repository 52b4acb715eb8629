"""Tools that judge methods, tune settings, and inspect answers and models."""
