"""Why a node's value is wrong: hypotheses tested on the data of all ranks, most specific first.

A hypothesis holds when it explains every wrong rank within the tolerance. Most run the node again: with what they
suppose was meant, and find the right value, or with what they suppose happened, and find the value found.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from emulator.verify import hypotheses_collectives as collectives
from emulator.verify import hypotheses_derived as derived
from emulator.verify import hypotheses_inputs as inputs
from emulator.verify import hypotheses_missing as missing
from emulator.verify import hypotheses_positions as positions
from emulator.verify import hypotheses_rows as rows
from emulator.verify import hypotheses_values as values
from emulator.verify import hypotheses_weights as weights
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text
from emulator.verify.scene import Diagnosis, Scene

# slug -> what it says
KINDS = {
    "reduced_twice": "complete values were summed over a group",
    "not_reduced": "partial sums were used as if they were complete",
    "mixed_tokens": "a reduction added rows of different tokens",
    "wrong_group": "a collective ran over another axis' group",
    "wrong_dim": "a collective ran along another dim",
    "not_gathered": "a rank's own rows or features were used where those of all ranks were meant",
    "not_sliced": "all rows were used where a rank's own were meant",
    "residual_gathered": "rows grew by a gather too many",
    "sliced_twice": "rows that were a rank's own were cut again",
    "feature_slice": "a slice of features in place of a slice of tokens, or the reverse",
    "window_shift": "rows are those of another window, or shifted",
    "rows_permuted": "the right rows in another order",
    "stale_rows": "rows of another known value (layer, step, neighbour)",
    "pad_leaked": "padding among the real rows",
    "pad_missing": "rows were cut without padding",
    "bias_count": "a bias is missing or added several times",
    "weight_shard": "another part of a weight than the one meant",
    "weight_value": "a weight has other values than the checkpoint's",
    "local_ids": "ids are local where global ones were meant, or the reverse",
    "wrong_positions": "rows were rotated or masked by other positions",
    "wrong_metadata": "lengths, slots, block table, mask or ids are wrong",
    "wrong_eps": "a norm has another eps",
    "wrong_constant": "an op has another constant argument",
    "scaled": "a constant multiple of the expected value",
    "unknown": "no hypothesis holds",
}

HYPOTHESES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    # facts about operands, each shown to be the cause
    weights.bias_count,
    weights.weight_operand,
    derived.derived_weight,
    inputs.ranks_disagree,
    # who talks to whom
    collectives.wrong_group,
    collectives.wrong_dim,
    collectives.mixed_tokens,
    collectives.reduced_twice,
    collectives.moved_twice,
    collectives.wrong_gather,
    missing.not_reduced,
    missing.padding,
    missing.not_cut,
    missing.not_gathered,
    # what the node was told, or did instead
    positions.local_ids,
    positions.wrong_positions,
    inputs.wrong_numbers,
    inputs.wrong_eps,
    weights.table_start,
    weights.weight_placement,
    # what the value is
    rows.wrong_row_count,
    rows.feature_slice,
    rows.rotated,
    rows.named_order,
    rows.window_shift,
    rows.rows_permuted,
    values.stale_rows,
    values.stale_operand,
    values.pad_leaked,
    inputs.wrong_constant,
    values.scaled,
)


def diagnose(scene: Scene) -> Diagnosis:
    """The first hypothesis that holds; kind "unknown" with statistics when none does."""
    evidence = Evidence(scene)
    if scene.tokens.order != "contiguous":  # the hypotheses speak of one window per rank
        return _statistics(evidence) if evidence.compared else _shapes(evidence)
    for hypothesis in HYPOTHESES:
        if found := hypothesis(evidence):
            assert found.kind in KINDS, found.kind
            return found
    return _statistics(evidence) if evidence.compared else _shapes(evidence)


def _shapes(evidence: Evidence) -> Diagnosis:
    """No wrong rank has a value of the right shape."""
    rank = evidence.wrong[0]
    want, shape = evidence.want[rank], list(evidence.scene.found[rank].shape)
    what = f"the value of rank {rank} has shape {shape}"
    if evidence.raised:
        operands = [f"{evidence.name_of(at)} {list(evidence.operand(at)[rank].shape)}" for at, _ in evidence.tensors]
        what = f"the node does not run on its operands (rank {rank}: {', '.join(operands)})"
    elif want is not None:
        what += f", expected {list(want.shape)}"
    text = f"No hypothesis holds on {_who(evidence)}: {what}."
    return Diagnosis("unknown", text, {"ranks": evidence.wrong, "shape": shape})


def _statistics(evidence: Evidence) -> Diagnosis:
    rank, held, want = next(evidence.wrong_ranks())
    differ = ~evidence.tolerance(rank).close(held, want)
    num_wrong = int(differ.reshape(len(held), -1).any(-1).sum())
    first = differ.nonzero()[0].tolist() if differ.any() else [0] * held.dim()
    at = tuple(first)
    error, ratio, correlation = _numbers(held, want)
    numbers = [
        f"{name} {number:.4g}"
        for name, number in (("largest error", error), ("median ratio", ratio), ("correlation", correlation))
        if number is not None
    ]
    if not held.is_floating_point() and (held - want).unique().numel() == 1:
        numbers.append("the same difference everywhere")
    did = ""
    if evidence.faithful:
        did = " Run again on its operands, the node gives this value."
        zeros = [evidence.operand_text(at) for at, _ in evidence.tensors if not evidence.operand(at)[rank].any()]
        did += f" Operand {zeros[0]} is all zeros." if zeros else ""
    elif evidence.healthy:
        did = " Run again on its operands, the node gives the right value: something else happened when it ran."
    text = (
        f"No hypothesis holds on {_who(evidence)}. Rank {rank}: {num_wrong} of {len(held)} rows differ, "
        f"{', '.join(numbers)}; first at {first}: found {float(held[at]):.6g}, expected {float(want[at]):.6g}.{did}"
    )
    holds = {
        "ranks": evidence.wrong, "rank": rank, "wrong_rows": num_wrong, "rows": len(held), "first": first,
        "found": float(held[at]), "expected": float(want[at]), "largest_error": error, "median_ratio": ratio,
        "correlation": correlation, "operands_give_found": evidence.faithful,
        "operands_give_expected": evidence.healthy,
    }  # fmt: skip
    return Diagnosis("unknown", text, holds)


def _numbers(held: Tensor, want: Tensor) -> tuple[float | None, float | None, float | None]:
    """Largest error, median ratio and correlation over the finite values; None where they say nothing."""
    held, want = held.double().flatten(), want.double().flatten()
    both = held.isfinite() & want.isfinite()
    held, want = held[both], want[both]
    if not len(held):
        return None, None, None
    ratios = (held / want)[want != 0]
    ratio = float(ratios.median()) if len(ratios) else None
    correlation = None
    if len(held) > 2 and held.std() > 0 and want.std() > 0:
        correlation = float(torch.corrcoef(torch.stack((held, want)))[0, 1])
    return float((held - want).abs().max()), ratio, correlation


def _who(evidence: Evidence) -> str:
    text = ranks_text(evidence.wrong, evidence.mesh.size)
    return text[0].lower() + text[1:]
