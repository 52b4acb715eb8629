"""KV entries in few bits."""
