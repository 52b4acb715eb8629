"""Chunk caches: what is kept of a chunk, and where.

- What a chunk is: `chunk`; its attention statistics: `attention_stats`; how it is found in prompts:
  `windows`.
- `formats`: how keys and values are stored in few bits, and a kernel that reads them on a GPU.
- `files`: chunk files: the format of one, atomic writes, and the folder of all.
- `index`: the index of these files, an SQLite database that is rebuilt from them.
- Stores: `store` (the contract, and one in memory), `disk`; `upkeep` maintains one on disk.
- `remote`: the remote tier, which machines share.
"""
