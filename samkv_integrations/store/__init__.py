"""Where chunk caches are kept, as bytes. A runtime knows what the bytes mean.

- `base`: the contracts of a store and of an opened cache.
- `indexed`: a store with an index; `memory` and `disk` are two. `upkeep` maintains one on disk.
- `chunk_file`, `folder`: the format of a chunk's file, atomic writes, and the folder of all.
- `index`, on `database`: the index of these files, an SQLite database that is rebuilt from them.
- `windows`: how chunks are found in prompts.
- `tier`, on `objects`: the remote tier, which machines share.
"""
