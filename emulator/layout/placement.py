"""What layout a value has: kind of value, placement on each mesh axis, and the token windows of the ranks.

Placements are torch.distributed.tensor's; people see the RFC's words (full-token, local-token, partial).
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from emulator.errors import UsageError
from emulator.ops.registry import LOCAL, PARTIAL, Mixed, Owned, R
from emulator.ops.transition import Order, windows_of

Kind = Literal["token", "group", "rows", "weight", "cache", "batch"]


@dataclass(frozen=True)
class Tokens:
    """How T real tokens lie over `parts` ranks: padded rows are dealt out in `order`, per = padded / parts to each.

    order: contiguous (rank r owns [r*per, (r+1)*per)), zigzag (2*parts blocks, rank r owns blocks r and 2*parts-1-r, so
    that causal work is even) or round_robin (rank r owns rows r, r+parts, ...). rows: what is padded from, where a
    batch is larger than its real tokens (padding to the dp maximum).
    """

    real: int
    parts: int
    rows: int = 0
    order: Order = "contiguous"

    @property
    def per(self) -> int:
        blocks = 2 if self.order == "zigzag" else 1  # of a rank; they are equally long
        return -(-max(self.real, self.rows) // (self.parts * blocks)) * blocks

    @property
    def padded(self) -> int:
        return self.per * self.parts

    @property
    def rearranged(self) -> bool:
        """Whether the rows of all ranks, joined, are not the tokens as they are: padded, or in another order."""
        return self.padded != self.real or (self.order != "contiguous" and self.parts > 1)

    @property
    def arrangement(self) -> tuple[Any, ...]:
        """What pad and unpad are told, behind the length, of rows in another order than the tokens'."""
        return () if self.order == "contiguous" or self.parts == 1 else (self.order, self.parts)

    def windows(self, index: int) -> list[tuple[int, int]]:
        """[start, stop) of every run of consecutive rows of rank `index`, padding included, in its order."""
        return windows_of(self.order, self.parts, self.per, index)

    def window(self, index: int) -> tuple[int, int]:
        """[start, end) of rank `index`'s real tokens; empty (start == end) on a rank with padding only."""
        assert self.order == "contiguous", f"a rank's tokens are not one window in {self.order} order"
        start = index * self.per
        return start, max(start, min(start + self.per, self.real))

    def ids(self, index: int) -> Tensor:
        """Global token id of each row of rank `index`, padding -1: int64 [per]."""
        rows = torch.cat([torch.arange(start, stop) for start, stop in self.windows(index)])
        return torch.where(rows < self.real, rows, -1)


@dataclass(frozen=True)
class Layout:
    """kind: token (dim 0 = the tokens of a dp rank), group (dim 0 = the local rows of all ranks of an ep group, padding
    included), rows (dim 0 = token copies sorted by expert), weight, cache, batch (per request).

    placements: (axis, placement) of every axis on which the value is not replicated, sorted by axis.
    """

    kind: Kind
    placements: tuple[tuple[str, Placement], ...] = ()
    tokens: Tokens | None = None

    def on(self, axis: str) -> Placement:
        return dict(self.placements).get(axis, R)

    def placed(self, **placements: Placement) -> "Layout":
        """The same value with these placements on these axes."""
        merged = {**dict(self.placements), **placements}
        return replace(self, placements=tuple(sorted((a, p) for a, p in merged.items() if p != R)))

    def __str__(self) -> str:
        if self.kind == "token":
            word = placement_word(self.on("tp"))
            order = self.tokens.order if self.tokens else "contiguous"
            return word if word != "local-token" or order == "contiguous" else f"{word}({order})"
        if self.kind == "group":
            return "group-token" if self.on("ep") == R else f"group-{placement_word(self.on('ep'))}"
        if self.kind == "rows":
            return {"tp": "token-rows", "ep": "expert-rows"}.get(next((a for a, _ in self.placements), ""), "all-rows")
        return ", ".join(f"{axis}:{placement_word(p, 'weight')}" for axis, p in self.placements) or "replicated"


def placement_word(placement: Placement, kind: Kind = "token") -> str:
    """full-token, local-token, shard(d), partial; weights say replicated and shard(0)."""
    if isinstance(placement, Mixed):
        return f"local-token+{placement_word(placement.value)}"
    if isinstance(placement, Owned):
        return f"owner({placement.index})"
    if isinstance(placement, Partial):
        return "partial"
    if isinstance(placement, Replicate):
        return "full-token" if kind == "token" else "replicated"
    assert isinstance(placement, Shard)
    return "local-token" if placement.dim == 0 and kind == "token" else f"shard({placement.dim})"


def parse_want(word: str, where: str) -> tuple[Kind, dict[str, Placement]]:
    """A plan's word for the layout of an activation: (kind it applies to, placement per axis). group-token joins local
    rows over the ep group; full-as-group takes full-token rows as those of the group, whose ranks are the tp ranks."""
    words: dict[str, tuple[Kind, dict[str, Placement]]] = {
        "full-token": ("token", {"tp": R}),
        "local-token": ("token", {"tp": LOCAL}),
        "partial": ("token", {"tp": PARTIAL}),
        "group-token": ("group", {"ep": R}),
        "full-as-group": ("group", {"ep": R, "tp": R}),
        "token-rows": ("rows", {"tp": LOCAL, "ep": R}),
        "expert-rows": ("rows", {"tp": R, "ep": LOCAL}),
    }
    if word in words:
        return words[word]
    if match := re.fullmatch(r"shard\(([1-9])\)", word):
        return "token", {"tp": Shard(int(match[1]))}
    raise UsageError(f"{where}: layout {word!r} unknown (allowed: {', '.join(words)}, shard(1), shard(2))")


def parse_weight(word: str, where: str, layer: int = 0) -> dict[str, Placement]:
    """A plan's word for the placement of a weight: replicated, shard(d) on tp, or axis:shard(d). by_layer: whole on one
    tp rank, layer k on rank k % tp (the index in its placement is k)."""
    if word == "replicated":
        return {}
    if word == "by_layer":
        return {"tp": Owned(layer)}
    if match := re.fullmatch(r"(?:(tp|ep|dp):)?shard\(([0-9])\)", word):
        return {match[1] or "tp": Shard(int(match[2]))}
    raise UsageError(
        f"{where}: weight placement {word!r} unknown (allowed: replicated, shard(0), shard(1), ep:shard(0), by_layer)"
    )
