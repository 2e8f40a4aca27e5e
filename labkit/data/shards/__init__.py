"""Data sets as shards: few large Apache Arrow files, read in contiguous extents (Wang et al. 2020, "
"abstract)."""

from labkit.data.shards.index import INDEX_FILE, Column, Extent, Shard, ShardError, ShardIndex, read_index
from labkit.data.shards.order import ShuffleQuality, WindowShuffle, shuffle_quality
from labkit.data.shards.reader import ExtentReader, ReadCounts
from labkit.data.shards.write import WriteOptions, write_shards

__all__ = [
    "INDEX_FILE",
    "Column",
    "Extent",
    "ExtentReader",
    "ReadCounts",
    "Shard",
    "ShardError",
    "ShardIndex",
    "ShuffleQuality",
    "WindowShuffle",
    "WriteOptions",
    "read_index",
    "shuffle_quality",
    "write_shards",
]
