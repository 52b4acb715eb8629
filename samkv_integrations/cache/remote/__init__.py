"""The remote tier: chunk caches in a bucket that machines share."""
