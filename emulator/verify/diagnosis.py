"""Why a node's value is wrong: hypotheses tested on the data of all ranks, most specific first.

A hypothesis holds when it explains every wrong rank within the tolerance; most run the node again with what they suppose
was meant and find the right value, or with what they suppose happened and find the value found.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from emulator.verify import hypotheses_collectives as collectives
from emulator.verify import hypotheses_derived as derived
from emulator.verify import hypotheses_inputs as inputs
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
    "feature_slice": "a slice of features in place of a slice of tokens, or the reverse",
    "window_shift": "rows are those of another window, or shifted",
    "rows_permuted": "the right rows in another order",
    "stale_rows": "rows of another known value (layer, step, neighbour)",
    "pad_leaked": "padding among the real rows",
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
    collectives.not_reduced,
    collectives.gathered_again,
    collectives.not_gathered,
    # what the node was told, or did instead
    inputs.local_ids,
    inputs.wrong_positions,
    inputs.wrong_numbers,
    inputs.wrong_eps,
    weights.table_start,
    weights.weight_placement,
    # what the value is
    rows.wrong_row_count,
    rows.feature_slice,
    rows.named_order,
    rows.window_shift,
    rows.rows_permuted,
    values.stale_rows,
    values.pad_leaked,
    inputs.wrong_constant,
    values.scaled,
)


def diagnose(scene: Scene) -> Diagnosis:
    """The first hypothesis that holds; kind "unknown" with statistics when none does."""
    evidence = Evidence(scene)
    for hypothesis in HYPOTHESES:
        if found := hypothesis(evidence):
            assert found.kind in KINDS, found.kind
            return found
    return _statistics(evidence)


def _statistics(evidence: Evidence) -> Diagnosis:
    scene = evidence.scene
    who = ranks_text(scene.wrong, evidence.mesh.size)
    who = who[0].lower() + who[1:]
    compared = list(evidence.wrong_ranks())
    if not compared:
        rank = scene.wrong[0]
        want = evidence.want[rank]
        meant = f", expected {list(want.shape)}" if want is not None else ""
        text = (
            f"No hypothesis holds on {who}: the value of rank {rank} has shape {list(scene.found[rank].shape)}{meant}."
        )
        return Diagnosis("unknown", text, {"ranks": scene.wrong, "shape": list(scene.found[rank].shape)})
    rank, held, want = compared[0]
    differ = ~evidence.tolerance(rank).close(held, want)
    num_wrong = int(differ.reshape(len(held), -1).any(-1).sum())
    first = differ.nonzero()[0].tolist() if differ.any() else [0] * held.dim()
    holds = {
        "ranks": scene.wrong,
        "rank": rank,
        "wrong_rows": num_wrong,
        "rows": len(held),
        "first": first,
        "found": _number(held[tuple(first)]),
        "expected": _number(want[tuple(first)]),
        "operands_give_found": evidence.faithful,
        "operands_give_expected": evidence.healthy,
        **_numbers(held, want),
    }
    numbers = [f"largest error {holds['largest_error']:.4g}"]
    if holds["median_ratio"] is not None:
        numbers.append(f"median ratio {holds['median_ratio']:.4g}")
    if holds["correlation"] is not None:
        numbers.append(f"correlation {holds['correlation']:.4g}")
    did = ""
    if evidence.faithful:
        did = " Run again on its operands, the node gives this value."
    elif evidence.healthy:
        did = " Run again on its operands, the node gives the right value: something else happened when it ran."
    text = (
        f"No hypothesis holds on {who}. Rank {rank}: {num_wrong} of {len(held)} rows differ, {', '.join(numbers)}; first "
        f"at {first}: found {holds['found']:.6g}, expected {holds['expected']:.6g}.{did}"
    )
    return Diagnosis("unknown", text, holds)


def _numbers(held: Tensor, want: Tensor) -> dict[str, float | None]:
    """Largest error, median ratio and correlation over the finite values."""
    held, want = held.double().flatten(), want.double().flatten()
    both = held.isfinite() & want.isfinite()
    held, want = held[both], want[both]
    error = float((held - want).abs().max()) if len(held) else float("nan")
    ratios = (held / want)[want != 0]
    ratio = float(ratios.median()) if len(ratios) else None
    correlation = None
    if len(held) > 2 and held.std() > 0 and want.std() > 0:
        correlation = float(torch.corrcoef(torch.stack((held, want)))[0, 1])
    return {"largest_error": error, "median_ratio": ratio, "correlation": correlation}


def _number(value: Tensor) -> float:
    return float(value)
