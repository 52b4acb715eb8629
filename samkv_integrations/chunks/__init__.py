"""What a chunk is, and how its cache is made."""
