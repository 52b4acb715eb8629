"""How a chunk gets its cache: identify it, look it up, compute it, store it."""
