"""From chunks to caches, and from prompts to answers."""
