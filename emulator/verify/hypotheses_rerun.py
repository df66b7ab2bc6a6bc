"""A scene as evidence: what is compared with what, and what the node would give with other operands, groups or dims.

Nothing here talks to other ranks: transition ops are carried out over the list of all ranks' values.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Shard

from emulator.layout.placement import Layout
from emulator.ops.registry import LOCAL, OPS, Mixed, op_name
from emulator.verify.hypotheses_moves import MOVES, Values, total, transition
from emulator.verify.rows import Tolerance
from emulator.verify.scene import Scene

_EXPLAINED = 0.2  # what a hypothesis leaves unexplained may be this share of the error at most


class Evidence:
    """A scene with what follows from it.

    want: by rank, the value it should hold; for partial sums the reference, which their sum over the group should be.
    held: by rank, the value found; for partial sums their sum. Both None where there is nothing to compare. shares: not
    the sum of partial sums is compared, but each. raised: the node cannot run on its operands. faithful: the operands
    give the value found (or raise), so the node did what it was told. healthy: they give the right value: it did not.
    """

    def __init__(self, scene: Scene):
        self.scene, self.node, self.mesh, self.tokens = scene, scene.node, scene.mesh, scene.tokens
        layouts = scene.node.meta["layout"]
        self.layout: Layout = layouts[scene.output] if isinstance(layouts, tuple) else layouts
        self.op = op_name(scene.node.target)
        self.wrong = scene.wrong
        self.ranks = range(len(scene.found))
        self.partial_axes = [axis for axis, p in self.layout.placements if isinstance(p, Partial)]
        self.want: list[Tensor | None] = [
            scene.reference if e is None and self.partial_axes else e for e in scene.expected
        ]
        self.held = self._settled(scene.found)
        self.limits = [self._limit(r) for r in self.ranks]
        self.shares = False
        own = self.run(scene.operands)
        self.raised = own is None and not any(f.numel() for f in scene.found)
        self.faithful = self.raised or self.gives_found(own, self.ranks)
        self.healthy = own is not None and self.gives_expected(own)
        if own is not None and self.healthy and self.partial_axes:
            self._compare_shares(own)

    def _compare_shares(self, own: Values) -> None:
        """A share of a sum has no reference, but its operands give it: from now on each rank is compared with that."""
        wrong = [r for r in self.ranks if not self.gives_found(own, [r])]
        if wrong:
            self.shares, self.partial_axes, self.wrong = True, [], wrong
            self.want, self.held = list(own), list(self.scene.found)
            self.limits = [self._limit(r) for r in self.ranks]

    # --- comparing ---------------------------------------------------------------------------------------------------

    def gives_expected(self, values: Values | None) -> bool:
        """Whether these values are right on every rank, the wrong ones above all."""
        if values is None:
            return False
        compared = False
        for rank, value in enumerate(self._settled(values)):
            want = self.want[rank]
            if want is None or (not want.numel() and self.layout.kind != "rows"):
                continue
            if value is None or not self.has_shape(value, rank) or not self.close(self.real(value, rank), want, rank):
                return False
            compared |= rank in self.wrong
        return compared

    def is_laid_out(self, values: Values | None) -> bool:
        """Whether these values are the reference in one sound layout: whole, local rows, or a shard of features."""
        reference, tp = self.scene.reference, self.mesh.tp
        if values is None or reference is None or not reference.numel():
            return False
        if all(self.close(v, reference, r) for r, v in enumerate(values)):
            return True
        if self.layout.kind != "token" or tp == 1:
            return False
        windows = [reference[slice(*self.window(r))] for r in self.ranks]
        if all(len(v) == self.tokens.per for v in values):
            return all(self.close(v[: len(w)], w, r) for r, (v, w) in enumerate(zip(values, windows)))
        return any(
            all(self.close(v, reference.chunk(tp, d)[self.mesh.index("tp", r)], r) for r, v in enumerate(values))
            for d in range(1, reference.dim())
            if reference.shape[d] % tp == 0
        )

    def is_right(self, values: Values | None) -> bool:
        """Right by the node's layout; or in any, where operands that do not fit make the layout a guess."""
        return self.gives_expected(values) or (self.misfit and self.is_laid_out(values))

    @property
    def misfit(self) -> bool:
        """Whether the operands' rows differ in number: of other tokens, or padded."""
        layouts = [(at, x) for at, x in self.tensors if x.kind in ("token", "rows")]
        rows = {len(self.operand(at)[0]) for at, _ in layouts if self.operand(at)[0].dim()}
        return self.raised or len(rows) > 1

    def gives_found(self, values: Values | None, ranks: Sequence[int] | None = None) -> bool:
        """Whether these values are those found on the ranks (default: the wrong ones)."""
        ranks = self.wrong if ranks is None else ranks
        return values is not None and all(self.close(values[r], self.scene.found[r], r) for r in ranks)

    def used_and_right(self, own: Any, other: Any, with_other: Values | None) -> tuple[Any, Any] | None:
        """(what the node used, what is right) of two arguments: `own` and the other, with which it gives `with_other`.
        None where neither explains the value."""
        if self.faithful and self.gives_expected(with_other):
            return own, other
        return (other, own) if self.healthy and self.gives_found(with_other) else None

    def close(self, value: Tensor, other: Tensor, rank: int) -> bool:
        """Whole numbers equal (top-k ids in any order), others within the rank's limit; NaN is close to NaN."""
        if value.shape != other.shape or value.is_floating_point() != other.is_floating_point():
            return False
        if not value.is_floating_point():
            return torch.equal(self.sorted(value), self.sorted(other))
        return self.tolerance(rank).same(value, other)

    def tolerance(self, rank: int) -> Tolerance:
        return Tolerance(0.0, self.limits[rank])

    def sorted(self, value: Tensor) -> Tensor:
        """Top-k ids in one order: theirs carries no meaning."""
        return value.long().sort(-1).values if self.op == "dsa_indexer_topk" else value.long()

    def has_shape(self, value: Tensor, rank: int) -> bool:
        """Whether a value has the shape of this rank's: the real rows, and the padding that its layout has."""
        want = self.want[rank]
        assert want is not None
        rows = (self.num_rows(rank), self.tokens.real) if self.node.meta.get("padded") else (self.num_rows(rank),)
        return value.shape[1:] == want.shape[1:] and len(value) in rows

    def real(self, value: Tensor, rank: int) -> Tensor:
        """A value of this shape without its padding, which stands at the end, or anywhere in the rows of a group."""
        ids, want = self.scene.ids[rank], self.want[rank]
        assert want is not None
        if self.layout.kind == "group" and ids is not None and len(ids) == len(value):
            return value[ids >= 0]
        return value[: len(want)]

    def num_rows(self, rank: int) -> int:
        """Rows of this rank's value, padding included."""
        want = self.want[rank]
        assert want is not None
        if self.layout.kind != "token":
            ids = self.scene.ids[rank] if self.layout.kind == "group" else None
            return len(want) if ids is None else len(ids)
        if self.is_local:
            return self.tokens.per
        return self.tokens.padded if self.node.meta.get("padded") else self.tokens.real

    @property
    def is_local(self) -> bool:
        """Whether ranks hold windows of the tokens."""
        placement = self.layout.on("tp")
        return self.layout.kind == "token" and (placement == LOCAL or isinstance(placement, Mixed))

    def start(self, rank: int) -> int:
        """Token of the first row that the rank should hold."""
        return self.window(rank)[0] if self.is_local else 0

    def window(self, rank: int) -> tuple[int, int]:
        return self.tokens.window(self.mesh.index("tp", rank))

    def wrong_ranks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(rank, real rows held, rows wanted) of the wrong ranks that have real rows and the right shape."""
        for rank in self.wrong:
            held, want = self.held[rank], self.want[rank]
            if held is not None and want is not None and want.numel() and self.has_shape(held, rank):
                yield rank, self.real(held, rank), want

    @property
    def compared(self) -> list[int]:
        """Wrong ranks with something to compare."""
        return [rank for rank, *_ in self.wrong_ranks()]

    def all_compared(self) -> bool:
        """Whether every wrong rank with real rows has the right shape."""
        wanted = [r for r in self.wrong if (w := self.want[r]) is not None and w.numel()]
        return bool(wanted) and self.compared == wanted

    def share(self, whole: Tensor, rank: int, *, window: bool = True) -> Tensor | None:
        """This rank's part of a whole value of the node's layout (window=False: its features of all tokens)."""
        if self.layout.kind in ("rows", "group"):
            return None
        placement = self.layout.on("tp") if self.layout.kind == "token" else None
        if isinstance(placement, Mixed):
            placement = placement.value
        elif placement == LOCAL:
            placement = None
        if isinstance(placement, Shard):
            whole = whole.chunk(self.mesh.tp, placement.dim)[self.mesh.index("tp", rank)]
        return whole[slice(*self.window(rank))] if window and self.is_local else whole

    def _settled(self, values: Sequence[Tensor]) -> list[Tensor | None]:
        """Values as they are compared: partial sums are added up over their group."""
        settled: list[Tensor | None] = [v if v.dim() else None for v in values]
        for axis in self.partial_axes:
            summed: list[Tensor | None] = []
            for rank in self.ranks:
                parts = [v for m in self.mesh.members(axis, rank) if (v := settled[m]) is not None]
                same = len(parts) == len(self.mesh.members(axis, rank)) and len({p.shape for p in parts}) == 1
                summed.append(total(parts) if same else None)
            settled = summed
        return settled

    def _limit(self, rank: int) -> float:
        held, want, limit = self.held[rank], self.want[rank], self.scene.tolerance
        if rank not in self.wrong or held is None or want is None or not want.is_floating_point():
            return limit
        if not want.numel() or not self.has_shape(held, rank):
            return limit
        error = (self.real(held, rank).double() - want.double()).abs()
        largest = float(error[error.isfinite()].max()) if error.isfinite().any() else 0.0
        return min(limit, _EXPLAINED * largest) if largest > limit else limit

    # --- running again -----------------------------------------------------------------------------------------------

    def run(self, operands: list[list[Any]], op: str | None = None) -> Values | None:
        """The node's value on every rank from these operands; op: another transition in its place. None when it cannot
        be run on them."""
        name = op or self.op
        try:
            with torch.no_grad():
                if name in MOVES:
                    return transition(str(name), operands, self.mesh)
                return [self._call(rank, operands[rank]) for rank in self.ranks]
        except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, AttributeError):
            return None  # the operands do not fit: this is not what happened

    def _call(self, rank: int, operands: list[Any], **rank_args: Any) -> Tensor:
        target: Any = self.node.target
        if not rank_args:
            rank_args = self.rank_args(rank, operands)
        args = [a.clone() if isinstance(a, Tensor) and self._writes else a for a in operands]
        value = target(*args, **self.node.kwargs, **rank_args)
        return value[self.scene.output] if isinstance(value, (tuple, list)) else value

    @property
    def _writes(self) -> bool:
        """Whether the node may write its operands (a cache; an in-place function of a user's graph)."""
        return self.op is None or self.op == "cache_write"

    def rank_args(self, rank: int, operands: list[Any], as_rank: int | None = None) -> dict[str, Any]:
        """Arguments that the runtime adds on this rank (as_rank: those of another rank)."""
        if self.op not in OPS or OPS[self.op].rank_args is None:
            return {}
        at = next(i for i, layout in self.tensors if layout.kind == "weight")
        axis = next((axis for axis, _ in dict(self.tensors)[at].placements), None)
        index = self.mesh.index(axis, rank if as_rank is None else as_rank) if axis else 0
        make: Callable[..., dict[str, Any]] = OPS[self.op].rank_args  # type: ignore[assignment]
        return make(operands[at], index)

    def run_as(self, rank: int, as_rank: int) -> Tensor | None:
        """One rank's value with the runtime's arguments of another rank; None for ops that take none."""
        operands = self.scene.operands[rank]
        rank_args = self.rank_args(rank, operands, as_rank)
        return self._call(rank, operands, **rank_args) if rank_args else None

    # --- operands ----------------------------------------------------------------------------------------------------

    def replaced(self, at: int, values: Sequence[Any]) -> list[list[Any]]:
        """The operands with operand `at` of every rank replaced."""
        return [[*a[:at], value, *a[at + 1 :]] for a, value in zip(self.scene.operands, values)]

    def operand(self, at: int) -> list[Any]:
        """One operand on every rank."""
        return [operands[at] for operands in self.scene.operands]

    @property
    def tensors(self) -> list[tuple[int, Layout]]:
        """(position, layout) of the operands that are single tensors."""
        found = []
        for at, argument in enumerate(self.node.args):
            if isinstance(argument, fx.Node) and all(isinstance(v, Tensor) for v in self.operand(at)):
                layout = argument.meta.get("layout")
                if isinstance(layout, Layout):
                    found.append((at, layout))
        return found

    def argument_names(self) -> list[str]:
        """Names of the node's arguments in its schema or signature."""
        target: Any = self.node.target
        if self.op is not None:
            return [a.name for a in target.default._schema.arguments]
        if isinstance(target, torch._ops.OpOverload):
            return [a.name for a in target._schema.arguments]
        try:
            names = list(inspect.signature(target).parameters)
        except (TypeError, ValueError):  # a builtin
            names = []
        return names + [f"argument {i}" for i in range(len(names), len(self.node.args))]

    def name_of(self, at: int) -> str:
        return self.argument_names()[at]

    def operand_text(self, at: int) -> str:
        """`x` (linear_3)"""
        argument = self.node.args[at]
        node = f" ({argument.name})" if isinstance(argument, fx.Node) else ""
        return node[2:-1] if node and self.name_of(at).startswith("argument") else f"`{self.name_of(at)}`{node}"

    def index_of(self, name: str) -> int | None:
        """Position of a given argument."""
        names = self.argument_names()
        at = names.index(name) if name in names else len(self.node.args)
        return at if at < len(self.node.args) else None

    def axes(self) -> list[str]:
        """Mesh axes with more than one rank; of those with the same groups only the first."""
        found: dict[str, str] = {}
        for axis in self.mesh.names:
            groups = self.mesh.groups(axis)
            if groups and len(groups[0]) > 1:
                found.setdefault(str(groups), axis)
        return list(found.values())
