"""The op vocabulary. Importing this package registers every op with torch.library."""

from emulator.ops import cache, elementwise, embedding, indexer, linear, mla, moe, norm, rope, transition, views  # noqa: F401
