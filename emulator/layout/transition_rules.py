"""What each transition op makes of a layout: the table of DESIGN section 2 read forwards, for graphs nobody lowered."""

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from emulator.layout.placement import Layout, Tokens, placement_word
from emulator.ops.registry import LOCAL, PARTIAL, Illegal, Mixed, Owned, R


def transition_layout(name: str, node: fx.Node, sizes: Mapping[str, int], tokens: Tokens) -> tuple[Layout, bool]:
    """(layout, padded) of a transition op's output; padded: full rows with padding among them.

    Raises Illegal, whose fallback is the pair to go on with.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    layout, padded = source.meta["layout"], bool(source.meta.get("padded"))
    if name in ("pad", "unpad"):
        return _padding(name, node, layout, padded, tokens)
    if name in ("local_query_lens", "local_kv_lens"):
        return layout.placed(tp=LOCAL), False
    if name == "wait":
        return layout, padded
    if name == "regroup":
        return _regroup(layout, padded, sizes, tokens), False
    if name == "local_block_table":
        return layout, False
    axis = axis_of(name, node)
    if axis not in sizes:
        raise Illegal(f"there is no mesh axis {axis!r}", ", ".join(sizes), (layout, padded))
    size = node.args[{"all_to_all_rows": 4, "slice_rows": 3}.get(name, 2)]
    if size != sizes[axis]:
        raise Illegal(
            f"the {axis} group has {sizes[axis]} ranks, not {size}", f"{axis} {sizes[axis]}", (layout, padded)
        )
    if name == "all_to_all_rows" or (name == "all_to_all" and layout.kind == "rows"):
        return _rows(layout, sizes["tp"]), False
    if name == "slice_rows" or (name == "slice" and layout.kind == "rows"):
        return layout.placed(ep=LOCAL), False
    if layout.kind == "group" or (axis == "ep" and layout.kind == "token" and name == "all_gather"):
        still_padded = name == "reduce_scatter" and tokens.parts == 1 and tokens.padded != tokens.real
        return _group(name, layout, tokens), still_padded
    dims = [d % 8 if d < 0 else d for d in node.args[3:]]  # type: ignore[operator]
    if name == "broadcast":
        target, problem = _broadcast(layout.on(axis), node.args[3])
    else:
        target, problem = _move(name, layout.on(axis), dims, sizes[axis])
    cut = (name in ("slice", "reduce_scatter", "all_to_all")) and dims[0] == 0
    joined = (name == "all_gather" and dims[0] == 0) or (name == "all_to_all" and dims[1] == 0)
    is_token = layout.kind == "token" and axis == "tp"
    needs_pad = cut and is_token and tokens.rearranged
    out_padded = (joined and is_token and tokens.rearranged) or (padded and not cut)
    result = layout.placed(**{axis: target}), out_padded
    if problem is None and needs_pad and not padded:
        reason = f"{tokens.real} rows do not divide over {tokens.parts} ranks"
        if tokens.padded == tokens.real:
            reason = f"the ranks own rows in {tokens.order} order"
        problem = reason, f"rows padded to {tokens.padded} first"
    if problem is not None:
        raise Illegal(problem[0], problem[1], result)
    return result


def axis_of(name: str, node: fx.Node) -> Any:
    """The mesh axis of a transition; that of the tokens for padding, which names none."""
    if name in ("pad", "unpad"):
        return "tp"
    return node.args[{"all_to_all_rows": 3, "slice_rows": 2, "local_kv_lens": 2}.get(name, 1)]


def _padding(name: str, node: fx.Node, layout: Layout, padded: bool, tokens: Tokens) -> tuple[Layout, bool]:
    length, arrangement = node.args[2], node.args[3:]
    want, have = (tokens.padded, False) if name == "pad" else (tokens.real, True)
    result = layout, name == "pad"
    if arrangement != tokens.arrangement:
        order = arrangement[0] if arrangement else "contiguous"
        raise Illegal(f"{name} to {order} order", f"the ranks' order, {tokens.order}", result)
    if layout.on("tp") == LOCAL:
        raise Illegal("a rank's rows hold their padding already", "full-token or partial", result)
    if padded != have or length != want:
        word = "padded already" if padded else "not padded"
        raise Illegal(f"{name} to {length} of rows that are {word}", f"{name} to {want}, once", result)
    return result


def _regroup(layout: Layout, padded: bool, sizes: Mapping[str, int], tokens: Tokens) -> Layout:
    """Full rows as the joined rows of an ep group."""
    group = Layout("group", (), tokens)
    if sizes["ep"] != sizes["tp"]:
        found = f"an ep group of {sizes['ep']} ranks does not hold the rows of {sizes['tp']} tp ranks"
        raise Illegal(found, "ep equal to tp", (group, False))
    if layout.kind != "token" or layout.placements or padded != tokens.rearranged:
        raise Illegal(f"{layout} taken for the rows of a group", "full-token, in the ranks' order", (group, False))
    return group


def _group(name: str, layout: Layout, tokens: Tokens) -> Layout:
    """Local rows joined over the ep group, and partial sums of joined rows reduced to local ones."""
    group, local = Layout("group", (), tokens), Layout("token", (), tokens)
    local = local.placed(tp=LOCAL) if tokens.parts > 1 else local
    if name == "all_gather" and layout.kind == "token":
        if layout != local:
            raise Illegal(f"an ep group joins local rows, not {layout}", "local-token", (group, False))
        return group
    if name == "reduce_scatter" and layout.kind == "group":
        if layout.on("ep") != PARTIAL:
            raise Illegal("complete values would be summed: ep times too large", "partial", (local, False))
        return local
    raise Illegal(f"{name} of {layout}", "all_gather of local-token, reduce_scatter of group-partial", (layout, False))


def _rows(layout: Layout, tp: int) -> Layout:
    """Dispatched rows change between the ranks of their tokens and the ranks of their experts."""
    if layout.on("ep") == LOCAL:
        return layout.placed(ep=R, tp=LOCAL)
    if layout.on("tp") == R and tp > 1:
        where = layout.placed(ep=LOCAL)
        raise Illegal(
            "every rank dispatched every row: each would reach its expert tp times", "token-rows", (where, False)
        )
    return layout.placed(tp=R, ep=LOCAL)


def _broadcast(source: Placement, owner: Any) -> tuple[Placement, tuple[str, str] | None]:
    if source == Owned(owner):
        return R, None
    return R, (f"rank {owner} would overwrite what is {placement_word(source, 'weight')}", f"owner({owner})")


def _move(name: str, source: Placement, dims: list[int], size: int) -> tuple[Placement, tuple[str, str] | None]:
    """(placement on the op's axis afterwards, what is wrong: (reason, allowed))."""
    word = placement_word(source)
    if name == "all_reduce":
        if isinstance(source, Partial):
            return R, None
        if isinstance(source, Mixed):
            return LOCAL, ("sums rows of different tokens", "partial")
        if source == R:
            return R, (f"complete values would be summed: {size} times too large", "partial")
        return source, (f"sums {'rows of different tokens' if source == LOCAL else 'different features'}", "partial")
    if name == "reduce_scatter":
        target = Shard(dims[0])
        if isinstance(source, Partial):
            return target, None
        if source == R:
            return target, (f"complete values would be summed: {size} times too large", "partial")
        return target, (f"sums and cuts {word} values", "partial")
    if name == "all_gather":
        if source == Shard(dims[0]):
            return R, None
        if source == R:
            return R, (f"every rank holds all rows already: they would grow {size} times", f"shard({dims[0]})")
        if isinstance(source, Partial):
            return PARTIAL, ("partial sums would be joined instead of summed", f"shard({dims[0]})")
        return R, (f"joins along dim {dims[0]} what is {word}", f"shard({dims[0]})")
    if name == "slice":
        target = Shard(dims[0])
        if source == R:
            return target, None
        if isinstance(source, Partial):
            return target, ("cuts partial sums, which no rank completes", "full-token")
        return target, (f"cuts rows that are {word} already", "full-token")
    assert name == "all_to_all", name
    split, joined = dims
    target = Shard(split)
    if source == Shard(joined):
        return target, None
    return target, (f"moves shards of dim {split} to dim {joined}, but the value is {word}", f"shard({joined})")
