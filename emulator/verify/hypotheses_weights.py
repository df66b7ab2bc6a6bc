"""Hypotheses about weights: another shard, the whole for a shard, other values, a bias too many or missing."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Shard

from emulator.layout.placement import Layout
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import local_shard
from emulator.verify.hypotheses_moves import Values
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import constant_factor, factor_text, ranks_text, rows_text, verb
from emulator.verify.rows import Tolerance, locate, spans
from emulator.verify.scene import Diagnosis

_EXACT = Tolerance(0.0, 0.0)


def weight_operand(evidence: Evidence) -> Diagnosis | None:
    """A weight operand is not its rank's part of the whole weight, and with the proper part the value is right."""
    scene = evidence.scene
    operands, told = scene.operands, []
    for at, name, layout, whole in _weights(evidence):
        proper = [local_shard(whole, layout, evidence.mesh, r) for r in evidence.ranks]
        differ = [r for r in evidence.ranks if not _equal(scene.operands[r][at], proper[r])]
        if differ:
            operands = [[*a[:at], proper[r], *a[at + 1 :]] for r, a in enumerate(operands)]
            told.append((at, name, layout, differ, proper))
    if not told or not evidence.faithful or not evidence.gives_expected(evidence.run(operands)):
        return None
    at, name, layout, differ, proper = told[0]
    words: dict[tuple[str, str], list[int]] = {}
    for rank in differ:
        said = _what_it_is(evidence, scene.operands[rank][at], name, layout, rank, proper[rank])
        words.setdefault(said, []).append(rank)
    texts = [
        f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'compute')} with {phrase}"
        for (_, phrase), ranks in words.items()
    ]
    more = f" ({len(told) - 1} more weights of this node are wrong too)" if len(told) > 1 else ""
    kinds = {kind for kind, _ in words}
    return Diagnosis(
        "weight_shard" if kinds == {"weight_shard"} else "weight_value",
        f"{'; '.join(texts)}{more}. With the proper part of the weight the values are right.",
        {"weight": name, "ranks": differ, "layout": str(layout), "found": [phrase for _, phrase in words]},
    )


def weight_placement(evidence: Evidence) -> Diagnosis | None:
    """The weight operand is what the layout says, but another part of the whole weight gives the right value (or, in
    an op that did not do as told, the value found)."""
    mesh = evidence.mesh
    for at, name, layout, whole in _weights(evidence):
        used = evidence.operand(at)
        for words, values in _parts(whole, name, mesh):
            if all(_equal(v, u) for v, u in zip(values, used)):
                continue
            result = evidence.run(evidence.replaced(at, values))
            if evidence.faithful and evidence.gives_expected(result):
                text = f"The ranks compute with {_part_word(name, layout)}; {words} gives the right values."
                return Diagnosis("weight_shard", text, {"weight": name, "layout": str(layout), "right": words})
            if evidence.healthy and evidence.gives_found(result):
                who = f"{ranks_text(evidence.wrong, mesh.size)} {verb(evidence.wrong, 'compute')}"
                text = f"{who} with {words}, not with {_part_word(name, layout)}."
                return Diagnosis("weight_shard", text, {"weight": name, "ranks": evidence.wrong, "found": words})
        if found := _other_shard_used(evidence, at, name, layout, whole):
            return found
    return None


def table_start(evidence: Evidence) -> Diagnosis | None:
    """Token ids looked up as if this rank's block of the table were another rank's."""
    scene = evidence.scene
    if evidence.op != "embedding" or not evidence.healthy:
        return None
    wrong = [r for r in evidence.ranks if not evidence.gives_found(evidence.run(scene.operands), [r])]
    taken = {}
    for rank in wrong:
        for other in evidence.ranks:
            value = evidence.run_as(rank, other)
            if value is not None and evidence.close(value, scene.found[rank], rank):
                taken[rank] = other
                break
    if not wrong or len(taken) < len(wrong):
        return None
    words = "; ".join(f"Rank {r} looks ids up as if it held rank {o}'s rows of the table" for r, o in taken.items())
    return Diagnosis("weight_shard", words + ".", {"ranks": wrong, "as_ranks": list(taken.values())})


def bias_count(evidence: Evidence) -> Diagnosis | None:
    """found - expected is a whole multiple of the linear's bias."""
    bias, name = _bias_of(evidence.node, evidence)
    if bias is None or int((bias != 0).sum()) < 2 or not evidence.all_compared():
        return None
    times: dict[int, int] = {}
    for rank, held, want in evidence.wrong_ranks():
        added = _fit(bias, held.shape[-1], evidence, rank)
        if added is None or not (power := float((added.double() ** 2).sum()) * held[..., 0].numel()):
            return None
        difference = held.double() - want.double()
        factor = float((difference * added.double()).sum()) / power
        count = round(factor) if factor == factor else 0
        if not count or not evidence.close((want.double() + count * added.double()).to(held.dtype), held, rank):
            return None
        times[rank] = count
    texts = []
    for count in sorted(set(times.values())):
        ranks = [r for r, c in times.items() if c == count]
        words = verb(ranks, "lack") if count == -1 else f"{verb(ranks, 'hold')} {count + 1} times"
        if evidence.partial_axes:
            had = "lacks" if count == -1 else f"holds {count + 1} times"
            texts.append(f"The sum over the {evidence.partial_axes[0]} group {had} the bias {name}")
        else:
            texts.append(f"{ranks_text(ranks, evidence.mesh.size)} {words} the bias {name}")
    return Diagnosis(
        "bias_count",
        f"{'; '.join(texts)} (it belongs in once).",
        {"bias": name, "times": {str(r): c + 1 for r, c in times.items()}},
    )


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(evidence: Evidence) -> Iterator[tuple[int, str, Layout, Tensor]]:
    """(position, name, layout, whole weight) of the operands that are parameters."""
    for at, layout in evidence.tensors:
        argument = evidence.node.args[at]
        whole = evidence.scene.weights.get(str(argument.target)) if argument.op == "get_attr" else None
        if whole is not None and _divides(whole, layout, evidence.mesh):
            yield at, str(argument.target), layout, whole


def _divides(whole: Tensor, layout: Layout, mesh: Mesh) -> bool:
    """Whether a weight of this shape can be placed so."""
    shards = [(axis, p.dim) for axis, p in layout.placements if isinstance(p, Shard)]
    return all(dim < whole.dim() and whole.shape[dim] % mesh.sizes[axis] == 0 for axis, dim in shards)


def _equal(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(value.double(), other.double())


def _parts(whole: Tensor, name: str, mesh: Mesh) -> Iterator[tuple[str, Values]]:
    """The parts of a weight that the ranks could hold: (words, value by rank)."""
    yield f"the whole of {name}", [whole] * mesh.size
    for axis in mesh.names:
        size = len(mesh.groups(axis)[0])
        if size == 1:
            continue
        for dim in range(whole.dim()):
            if whole.shape[dim] % size == 0:
                shards = whole.chunk(size, dim)
                yield f"its {axis} shard of {name} (dim {dim})", [shards[mesh.index(axis, r)] for r in range(mesh.size)]


def _part_word(name: str, layout: Layout) -> str:
    return f"the whole of {name}" if str(layout) == "replicated" else f"{name} as {layout}"


def _other_shard_used(evidence: Evidence, at: int, name: str, layout: Layout, whole: Tensor) -> Diagnosis | None:
    """An op that worked with another rank's shard than the one it was given."""
    if not evidence.healthy or not layout.placements:
        return None
    axis = layout.placements[0][0]
    taken: dict[int, int] = {}
    for rank in evidence.wrong:
        for other in evidence.mesh.members(axis, rank):
            shard = local_shard(whole, layout, evidence.mesh, other)
            values = evidence.run(evidence.replaced(at, [shard] * evidence.mesh.size))
            if other != rank and evidence.gives_found(values, [rank]):
                taken[rank] = other
    if len(taken) < len(evidence.wrong):
        return None
    text = "; ".join(f"Rank {r} computes with rank {o}'s shard of {name} ({layout})" for r, o in taken.items()) + "."
    return Diagnosis("weight_shard", text, {"weight": name, "ranks": evidence.wrong, "as_ranks": list(taken.values())})


def _what_it_is(
    evidence: Evidence, value: Tensor, name: str, layout: Layout, rank: int, proper: Tensor
) -> tuple[str, str]:
    """(kind, words) of a weight operand that is not its rank's part."""
    whole, mesh = evidence.scene.weights[name], evidence.mesh
    if _equal(value, whole):
        return "weight_shard", f"the whole of {name} where its shard ({layout}) was meant"
    for axis in mesh.names:
        members = mesh.members(axis, rank)
        for dim in range(whole.dim() if len(members) > 1 else 0):
            shards = whole.chunk(len(members), dim)
            order = sorted(range(len(shards)), key=lambda i: i != mesh.index(axis, rank))
            for i in order:
                if _equal(value, shards[i]):
                    whose = "its own" if members[i] == rank else f"rank {members[i]}'s"
                    meant = "the whole" if str(layout) == "replicated" else f"its {layout}"
                    same_dim = any(p == Shard(dim) for _, p in layout.placements)
                    also = "" if whose != "its own" and same_dim else f" where {meant} was meant"
                    return "weight_shard", f"{whose} shard of {name} (dim {dim}){also}"
    for other, weight in evidence.scene.weights.items():
        if other != name and (_equal(value, weight) or _equal_part(value, weight, layout, mesh, rank)):
            return "weight_value", f"{other} in place of {name}"
    return "weight_value", f"{name} {_difference(value, proper, whole)}"


def _equal_part(value: Tensor, weight: Tensor, layout: Layout, mesh: Mesh, rank: int) -> bool:
    return _divides(weight, layout, mesh) and _equal(value, local_shard(weight, layout, mesh, rank))


def _difference(value: Tensor, proper: Tensor, whole: Tensor) -> str:
    """How a weight differs from the proper one: "... all zeros", "... times 2", "... with rows permuted"."""
    if value.shape != proper.shape:
        if value.shape[1:] == whole.shape[1:]:
            at = locate(value, whole, 0, _EXACT)
            if all(i is not None for i in at):
                return f"cut to {rows_text([i for i in at if i is not None])} of the whole"
        return f"of shape {list(value.shape)} where {list(proper.shape)} was meant"
    if not value.any():
        return "as all zeros"
    if value.dim() == 2 and value.shape[0] == value.shape[1] and _equal(value, proper.t()):
        return "transposed"
    differ = value.double() != proper.double()
    where, (bad, want) = "", (value, proper)
    for dim, unit in enumerate(("row", "column")[: value.dim()]):
        lines = differ.movedim(dim, 0).reshape(value.shape[dim], -1).any(-1).nonzero().flatten()
        if len(lines) < value.shape[dim]:
            where += f" in {rows_text(lines.tolist(), unit)}"
            bad, want = bad.index_select(dim, lines), want.index_select(dim, lines)
    if not bad.any():
        return f"with zeros{where}"
    if factor := constant_factor(bad, want, 1e-7 * float(want.abs().max())):
        return f"times {factor_text(factor)}{where}"
    for dim, unit in enumerate(("row", "column")[: value.dim()]):
        at = locate(value.movedim(dim, 0), proper.movedim(dim, 0), 0, _EXACT)
        known = [i for i in at if i is not None]
        if len(known) == len(at) and len(at) > 1:
            if known == list(range(len(at)))[::-1]:
                return f"with its {unit}s reversed"
            if known == [(i + known[0]) % len(at) for i in range(len(at))]:
                return f"with its {unit}s rotated by {known[0]}"
            moved = [i for i, j in enumerate(at) if i != j]
            return f"with {unit}s {spans([at[i] for i in moved])} in place of {spans(moved)}"
    largest = float((value.double() - proper.double()).abs().nan_to_num(float("inf")).max())
    return f"with other values{where} (largest difference {largest:.3g})"


# --- bias ------------------------------------------------------------------------------------------------------------


def _bias_of(node: fx.Node, evidence: Evidence) -> tuple[Tensor | None, str]:
    """The bias of the linear that made this value, behind transitions, and its name."""
    while op_name(node.target) in TRANSITIONS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if op_name(node.target) != "linear":
        return None, ""
    given = node.args[2] if len(node.args) > 2 else None
    weight = node.args[1]
    if isinstance(given, fx.Node) and given.op == "get_attr":
        name = str(given.target)
    elif isinstance(weight, fx.Node) and weight.op == "get_attr" and str(weight.target).endswith(".weight"):
        name = str(weight.target).removesuffix("weight") + "bias"
    else:
        return None, ""
    return evidence.scene.weights.get(name), name


def _fit(bias: Tensor, width: int, evidence: Evidence, rank: int) -> Tensor | None:
    """The part of the bias that belongs to a value of this width on this rank."""
    if len(bias) == width:
        return bias
    if len(bias) == width * evidence.mesh.tp:
        return bias.chunk(evidence.mesh.tp)[evidence.mesh.index("tp", rank)]
    return None
