"""Hypotheses about transitions that ran where none, or another, was meant: group, dim, and sums of what is no share.

Each takes the evidence and returns a diagnosis, or None when it does not hold.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.ops.registry import LOCAL, Mixed, op_name
from emulator.ops.transition import pad_rows
from emulator.verify.hypotheses_moves import MOVES, Values, axis_at
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.scene import Diagnosis

_DIMS_AT = {"reduce_scatter": (3,), "all_gather": (3,), "slice": (3,), "all_to_all": (3, 4)}


def wrong_group(evidence: Evidence) -> Diagnosis | None:
    """The transition, over the groups of another axis, gives the right value (or the one found)."""
    if evidence.op not in MOVES:
        return None
    at = axis_at(str(evidence.op))
    own = evidence.operand(at)[0]
    for axis in _other_axes(evidence, own):
        size = len(evidence.mesh.members(axis, 0))
        values = evidence.run([[*a[:at], axis, size, *a[at + 2 :]] for a in evidence.scene.operands])
        completes = not _moved_later(evidence.node, axis) and evidence.is_laid_out(values)
        if evidence.faithful and (evidence.gives_expected(values) or completes):
            return _group_told(evidence, str(evidence.op), own, axis)
        if evidence.healthy and evidence.gives_found(values):
            return _group_told(evidence, str(evidence.op), axis, own)
    return None


def wrong_dim(evidence: Evidence) -> Diagnosis | None:
    """The transition along another dim gives the right value (or the one found)."""
    places = _DIMS_AT.get(evidence.op or "")
    if places is None or not all(v.dim() for v in evidence.operand(0)):
        return None
    own = tuple(evidence.operand(at)[0] for at in places)
    for dims in _dims(evidence.operand(0)[0].dim(), len(places)):
        if dims == own:
            continue
        values = _along(evidence, places, dims)
        if not (found := evidence.used_and_right(own, dims, values)):
            continue
        used, right = found
        if evidence.op == "slice":
            text = f"The ranks hold slices of {_sliced(used[0])} where slices of {_sliced(right[0])} were meant."
            return Diagnosis("feature_slice", text, {"dims": list(used), "right_dims": list(right)})
        return _dim_told(str(evidence.op), used, right)
    return None


def wrong_gather(evidence: Evidence) -> Diagnosis | None:
    """The all_gather before this node, along another dim or over another group, makes the node's value right."""
    gather = evidence.node.args[0] if evidence.node.args else None
    if not evidence.faithful or not isinstance(gather, fx.Node) or op_name(gather.target) != "all_gather":
        return None
    _, own, size, dim = gather.args
    values = evidence.operand(0)
    if not all(v.dim() > dim and v.shape[dim] % size == 0 for v in values):
        return None
    pieces = [v.chunk(size, dim)[evidence.mesh.index(own, r)] for r, v in enumerate(values)]
    for axis in (own, *_other_axes(evidence, own)):
        for along in range(values[0].dim()):
            if (axis, along) == (own, dim):
                continue
            size = len(evidence.mesh.members(axis, 0))
            moved = evidence.run([[p, axis, size, along] for p in pieces], "all_gather")
            if moved is None or not evidence.is_right(evidence.run(evidence.replaced(0, moved))):
                continue
            if axis == own:
                return _dim_told(f"all_gather ({gather.name})", (dim,), (along,))
            return _group_told(evidence, f"all_gather ({gather.name})", own, axis)
    return None


def mixed_tokens(evidence: Evidence) -> Diagnosis | None:
    """A reduction adds rows that are different tokens on the ranks of its group."""
    source = evidence.node.args[0] if evidence.node.args else None
    if evidence.op not in ("all_reduce", "reduce_scatter") or not evidence.faithful or not isinstance(source, fx.Node):
        return None
    axis = evidence.operand(1)[0]
    members = evidence.mesh.members(axis, evidence.wrong[0])
    layout = source.meta.get("layout")
    placement = layout.on(axis) if isinstance(layout, Layout) else None
    known = [i for m in members if (i := evidence.scene.ids[m]) is not None and len(i)]
    if len(members) == 1:
        return None
    differ = any(not torch.equal(i, known[0]) for i in known) and len({len(i) for i in known}) == 1
    if evidence.op == "all_reduce" and len(known) == len(members) and differ:
        rows = torch.stack(known)
    elif axis == "tp" and (placement == LOCAL or isinstance(placement, Mixed)):
        starts = torch.tensor([evidence.window(m)[0] for m in members]).unsqueeze(1)
        rows = starts + torch.arange(len(evidence.operand(0)[0]))
        rows = torch.where(rows < evidence.tokens.real, rows, -1)
    else:
        return None
    row = int((rows != rows[0]).any(0).nonzero()[0])
    tokens = [f"token {t}" if t >= 0 else "padding" for t in rows[:, row].tolist()]
    which = ", ".join(f"{t} on rank {m}" for t, m in zip(tokens[:4], members))
    text = f"{evidence.op} over {axis} adds rows of different tokens: row {row} is {which}"
    text += ", ..." if len(members) > 4 else "."
    return Diagnosis("mixed_tokens", text, {"group": axis, "row": row, "tokens": rows[:, row].tolist()})


def reduced_twice(evidence: Evidence) -> Diagnosis | None:
    """A reduction of values that were complete on every rank."""
    if evidence.op not in ("all_reduce", "reduce_scatter") or not evidence.faithful or evidence.partial_axes:
        return None
    axis = evidence.operand(1)[0]
    complete = evidence.operand(0) if evidence.op == "all_reduce" else evidence.run(evidence.scene.operands, "slice")
    if not evidence.gives_expected(complete):
        return None
    size = len(evidence.mesh.members(axis, evidence.wrong[0]))
    text = (
        f"The value is {size} x the expected one, {size} being the size of the {axis} group: {evidence.op} adds up "
        "values that were complete on every rank already."
    )
    return Diagnosis("reduced_twice", text, {"factor": size, "group": axis})


def moved_twice(evidence: Evidence) -> Diagnosis | None:
    """A gather, or a cut, of values that were right as they stood."""
    if evidence.op not in ("all_gather", "slice") or not evidence.faithful:
        return None
    axis, size, dim = (evidence.operand(at)[0] for at in (1, 2, 3))
    if not evidence.gives_expected(evidence.operand(0)):
        return None
    kind, what = ("residual_gathered", "gathers") if evidence.op == "all_gather" else ("sliced_twice", "cuts")
    before = evidence.operand(0)[0].shape[dim]
    after = before * size if evidence.op == "all_gather" else -(-before // size)
    text = (
        f"{evidence.op} over {axis} {what} values that were right as they stood: {before} "
        f"{'features' if dim else 'rows'} become {after}."
    )
    return Diagnosis(kind, text, {"group": axis, "dim": dim, "length": after, "right_length": before})


# --- helpers ---------------------------------------------------------------------------------------------------------


def _other_axes(evidence: Evidence, own: str) -> list[str]:
    """Axes whose groups are others than those of `own`."""
    groups = evidence.mesh.groups(own)
    return [axis for axis in evidence.axes() if evidence.mesh.groups(axis) != groups]


def _moved_later(node: fx.Node, axis: str) -> bool:
    """Whether a transition over the axis follows anyway."""
    for user in node.users:
        name = op_name(user.target)
        if (name in MOVES and axis in user.args) or (name in ("pad", "unpad") and _moved_later(user, axis)):
            return True
    return False


def _along(evidence: Evidence, places: tuple[int, ...], dims: tuple[int, ...]) -> Values | None:
    """The transition along other dims. Padding goes with dim 0: added where rows are cut, else removed."""
    tokens, size = evidence.tokens, evidence.operand(2)[0]
    operands: list[list[Any]] = []
    for args in evidence.scene.operands:
        value: Tensor = args[0]
        if dims[0] == 0 and evidence.op != "all_gather" and len(value) % size:
            value = pad_rows(value, 0, -(-len(value) // size) * size)
        if evidence.op == "slice" and dims[0] and len(value) == tokens.padded:
            value = value[: tokens.real]
        moved = [value, *args[1:]]
        for at, dim in zip(places, dims):
            moved[at] = dim
        operands.append(moved)
    values = evidence.run(operands)
    if values is not None and evidence.op == "all_gather" and dims[0] == 0 and not evidence.node.meta.get("padded"):
        values = [v[: tokens.real] if len(v) == tokens.padded else v for v in values]
    return values


def _dims(num_dims: int, places: int) -> Iterator[tuple[int, ...]]:
    for a in range(num_dims):
        if places == 1:
            yield (a,)
        else:
            yield from ((a, b) for b in range(num_dims) if a != b)


def _sliced(dim: int) -> str:
    return f"features (dim {dim})" if dim else "tokens"


def _dim_told(op: str, used: tuple[int, ...], right: tuple[int, ...]) -> Diagnosis:
    words = [" and ".join(map(str, dims)) for dims in (used, right)]
    text = f"{op} runs along dim {words[0]}; along dim {words[1]} it gives the right values."
    return Diagnosis("wrong_dim", text, {"dims": list(used), "right_dims": list(right)})


def _group_told(evidence: Evidence, op: str, used: str, right: str) -> Diagnosis:
    sizes = [len(evidence.mesh.members(axis, 0)) for axis in (used, right)]
    text = (
        f"{op} runs over the {used} group ({sizes[0]} rank{'s' if sizes[0] > 1 else ''}); over the {right} group "
        f"({sizes[1]}) it gives the right values."
    )
    return Diagnosis("wrong_group", text, {"group": used, "right_group": right})
