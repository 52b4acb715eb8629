"""Chunk caches: what is kept of a chunk, and where.

- What a chunk is: `chunk`; its attention statistics: `attention_stats`; how it is found in prompts:
  `windows`.
- Formats of KV entries: `quantise`, and `kernels` for a GPU.
- Chunk files: `file_format` (one file), `files` (atomic writes), `chunk_folder` (all of a store).
- The index: `database` (SQLite, rebuilt from the files), `index` (what it answers).
- Stores: `base` (the contract), `memory`, `disk`; `upkeep` maintains one on disk.
- The remote tier: `remote` (what machines share), `remote_objects` (fsspec).
"""
