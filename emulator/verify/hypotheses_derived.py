"""Operands made of weights alone (absorbed projections, gathered shards): what they should be, made again from the
whole weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.ops.registry import op_name
from emulator.runtime.rank_weights import local_shard
from emulator.verify.hypotheses_moves import MOVES, Values, transition
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, verb
from emulator.verify.scene import Diagnosis


def derived_weight(evidence: Evidence) -> Diagnosis | None:
    """An operand is not what its weights give, and with what they give the value is right."""
    if not evidence.faithful:
        return None
    operands, differ, names = evidence.scene.operands, set[int](), []
    for at, layout in evidence.tensors:
        argument = evidence.node.args[at]
        if layout.kind != "weight" or argument.op == "get_attr":
            continue
        proper = _values(evidence, argument, list(evidence.ranks))
        if proper is None:
            continue
        wrong = {r for r in evidence.ranks if not _same(operands[r][at], proper[r])}
        if wrong:
            operands = [[*a[:at], proper[r], *a[at + 1 :]] for r, a in enumerate(operands)]
            differ |= wrong
            names += [name for name in _weights_behind(argument) if name not in names]
    if not differ or not evidence.gives_expected(evidence.run(operands)):
        return None
    taken = {rank: _taken_from(evidence, rank) for rank in sorted(differ)}
    texts, joined = [], ", ".join(names)
    for source in dict.fromkeys(taken.values()):
        ranks = [r for r, s in taken.items() if s == source]
        who = f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'compute')} with"
        texts.append(f"{who} {source} of {joined}" if source else f"{who} operands that do not come from {joined}")
    text = f"{'; '.join(texts)}. With the proper part the values are right."
    kind = "weight_shard" if all(taken.values()) else "weight_value"
    return Diagnosis(kind, text, {"weights": names, "ranks": sorted(differ), "found": list(taken.values())})


def _values(evidence: Evidence, node: Any, as_ranks: Sequence[int | None]) -> Values | None:
    """A value made of weights, on every rank; as_ranks: the rank whose shards each rank takes, None for whole weights.
    None when activations are in it."""
    if node.op == "get_attr":
        whole, layout = evidence.scene.weights.get(str(node.target)), node.meta.get("layout")
        if whole is None or not isinstance(layout, Layout):
            return None
        return [whole if r is None else local_shard(whole, layout, evidence.mesh, r) for r in as_ranks]
    if node.op != "call_function" or node.kwargs:
        return None
    arguments: list[list[Any]] = [[] for _ in as_ranks]
    for argument in node.args:
        values: Any = [argument] * len(as_ranks)
        if isinstance(argument, fx.Node):
            values = _values(evidence, argument, as_ranks)
            if values is None:
                return None
        for mine, value in zip(arguments, values):
            mine.append(value)
    name = op_name(node.target)
    try:
        if name in MOVES:
            return transition(str(name), arguments, evidence.mesh)
        return [node.target(*mine) for mine in arguments]
    except RuntimeError:  # another rank's part, or the whole, does not fit
        return None


def _taken_from(evidence: Evidence, rank: int) -> str:
    """Which part of the weights gives this rank's operands; empty for none."""
    places = [at for at, layout in evidence.tensors if layout.kind == "weight"]
    for other in (*evidence.ranks, None):
        as_ranks = [other if r == rank else r for r in evidence.ranks]
        made = [_values(evidence, evidence.node.args[at], as_ranks) for at in places]
        if all(v is None or _same(evidence.operand(at)[rank], v[rank]) for at, v in zip(places, made)):
            return "the whole" if other is None else f"rank {other}'s part"
    return ""


def _weights_behind(node: fx.Node) -> list[str]:
    if node.op == "get_attr":
        return [str(node.target)]
    return [name for source in node.all_input_nodes for name in _weights_behind(source)]


def _same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and bool((value == other).all())
