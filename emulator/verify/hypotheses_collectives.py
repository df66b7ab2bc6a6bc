"""Hypotheses about who talks to whom: reductions too many or too few, gathers, groups, dims, and tokens that mix.

Each takes the evidence and returns a diagnosis, or None when it does not hold.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.ops.registry import LOCAL, Mixed, op_name
from emulator.ops.transition import COLLECTIVES, pad_rows
from emulator.verify.hypotheses_rerun import MOVES, Evidence, Values, total, transition, upstream
from emulator.verify.hypotheses_words import ranks_text, verb
from emulator.verify.scene import Diagnosis

_DIMS_AT = {"reduce_scatter": (3,), "all_gather": (3,), "slice": (3,), "all_to_all": (3, 4)}


def wrong_group(evidence: Evidence) -> Diagnosis | None:
    """The transition, over the groups of another axis, gives the right value (or the one found)."""
    if evidence.op not in MOVES:
        return None
    at = 3 if evidence.op == "all_to_all_rows" else 1
    own = evidence.operand(at)[0]
    groups = evidence.mesh.groups(own)
    for axis in evidence.axes():
        if evidence.mesh.groups(axis) == groups:
            continue
        size = len(evidence.mesh.groups(axis)[0])
        operands = [[*a[:at], axis, size, *a[at + 2 :]] for a in evidence.scene.operands]
        values = evidence.run(operands)
        completes = axis in evidence.partial_axes and not _reduced_later(evidence.node, axis)
        if evidence.faithful and (evidence.gives_expected(values) or (completes and evidence.gives_reference(values))):
            used, right = own, axis
        elif evidence.healthy and evidence.gives_found(values):
            used, right = axis, own
        else:
            continue
        sizes = f"{len(evidence.mesh.members(used, 0))} ranks instead of {len(evidence.mesh.members(right, 0))}"
        text = f"{evidence.op} runs over the {used} group ({sizes}); over the {right} group it gives the right values."
        return Diagnosis("wrong_group", text, {"group": used, "right_group": right})
    return None


def wrong_dim(evidence: Evidence) -> Diagnosis | None:
    """The transition along another dim gives the right value (or the one found)."""
    if evidence.op == "unpad" and evidence.faithful:
        return _gathered_along(evidence)
    places = _DIMS_AT.get(evidence.op or "")
    if places is None or not all(v.dim() for v in evidence.operand(0)):
        return None
    num_dims = evidence.operand(0)[0].dim()
    own = tuple(evidence.operand(at)[0] for at in places)
    pairs = [(d,) for d in range(num_dims)] if len(places) == 1 else _pairs(num_dims)
    for dims in pairs:
        if dims == own:
            continue
        values = _along(evidence, places, dims)
        if evidence.faithful and evidence.gives_expected(values):
            used, right = own, dims
        elif evidence.healthy and evidence.gives_found(values):
            used, right = dims, own
        else:
            continue
        holds: dict[str, Any] = {"op": evidence.op, "dims": list(used), "right_dims": list(right)}
        if evidence.op == "slice":
            words = {0: "tokens"}
            text = (
                f"The ranks hold slices of {words.get(used[0], f'features (dim {used[0]})')} where slices of "
                f"{words.get(right[0], f'features (dim {right[0]})')} were meant."
            )
            return Diagnosis("feature_slice", text, holds)
        text = f"{evidence.op} runs along dim {_dims(used)}; along dim {_dims(right)} it gives the right values."
        return Diagnosis("wrong_dim", text, holds)
    return None


def _gathered_along(evidence: Evidence) -> Diagnosis | None:
    """Padding cannot be removed behind a gather along another dim than that of the tokens."""
    gather = evidence.node.args[0]
    if not isinstance(gather, fx.Node) or op_name(gather.target) != "all_gather" or not gather.args[3]:
        return None
    _, _, size, dim = gather.args
    joined = [torch.cat(v.chunk(size, dim)) if v.dim() > dim else v for v in evidence.operand(0)]
    if not evidence.gives_expected(evidence.run(evidence.replaced(0, joined))):
        return None
    text = f"{gather.name} (all_gather) runs along dim {dim}; along dim 0 it gives the right values."
    return Diagnosis("wrong_dim", text, {"op": "all_gather", "dims": [dim], "right_dims": [0]})


def mixed_tokens(evidence: Evidence) -> Diagnosis | None:
    """A reduction adds rows that are different tokens on the ranks of its group."""
    source = evidence.node.args[0] if evidence.node.args else None
    if evidence.op not in ("all_reduce", "reduce_scatter") or not evidence.faithful or not isinstance(source, fx.Node):
        return None
    axis = evidence.operand(1)[0]
    members = evidence.mesh.members(axis, evidence.scene.wrong[0])
    if len(members) == 1:
        return None
    layout = source.meta.get("layout")
    placement = layout.on(axis) if isinstance(layout, Layout) else None
    local = placement == LOCAL or isinstance(placement, Mixed)
    ids = [evidence.scene.ids[m] for m in members]
    known = [i for i in ids if i is not None and len(i)]
    if evidence.op == "all_reduce" and len(known) == len(ids) and any(not torch.equal(i, known[0]) for i in known):
        rows = torch.stack(known)
    elif local and axis == "tp":
        per = len(evidence.operand(0)[0])
        starts = torch.tensor([evidence.window(m)[0] for m in members]).unsqueeze(1)
        rows = starts + torch.arange(per)
        rows = torch.where(rows < evidence.tokens.real, rows, -1)
    else:
        return None
    row = int((rows != rows[0]).any(0).nonzero()[0])
    tokens = [f"token {t}" if t >= 0 else "padding" for t in rows[:, row].tolist()]
    text = (
        f"{evidence.op} over {axis} adds rows of different tokens: row {row} is "
        f"{', '.join(f'{t} on rank {m}' for t, m in zip(tokens[:4], members))}{', ...' if len(members) > 4 else ''}."
    )
    return Diagnosis("mixed_tokens", text, {"group": axis, "row": row, "tokens": rows[:, row].tolist()})


def reduced_twice(evidence: Evidence) -> Diagnosis | None:
    """A reduction of values that were complete on every rank."""
    if evidence.op not in ("all_reduce", "reduce_scatter") or not evidence.faithful or evidence.partial_axes:
        return None
    axis = evidence.operand(1)[0]
    values = evidence.operand(0)
    if evidence.op == "reduce_scatter":
        values = transition("slice", evidence.scene.operands, evidence.mesh)
    if not evidence.gives_expected(values):
        return None
    size = len(evidence.mesh.members(axis, evidence.scene.wrong[0]))
    text = (
        f"The value is {size} x the expected one, {size} being the size of the {axis} group: {evidence.op} adds up "
        "values that were complete on every rank already."
    )
    return Diagnosis("reduced_twice", text, {"factor": size, "group": axis})


def not_reduced(evidence: Evidence) -> Diagnosis | None:
    """Partial sums used as if they were complete: added up over a group they give the right value."""
    for axis in evidence.axes():
        if found := _unsummed_operand(evidence, axis) or _own_share(evidence, axis) or _joined(evidence, axis):
            return found
    return None


def not_gathered(evidence: Evidence) -> Diagnosis | None:
    """A rank's own rows or features used where those of all ranks were meant."""
    if found := _skipped(evidence, "all_gather", "not_gathered") or _joined_windows(evidence):
        return found
    for axis in evidence.axes():
        for at, value in _float_operands(evidence):
            for dim in range(value.dim()):
                gathered = _gathered(evidence, at, axis, dim)
                if not evidence.faithful or not gathered or not _is_right(evidence, evidence.run(gathered)):
                    continue
                cut = next((n for n in upstream(evidence.node.args[at]) if op_name(n.target) == "slice"), None)
                holds = {"operand": at, "group": axis, "dim": dim}
                name = f"Operand `{evidence.name_of(at)}`"
                if dim and cut is not None and cut.args[3]:
                    text = f"{name} is a slice of features (dim {dim}, cut by {cut.name}), not of tokens."
                    return Diagnosis("feature_slice", text, holds)
                what = "rows" if dim == 0 else f"features (dim {dim})"
                text = (
                    f"{name} holds only each rank's own {what}: gathered over the {axis} group it gives the right values."
                )
                return Diagnosis("not_gathered", text, holds)
    return None


def gathered_again(evidence: Evidence) -> Diagnosis | None:
    """Rows that grew by a gather of values that were full already, or that should have stayed local."""
    size = evidence.mesh.tp
    if size == 1:
        return None
    if evidence.op == "all_gather" and evidence.faithful and evidence.gives_expected(evidence.operand(0)):
        before, after = len(evidence.operand(0)[0]), len(evidence.scene.found[0])
        axis = evidence.operand(1)[0]
        text = (
            f"all_gather over {axis} gathers values that were right as they stood: {before} rows become {after} "
            f"({after // max(before, 1)} x, the size of the {axis} group)."
        )
        return Diagnosis("residual_gathered", text, {"group": axis, "rows": after, "right_rows": before})
    for at, value in _float_operands(evidence):
        others = [len(v) for i, v in _float_operands(evidence) if i != at]
        if not evidence.faithful or not any(n < len(value) for n in others) or evidence.op == "slice":
            continue
        cut = evidence.replaced(at, _cut_rows(evidence, evidence.operand(at), "tp"))
        if evidence.gives_expected(evidence.run(cut)):
            text = (
                f"Operand `{evidence.name_of(at)}` holds {len(value)} rows where each rank's own {min(others)} were "
                "meant: it was gathered over the tp group, and cut to local-token it gives the right values."
            )
            return Diagnosis(
                "residual_gathered", text, {"operand": at, "group": "tp", "rows": len(value), "right_rows": min(others)}
            )
    return None


# --- partial sums ----------------------------------------------------------------------------------------------------


def _unsummed_operand(evidence: Evidence, axis: str) -> Diagnosis | None:
    if not evidence.faithful or evidence.op in ("all_reduce", "reduce_scatter"):
        return None
    for at, _ in _float_operands(evidence):
        values = evidence.operand(at)
        if not _differ_in_group(evidence, values, axis):
            continue
        summed = _summed(evidence, values, axis)
        if summed and _is_right(evidence, evidence.run(evidence.replaced(at, summed))):
            text = (
                f"Operand `{evidence.name_of(at)}` is each rank's share of a sum: added up over the {axis} group it gives "
                "the right values, so a reduction is missing before this node."
            )
            return Diagnosis("not_reduced", text, {"operand": at, "group": axis})
    return None


def _own_share(evidence: Evidence, axis: str) -> Diagnosis | None:
    for op in ("all_reduce", "reduce_scatter"):
        if skipped := _skipped(evidence, op, "not_reduced"):
            return skipped
    found = evidence.scene.found
    if evidence.partial_axes or evidence.is_local or not _differ_in_group(evidence, found, axis):
        return None
    summed = _summed(evidence, found, axis)
    if not summed or not evidence.gives_expected(summed):
        return None
    text = (
        f"The value is each rank's share of a sum: added up over the {axis} group it is the right one, so it was never "
        "reduced."
    )
    return Diagnosis("not_reduced", text, {"group": axis})


def _joined(evidence: Evidence, axis: str) -> Diagnosis | None:
    """all_gather, or nothing but a cut, where a reduction was meant."""
    if evidence.op not in ("all_gather", "all_to_all") or not evidence.faithful:
        return None
    summed = _summed(evidence, evidence.operand(0), axis)
    if not summed or not _differ_in_group(evidence, evidence.operand(0), axis):
        return None
    for values in (summed, _cut_rows(evidence, summed, axis)):
        if evidence.gives_expected(values):
            text = f"{evidence.op} joins partial sums that the {axis} group should add up."
            return Diagnosis("not_reduced", text, {"group": axis, "op": evidence.op})
    return None


def _reduced_later(node: fx.Node, axis: str) -> bool:
    """Whether a reduction over the axis follows anyway."""
    for user in node.users:
        name = op_name(user.target)
        if name in ("all_reduce", "reduce_scatter"):
            if user.args[1] == axis:
                return True
        elif name == "pad" and _reduced_later(user, axis):
            return True
    return False


def _joined_windows(evidence: Evidence) -> Diagnosis | None:
    """all_gather of features whose rows are other tokens on every rank."""
    reference = evidence.scene.reference
    if evidence.op != "all_gather" or not evidence.faithful or reference is None or evidence.operand(1)[0] != "tp":
        return None
    dim, size = evidence.operand(3)[0], evidence.mesh.tp
    if not 0 < dim < reference.dim() or reference.shape[dim] % size:
        return None
    for rank in evidence.scene.wrong:
        blocks = evidence.scene.found[rank].chunk(size, dim)
        for index, (block, right) in enumerate(zip(blocks, reference.chunk(size, dim))):
            window = right[slice(*evidence.tokens.window(index))]
            if len(block) != evidence.tokens.per or not evidence.close(block[: len(window)], window, rank):
                return None
    text = (
        f"all_gather along dim {dim} joins features of different tokens: every rank's rows are its own, they were not "
        "gathered before."
    )
    return Diagnosis("not_gathered", text, {"group": "tp", "dim": 0})


def _skipped(evidence: Evidence, op: str, kind: str) -> Diagnosis | None:
    """A collective that some ranks did not take part in: they hold their operand (or their block of it)."""
    if evidence.op != op or not evidence.healthy:
        return None
    own: Values = evidence.operand(0)
    if op == "reduce_scatter":
        own = transition("slice", evidence.scene.operands, evidence.mesh)
    if not evidence.gives_found(own):
        return None
    axis = evidence.operand(1)[0]
    who = f"{ranks_text(evidence.scene.wrong, evidence.mesh.size)} {verb(evidence.scene.wrong, 'hold')}"
    done = "gathered" if op == "all_gather" else "reduced"
    text = f"{who} the operand of {op} as it stood: the value was never {done} over the {axis} group there."
    return Diagnosis(kind, text, {"group": axis, "ranks": evidence.scene.wrong})


def _is_right(evidence: Evidence, values: Values | None) -> bool:
    """Right by the layout; or whole, where operands that do not fit make the layout a guess."""
    return evidence.gives_expected(values) or (evidence.raised and evidence.gives_reference(values))


def _summed(evidence: Evidence, values: Values, axis: str) -> Values | None:
    if len({v.shape for v in values}) > 1:
        return None
    return [total([values[m] for m in evidence.mesh.members(axis, r)]) for r in evidence.ranks]


def _differ_in_group(evidence: Evidence, values: Values, axis: str) -> bool:
    """Whether ranks of a group hold different values: else their sum says nothing about shares."""
    return any(
        values[m].shape != values[g[0]].shape or not torch.equal(values[m].nan_to_num(), values[g[0]].nan_to_num())
        for g in evidence.mesh.groups(axis)
        for m in g[1:]
    )


# --- cutting and gathering -------------------------------------------------------------------------------------------


def _gathered(evidence: Evidence, at: int, axis: str, dim: int) -> list[list[Any]] | None:
    """The operands with one of them gathered over a group; padding at the end of the tokens is removed."""
    values = evidence.operand(at)
    if evidence.op in COLLECTIVES or not _differ_in_group(evidence, values, axis):
        return None
    joined = []
    for rank in evidence.ranks:
        parts = [values[m] for m in evidence.mesh.members(axis, rank)]
        if len({(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}) > 1:
            return None
        whole = torch.cat(parts, dim)
        joined.append(whole[: evidence.tokens.real] if dim == 0 and len(whole) == evidence.tokens.padded else whole)
    return evidence.replaced(at, joined)


def _cut_rows(evidence: Evidence, values: Values, axis: str) -> Values:
    """Each rank's rows of full values, padded as the layout has it."""
    cut = []
    for rank, value in enumerate(values):
        size = len(evidence.mesh.members(axis, rank))
        padded = pad_rows(value, 0, -(-len(value) // size) * size)
        cut.append(padded.chunk(size)[evidence.mesh.index(axis, rank)])
    return cut


def _along(evidence: Evidence, places: tuple[int, ...], dims: tuple[int, ...]) -> Values | None:
    """The transition along other dims. Padding goes with dim 0, so it is removed before and added where it is needed."""
    operands = []
    size = evidence.operand(2)[0]
    for args in evidence.scene.operands:
        value = args[0]
        if dims[0] == 0 and evidence.op != "all_gather" and len(value) % size:
            value = pad_rows(value, 0, -(-len(value) // size) * size)
        if evidence.op == "slice" and dims[0] and len(value) == evidence.tokens.padded:
            value = value[: evidence.tokens.real]
        args = [value, *args[1:]]
        for at, dim in zip(places, dims):
            args[at] = dim
        operands.append(args)
    values = evidence.run(operands)
    if values is not None and evidence.op == "all_gather" and dims[0] == 0 and not evidence.node.meta.get("padded"):
        values = [v[: evidence.tokens.real] if len(v) == evidence.tokens.padded else v for v in values]
    return values


def _float_operands(evidence: Evidence) -> Iterator[tuple[int, Tensor]]:
    """(position, rank 0's value) of the activations with rows."""
    for at, layout in evidence.operand_layouts():
        value = evidence.operand(at)[0]
        if layout.kind in ("token", "rows") and value.is_floating_point() and value.dim():
            yield at, value


def _pairs(num_dims: int) -> list[tuple[int, ...]]:
    return [(a, b) for a in range(num_dims) for b in range(num_dims) if a != b]


def _dims(dims: tuple[int, ...]) -> str:
    return " and ".join(map(str, dims))
