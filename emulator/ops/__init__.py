"""The op vocabulary. Importing this package registers every op with torch.library."""

# ruff: noqa: F401
from emulator.ops import (
    cache,
    dense_mla,
    elementwise,
    embedding,
    indexer,
    linear,
    mla,
    moe,
    norm,
    rope,
    transition,
    views,
)
