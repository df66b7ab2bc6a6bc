"""Hypotheses about transitions that are missing: sums, gathers, cuts, padding and its removal.

A missing transition shows at the node behind it: with an operand brought to the layout meant, the value is right.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from emulator.layout.placement import Layout
from emulator.layout.plan import module_pattern
from emulator.ops.registry import LOCAL, Mixed, op_name
from emulator.ops.transition import COLLECTIVES, LOCAL_CUTS, TRANSITIONS, pad_rows
from emulator.verify.hypotheses_moves import Values, total, upstream
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, verb
from emulator.verify.scene import Diagnosis


def not_reduced(evidence: Evidence) -> Diagnosis | None:
    """Partial sums used as if they were complete: added up over a group they give the right value."""
    for op in ("all_reduce", "reduce_scatter"):
        if skipped := _skipped(evidence, op, "not_reduced"):
            return skipped
    for axis in evidence.axes():
        if found := _unsummed_operand(evidence, axis) or _own_share(evidence, axis):
            return found
    return None


def not_gathered(evidence: Evidence) -> Diagnosis | None:
    """A rank's own rows or features used where those of all ranks were meant."""
    if found := _skipped(evidence, "all_gather", "not_gathered") or _joined_windows(evidence):
        return found
    if not evidence.faithful or evidence.op in COLLECTIVES:
        return None
    for axis in evidence.axes():
        for at, value in _activations(evidence):
            for dim in range(value.dim()):
                gathered = _gathered(evidence, evidence.operand(at), axis, dim)
                for cut in (False, True) if dim and axis == "tp" and gathered else (False,):
                    values = _cut(evidence, gathered) if cut and gathered else gathered
                    if values and evidence.is_right(evidence.run(evidence.replaced(at, values))):
                        return _told_ungathered(evidence, at, axis, dim)
    return _other_tokens_features(evidence)


def not_cut(evidence: Evidence) -> Diagnosis | None:
    """All rows used where each rank's own were meant."""
    if not evidence.faithful or evidence.mesh.tp == 1 or evidence.op in (*COLLECTIVES, *LOCAL_CUTS):
        return None
    rows = {at: len(evidence.operand(at)[0]) for at, _ in _with_rows(evidence)}
    for at, num in rows.items():
        usually = _usually_local(evidence, at)
        if usually is False or not any(n < num for n in rows.values()):
            continue
        if evidence.is_right(evidence.run(evidence.replaced(at, _cut(evidence, evidence.operand(at))))):
            own = min(rows.values())
            came = [op_name(n.target) for n in upstream(evidence.node.args[at])]
            kind = "residual_gathered" if "all_gather" in came else "not_sliced"
            why = "it was gathered" if kind == "residual_gathered" else "it was not cut"
            text = (
                f"Operand {evidence.operand_text(at)} holds all {num} rows where each rank's own {own} were meant: "
                f"{why}, and cut to local-token it gives the right values."
            )
            return Diagnosis(kind, text, {"operand": at, "group": "tp", "rows": num, "right_rows": own})
    return None


def padding(evidence: Evidence) -> Diagnosis | None:
    """Rows cut without padding, or padding that was not removed before the node."""
    tokens = evidence.tokens
    if not evidence.faithful or tokens.real == tokens.padded:
        return None
    if evidence.op in ("slice", "reduce_scatter") and evidence.operand(3)[0] == 0:
        rows = len(evidence.operand(0)[0])
        padded = [pad_rows(v, 0, max(tokens.padded, len(v))) for v in evidence.operand(0)]
        if rows < tokens.padded and evidence.is_right(evidence.run(evidence.replaced(0, padded))):
            text = (
                f"{evidence.op} cuts {rows} rows over {tokens.parts} ranks without the padding to {tokens.padded}: the "
                "ranks' rows are of different lengths."
            )
            return Diagnosis("pad_missing", text, {"rows": rows, "right_rows": tokens.padded})
    for at, _ in _with_rows(evidence):
        values = evidence.operand(at)
        if all(len(v) == tokens.padded for v in values):
            removed = [v[: tokens.real] for v in values]
            if evidence.is_right(evidence.run(evidence.replaced(at, removed))):
                moves = [n for n in upstream(evidence.node.args[at]) if op_name(n.target) in TRANSITIONS]
                holds = {"operand": at, "rows": tokens.padded, "right_rows": tokens.real}
                name = f"Operand {evidence.operand_text(at)}"
                if moves and op_name(moves[0].target) == "pad":
                    text = f"{name} is padded to {tokens.padded} rows for a cut to local-token that is missing."
                    return Diagnosis("not_sliced", text, holds)
                if moves and op_name(moves[0].target) == "slice" and moves[0].args[3]:
                    dim, cut = moves[0].args[3], moves[0].name
                    text = f"{name} is a slice of features (dim {dim}, cut by {cut}) of all padded rows, not of tokens."
                    return Diagnosis("feature_slice", text, holds)
                text = (
                    f"{name} still has its padding, {tokens.padded} rows: the first {tokens.real} alone give the right "
                    "values."
                )
                return Diagnosis("pad_leaked", text, holds)
    return None


# --- sums ------------------------------------------------------------------------------------------------------------


def _unsummed_operand(evidence: Evidence, axis: str) -> Diagnosis | None:
    if not evidence.faithful or evidence.op in ("all_reduce", "reduce_scatter"):
        return None
    for at, _ in _activations(evidence):
        values = evidence.operand(at)
        if not _differ_in_group(evidence, values, axis) or len({v.shape for v in values}) > 1:
            continue
        summed = _summed(evidence, values, axis)
        unpadded = [v[: evidence.tokens.real] for v in summed]
        tried = [evidence.run(evidence.replaced(at, v)) for v in (summed, unpadded, _cut(evidence, summed))]
        if evidence.op in ("all_gather", "all_to_all"):  # in place of the reduction
            tried += [summed, unpadded, _cut(evidence, summed)]
        if any(evidence.is_right(v) for v in tried):
            text = (
                f"Operand {evidence.operand_text(at)} is each rank's share of a sum: added up over the {axis} group it "
                "gives the right values, so a reduction is missing."
            )
            return Diagnosis("not_reduced", text, {"operand": at, "group": axis})
    return None


def _own_share(evidence: Evidence, axis: str) -> Diagnosis | None:
    found = evidence.scene.found
    if evidence.partial_axes or evidence.is_local or len({v.shape for v in found}) > 1:
        return None
    if not _differ_in_group(evidence, found, axis) or not evidence.gives_expected(_summed(evidence, found, axis)):
        return None
    text = (
        f"The value is each rank's share of a sum: added up over the {axis} group it is the right one, so it was never "
        "reduced."
    )
    return Diagnosis("not_reduced", text, {"group": axis})


def _skipped(evidence: Evidence, op: str, kind: str) -> Diagnosis | None:
    """A collective that some ranks did not take part in: they hold their operand (or their block of it)."""
    if evidence.op != op or not evidence.healthy:
        return None
    own = evidence.run(evidence.scene.operands, "slice") if op == "reduce_scatter" else evidence.operand(0)
    if not evidence.gives_found(own):
        return None
    axis, wrong = evidence.operand(1)[0], evidence.wrong
    done = "gathered" if op == "all_gather" else "reduced"
    text = (
        f"{ranks_text(wrong, evidence.mesh.size)} {verb(wrong, 'hold')} the operand of {op} as it stood: the value was "
        f"never {done} over the {axis} group there."
    )
    return Diagnosis(kind, text, {"group": axis, "ranks": wrong})


# --- gathers ---------------------------------------------------------------------------------------------------------


def _told_ungathered(evidence: Evidence, at: int, axis: str, dim: int) -> Diagnosis:
    """An operand with a rank's own rows or features; a cut along the wrong dim is named."""
    name = f"Operand {evidence.operand_text(at)}"
    holds = {"operand": at, "group": axis, "dim": dim}
    cut = next((n for n in upstream(evidence.node.args[at]) if op_name(n.target) in ("slice", "reduce_scatter")), None)
    if dim and cut is not None and cut.args[3] == dim:
        if op_name(cut.target) == "slice":
            text = f"{name} is a slice of features (dim {dim}, cut by {cut.name}), not of tokens."
            return Diagnosis("feature_slice", text, holds)
        text = (
            f"{cut.name} (reduce_scatter) runs along dim {dim}, so that {name[0].lower()}{name[1:]} is cut by features."
        )
        return Diagnosis("wrong_dim", text, {"dims": [dim], "right_dims": [0]})
    what = "rows" if dim == 0 else f"features (dim {dim})"
    text = f"{name} holds only each rank's own {what}: gathered over the {axis} group it gives the right values."
    return Diagnosis("not_gathered", text, holds)


def _joined_windows(evidence: Evidence) -> Diagnosis | None:
    """all_gather of features whose rows are other tokens on every rank."""
    reference, size = evidence.scene.reference, evidence.mesh.tp
    if evidence.op != "all_gather" or not evidence.faithful or reference is None or evidence.operand(1)[0] != "tp":
        return None
    dim = evidence.operand(3)[0]
    if not 0 < dim < reference.dim() or reference.shape[dim] % size:
        return None
    for rank in evidence.wrong:
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


def _other_tokens_features(evidence: Evidence) -> Diagnosis | None:
    """An operand of some tokens and some features on every rank, which no gather makes whole."""
    rows = [len(evidence.operand(at)[0]) for at, _ in _with_rows(evidence)]
    for at, layout in _with_rows(evidence) if evidence.raised else ():
        if isinstance(layout.on("tp"), Mixed) and len(evidence.operand(at)[0]) < max(rows):
            text = (
                f"Operand {evidence.operand_text(at)} holds on every rank its own rows, and of these its own features: "
                "the rows were not gathered before they met a shard of the weight."
            )
            return Diagnosis("not_gathered", text, {"operand": at, "group": "tp", "dim": 0})
    return None


# --- operands --------------------------------------------------------------------------------------------------------


def _activations(evidence: Evidence) -> Iterator[tuple[int, Tensor]]:
    """(position, rank 0's value) of the operands of real numbers that have rows."""
    for at, _ in _with_rows(evidence):
        if evidence.operand(at)[0].is_floating_point():
            yield at, evidence.operand(at)[0]


def _with_rows(evidence: Evidence) -> list[tuple[int, Layout]]:
    layouts = evidence.tensors
    return [(at, x) for at, x in layouts if x.kind in ("token", "rows") and evidence.operand(at)[0].dim()]


def _usually_local(evidence: Evidence, at: int) -> bool | None:
    """Whether this operand is local-token at the same place of the other layers; None where there is no answer."""
    node = evidence.node
    pattern, found = module_pattern(node.meta.get("module", "")), set()
    for other in node.graph.nodes:
        same = other is not node and other.target is node.target and len(other.args) == len(node.args)
        if same and module_pattern(other.meta.get("module", "")) == pattern:
            layout = getattr(other.args[at], "meta", {}).get("layout")
            found.add(isinstance(layout, Layout) and layout.on("tp") == LOCAL)
    return found.pop() if len(found) == 1 else None


def _differ_in_group(evidence: Evidence, values: Values, axis: str) -> bool:
    """Whether ranks of a group hold different values: else they are no shares."""
    return any(
        values[m].shape != values[g[0]].shape or not torch.equal(values[m].nan_to_num(), values[g[0]].nan_to_num())
        for g in evidence.mesh.groups(axis)
        for m in g[1:]
    )


def _summed(evidence: Evidence, values: Values, axis: str) -> Values:
    return [total([values[m] for m in evidence.mesh.members(axis, r)]) for r in evidence.ranks]


def _gathered(evidence: Evidence, values: Values, axis: str, dim: int) -> Values | None:
    """Values gathered over a group; padding at the end of the tokens is removed."""
    if not _differ_in_group(evidence, values, axis):
        return None
    joined = []
    for rank in evidence.ranks:
        parts = [values[m] for m in evidence.mesh.members(axis, rank)]
        if len({(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}) > 1:
            return None
        whole = torch.cat(parts, dim)
        joined.append(whole[: evidence.tokens.real] if len(whole) == evidence.tokens.padded else whole)
    return joined


def _cut(evidence: Evidence, values: Values) -> Values:
    """Each rank's rows of full values, padded."""
    size, cut = evidence.mesh.tp, []
    for rank, value in enumerate(values):
        padded: Any = pad_rows(value, 0, -(-len(value) // size) * size)
        cut.append(padded.chunk(size)[evidence.mesh.index("tp", rank)])
    return cut
