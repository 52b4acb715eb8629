"""The index of a store's chunk files, in SQLite."""
