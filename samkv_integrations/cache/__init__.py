"""Chunk caches: what is kept of a chunk, and where.

- What a chunk is: `chunk`; its attention statistics: `attention_stats`; how it is found in prompts:
  `windows`.
- `formats`: how keys and values are stored in few bits, and a kernel that reads them on a GPU.
- `chunk_file`: the format of a chunk's file; `folder`: atomic writes, and the folder of all files.
- `index`: the index of these files; `database`: in SQLite, rebuilt from them.
- Stores: `store` (the contract, and one in memory), `disk`; `upkeep` maintains one on disk.
- `remote_tier`: the remote tier, which machines share; `remote_objects`: its bucket or folder.
"""
