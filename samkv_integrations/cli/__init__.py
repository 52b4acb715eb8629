"""The command line, ``samkv``."""
