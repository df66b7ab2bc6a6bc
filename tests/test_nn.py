"""emulator.nn on real ranks: values against F.linear on whole weights in float64, exact collective counts."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

import emulator
from emulator import assert_collectives, assert_layout, assert_same_on_all_ranks, record
from emulator.errors import UsageError
from emulator.nn import ColumnParallelLinear, RowParallelLinear

IN, OUT = 24, 40  # both divide by 8; their parts differ on every tp
TOKENS = [8, 9, 3, 1]  # divisible by 4, not, fewer than ranks, one
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # re-ordered float64 sums

tokens_on_4_ranks = pytest.mark.parametrize("tokens", TOKENS)
every_size = pytest.mark.parametrize(
    "tokens",
    [
        *(pytest.param(t, marks=pytest.mark.ranks(4), id=f"{t} on 4") for t in TOKENS),
        *(pytest.param(t, marks=pytest.mark.ranks(2), id=f"{t} on 2") for t in (9, 1)),
        *(pytest.param(t, marks=pytest.mark.ranks(8), id=f"{t} on 8") for t in (9, 3)),
    ],
)
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def problem(tokens: int, bias: bool = True, seed: int = 0) -> SimpleNamespace:
    """The same weights on every rank; x [T, I] is drawn with `seed`; y = x W^T + b."""
    draw = torch.Generator().manual_seed(100)
    weight = torch.randn(OUT, IN, dtype=torch.float64, generator=draw)
    b = torch.randn(OUT, dtype=torch.float64, generator=draw) if bias else None
    x = torch.randn(tokens, IN, dtype=torch.float64, generator=draw.manual_seed(seed))
    return SimpleNamespace(weight=weight, bias=b, x=x, y=linear(x, weight, b), plain=linear(x, weight))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, **EXACT)


def my_features(x: torch.Tensor, group) -> torch.Tensor:
    width = x.shape[-1] // group.size()
    return x[..., group.rank() * width : (group.rank() + 1) * width]


# -- values and counts ------------------------------------------------------------------------------------------------


@every_size
@biases
def test_column_parallel(tokens, bias, rank, tp_group):
    p = problem(tokens, bias)
    layer = ColumnParallelLinear.from_full(p.weight, p.bias, group=tp_group)
    rows = OUT // tp_group.size()
    assert torch.equal(layer.weight, p.weight[rank * rows : (rank + 1) * rows])
    with assert_collectives({}):
        found = layer(p.x)
    assert_layout(found, "shard(1)", reference=p.y, group=tp_group, **EXACT)

    gathering = ColumnParallelLinear.from_full(p.weight, p.bias, group=tp_group, gather_output=True)
    with assert_collectives({"tp": {"all_gather": 1}}):
        found = gathering(p.x)
    close(found, p.y)


@every_size
@biases
@pytest.mark.parametrize("slice_input", [True, False], ids=["whole input", "split input"])
def test_row_parallel(tokens, bias, slice_input, rank, tp_group):
    p = problem(tokens, bias)
    x = p.x if slice_input else my_features(p.x, tp_group)

    def layer(reduce: str) -> RowParallelLinear:
        return RowParallelLinear.from_full(
            p.weight, p.bias, group=tp_group, slice_input_by_last_dim=slice_input, reduce=reduce
        )

    columns = IN // tp_group.size()
    assert torch.equal(layer("none").weight, p.weight[:, rank * columns : (rank + 1) * columns])
    with assert_collectives({"tp": {"all_reduce": 1}}):
        found = layer("all_reduce")(x)
    close(found, p.y)
    with assert_collectives({"tp": {"reduce_scatter": 1}}):
        found = layer("reduce_scatter")(x)
    assert_layout(found, "local-token", reference=p.y, group=tp_group, **EXACT)
    real = min(max(tokens - rank * len(found), 0), len(found))
    assert torch.equal(found[real:], torch.zeros_like(found[real:]))  # padding: no NaN, no bias
    with assert_collectives({}):
        found = layer("none")(x)
    assert_layout(found, "partial", reference=p.y, group=tp_group, **EXACT)


@pytest.mark.ranks(4)
@tokens_on_4_ranks
def test_column_then_row_needs_one_collective(tokens, tp_group):
    p = problem(tokens)
    down = torch.randn(IN, OUT, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    up_layer = ColumnParallelLinear.from_full(p.weight, p.bias, group=tp_group)
    down_layer = RowParallelLinear.from_full(down, group=tp_group)
    with assert_collectives({"tp": {"all_reduce": 1}}):
        found = down_layer(torch.relu(up_layer(p.x)))
    close(found, linear(torch.relu(p.y), down))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tokens", [9, 3])
def test_the_bias_is_added_once(tokens, rank, tp_group):
    p = problem(tokens)
    nothing = torch.zeros(tokens, IN, dtype=torch.float64)  # what comes out is the bias alone, exactly
    biases = p.bias.expand(tokens, OUT)

    def found(**options) -> torch.Tensor:
        layer = RowParallelLinear.from_full(p.weight, p.bias, group=tp_group, slice_input_by_last_dim=True, **options)
        assert torch.equal(layer.bias, p.bias), "held on every rank"
        return layer(nothing)

    assert torch.equal(found(), biases)
    assert torch.equal(found(disable_tp=True), biases)
    part = found(reduce="none")
    assert torch.equal(part, biases if rank == 0 else nothing.new_zeros(tokens, OUT))
    local = found(reduce="reduce_scatter")
    per = {9: 3, 3: 1}[tokens]
    assert torch.equal(local, torch.cat([biases, nothing.new_zeros(4 * per, OUT)])[rank * per : (rank + 1) * per])


# -- the flags --------------------------------------------------------------------------------------------------------
# What goes in (a = all features, s = this rank's), what comes out, and what is sent. The whole weight's lines are the
# RFC's 3.4: no collective, all features in and out, whatever the other flags say.

COLUMN = [
    # disable_tp, gather_output: output, calls
    (False, False, "shard(1)", {}),
    (False, True, "full-token", {"all_gather": 1}),
    (True, False, "full-token", {}),
    (True, True, "full-token", {}),
]
ROW = [
    # disable_tp, slice_input_by_last_dim, reduce: input, output, calls
    (False, False, "all_reduce", "s", "full-token", {"all_reduce": 1}),
    (False, False, "reduce_scatter", "s", "local-token", {"reduce_scatter": 1}),
    (False, False, "none", "s", "partial", {}),
    (False, True, "all_reduce", "a", "full-token", {"all_reduce": 1}),
    (False, True, "reduce_scatter", "a", "local-token", {"reduce_scatter": 1}),
    (False, True, "none", "a", "partial", {}),
    (True, False, "all_reduce", "a", "full-token", {}),
    (True, False, "reduce_scatter", "a", "refused", {}),
    (True, False, "none", "a", "full-token", {}),
    (True, True, "all_reduce", "a", "full-token", {}),
    (True, True, "reduce_scatter", "a", "refused", {}),
    (True, True, "none", "a", "full-token", {}),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tokens", [9, 3])
@pytest.mark.parametrize(("disable_tp", "gather_output", "output", "calls"), COLUMN)
def test_flags_of_a_column_parallel_layer(tokens, disable_tp, gather_output, output, calls, tp_group):
    p = problem(tokens)
    layer = ColumnParallelLinear.from_full(
        p.weight, p.bias, group=tp_group, disable_tp=disable_tp, gather_output=gather_output
    )
    assert list(layer.weight.shape) == ([OUT, IN] if disable_tp else [OUT // 4, IN])
    assert (layer.tp_size, layer.gather_output) == (1 if disable_tp else 4, gather_output)
    with assert_collectives({"tp": calls}):
        found = layer(p.x)
    assert_layout(found, output, reference=p.y, group=tp_group, **EXACT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tokens", [9, 3])
@pytest.mark.parametrize(("disable_tp", "slice_input", "reduce", "given", "output", "calls"), ROW)
def test_flags_of_a_row_parallel_layer(tokens, disable_tp, slice_input, reduce, given, output, calls, tp_group):
    p = problem(tokens)

    def make() -> RowParallelLinear:
        return RowParallelLinear.from_full(
            p.weight, p.bias, group=tp_group, disable_tp=disable_tp, slice_input_by_last_dim=slice_input, reduce=reduce
        )

    if output == "refused":
        with pytest.raises(UsageError, match="cut the tokens before the layer and take reduce='none'"):
            make()
        return
    layer = make()
    # the weight's layout follows disable_tp alone
    assert list(layer.weight.shape) == ([OUT, IN] if disable_tp else [OUT, IN // 4])
    assert (layer.tp_size, layer.slice_input_by_last_dim) == (1 if disable_tp else 4, slice_input)
    right, wrong = p.x, my_features(p.x, tp_group)
    if given == "s":
        right, wrong = wrong, right
    with assert_collectives({"tp": calls}):
        found = layer(right)
    assert_layout(found, output, reference=p.y, group=tp_group, **EXACT)
    with pytest.raises(UsageError, match=rf"input is \[{tokens}, {wrong.shape[1]}\].*\[tokens, {right.shape[1]}\]"):
        layer(wrong)


@pytest.mark.ranks(4)
@tokens_on_4_ranks
def test_a_whole_o_proj_on_local_tokens(tokens, rank, tp_group):
    # the RFC's dsa_cp: full-token attention output, token slice, whole weight, rows stay local
    p = problem(tokens)
    per = -(-tokens // 4)
    padded = torch.cat([p.x, p.x.new_full((4 * per - tokens, IN), torch.nan)])
    layer = RowParallelLinear.from_full(p.weight, p.bias, group=tp_group, disable_tp=True)
    with assert_collectives({}):
        found = layer(padded[rank * per : (rank + 1) * per])
    assert_layout(found, "local-token", reference=p.y, group=tp_group, **EXACT)


# -- gather_slice_data: the weight over other ranks than the tokens ---------------------------------------------------
# (mesh, axis of the layer's group, axis around it); tokens differ between groups of the latter.

OTHER_GROUPS = [
    pytest.param("world", "tp", marks=pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2}), id="wider"),
    pytest.param("tp", "world", marks=pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2}), id="narrower"),
    pytest.param("dp", "tp", marks=pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2}), id="across"),
    pytest.param("dp", "tp", marks=pytest.mark.ranks(4, mesh={"dp": 4, "tp": 1}), id="data parallel around"),
]
other_groups = pytest.mark.parametrize(("inner", "around"), OTHER_GROUPS)


@pytest.fixture
def groups(mesh_groups):
    return {**mesh_groups, "world": dist.group.WORLD}


def around_problem(tokens: int, groups, around: str) -> SimpleNamespace:
    """The ranks of a group around the layer share their tokens; other groups have other ones."""
    return problem(tokens, seed=min(dist.get_process_group_ranks(groups[around])))


def expected_calls(groups, inner: str, around: str, *calls: tuple[str, str]) -> dict:
    """{group: {op: n}} of (group, op) pairs; a group of one sends nothing."""
    counts: dict[str, dict[str, int]] = {}
    for which, op in calls:
        name = {"inner": inner, "around": around}[which]
        if groups[name].size() > 1:
            label = groups[name].label
            counts.setdefault(label, {})[op] = counts.get(label, {}).get(op, 0) + 1
    return counts


@other_groups
@tokens_on_4_ranks
def test_gather_slice_data_of_a_column_parallel_layer(tokens, inner, around, groups):
    p = around_problem(tokens, groups, around)
    layer = ColumnParallelLinear.from_full(p.weight, p.bias, group=groups[inner], global_group=groups[around])
    assert layer.gather_slice_data
    assert layer.weight.shape[0] == OUT // groups[inner].size()
    calls = [("inner", "all_gather"), ("inner", "all_gather"), ("around", "all_gather")]  # tokens, features, tokens
    with assert_collectives(expected_calls(groups, inner, around, *calls)):
        found = layer(p.x)
    close(found, p.y)


@other_groups
@tokens_on_4_ranks
@pytest.mark.parametrize("slice_input", [True, False], ids=["whole input", "split input"])
def test_gather_slice_data_of_a_row_parallel_layer(tokens, slice_input, inner, around, groups):
    p = around_problem(tokens, groups, around)
    x = p.x if slice_input else my_features(p.x, groups[around])
    shared = {"group": groups[inner], "global_group": groups[around], "slice_input_by_last_dim": slice_input}
    features = [] if slice_input else [("around", "all_gather")]
    layer = RowParallelLinear.from_full(p.weight, p.bias, **shared)
    assert layer.gather_slice_data
    assert layer.weight.shape[1] == IN // groups[inner].size()
    calls = [*features, ("inner", "all_gather"), ("inner", "all_reduce"), ("around", "all_gather")]
    with assert_collectives(expected_calls(groups, inner, around, *calls)):
        found = layer(x)
    close(found, p.y)

    scattering = RowParallelLinear.from_full(p.weight, p.bias, reduce="reduce_scatter", **shared)
    calls = [*features, ("inner", "all_gather"), ("inner", "reduce_scatter")]
    with assert_collectives(expected_calls(groups, inner, around, *calls)):
        found = scattering(x)
    assert_layout(found, "local-token", reference=p.y, group=groups[around], **EXACT)

    with pytest.raises(UsageError, match="reduce='none' with a global_group of other ranks"):
        RowParallelLinear.from_full(p.weight, p.bias, reduce="none", **shared)


@pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("tokens", [9, 1])
@pytest.mark.parametrize("slice_input", [True, False])
@pytest.mark.parametrize("reduce", ["all_reduce", "none"])
@pytest.mark.parametrize("gather_output", [True, False])
def test_a_whole_weight_turns_gather_slice_data_off(tokens, slice_input, reduce, gather_output, groups):
    p = around_problem(tokens, groups, "tp")
    shared = {"group": groups["world"], "global_group": groups["tp"], "disable_tp": True}
    column = ColumnParallelLinear.from_full(p.weight, p.bias, gather_output=gather_output, **shared)
    row = RowParallelLinear.from_full(p.weight, p.bias, slice_input_by_last_dim=slice_input, reduce=reduce, **shared)
    for layer in (column, row):
        assert not layer.gather_slice_data
        assert torch.equal(layer.weight, p.weight)
        with assert_collectives({}):
            found = layer(p.x)
        close(found, p.y)


@pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("named", [True, False])
def test_the_same_ranks_around_are_no_other_ranks(named, tp_group, groups):
    p = around_problem(9, groups, "tp")
    layer = ColumnParallelLinear.from_full(p.weight, p.bias, group=tp_group, global_group=tp_group if named else None)
    assert not layer.gather_slice_data
    with assert_collectives({}):
        found = layer(p.x)
    assert_layout(found, "shard(1)", reference=p.y, group=tp_group, **EXACT)


@pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2})
def test_features_that_do_not_divide_around_the_layer(tp_group, groups):
    def make(**options) -> RowParallelLinear:
        return RowParallelLinear(6, 8, group=tp_group, global_group=groups["world"], **options)

    with pytest.raises(UsageError, match="in_features 6 cannot be split evenly over 4 ranks"):
        make()
    assert make(slice_input_by_last_dim=True).gather_slice_data  # the whole input needs no such split


# -- no group ---------------------------------------------------------------------------------------------------------


def whole_layers(p: SimpleNamespace, group) -> list[nn.Module]:
    rows = [
        RowParallelLinear.from_full(p.weight, p.bias, group=group, slice_input_by_last_dim=s, reduce=r, disable_tp=d)
        for s in (True, False)
        for r in ("all_reduce", "reduce_scatter", "none")
        for d in (True, False)
    ]
    columns = [
        ColumnParallelLinear.from_full(p.weight, p.bias, group=group, gather_output=g, disable_tp=d)
        for g in (True, False)
        for d in (True, False)
    ]
    return [*rows, *columns]


@pytest.mark.ranks(2, mesh={"dp": 2, "tp": 1})
@pytest.mark.parametrize("tokens", [3, 1])
def test_a_group_of_one_does_nothing(tokens, rank, tp_group):
    p = problem(tokens, seed=rank)
    for layer in whole_layers(p, tp_group) + whole_layers(p, None):
        with assert_collectives({}):
            found = layer(p.x)
        assert torch.equal(found, p.y), layer


def test_without_torch_distributed():
    assert not dist.is_initialized()
    p = problem(3)
    for layer in whole_layers(p, None):
        assert torch.equal(layer(p.x), p.y), layer


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_from_a_module_of_hugging_face(tp_group):
    whole = nn.Linear(IN, OUT, dtype=torch.bfloat16)
    dist.broadcast(whole.weight.detach(), 0)
    dist.broadcast(whole.bias.detach(), 0)
    layer = ColumnParallelLinear.from_full(whole.weight, whole.bias, group=tp_group, gather_output=True)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    found = layer(torch.ones(2, IN, dtype=torch.bfloat16, requires_grad=True))
    assert not found.requires_grad
    assert not any(p.requires_grad for p in layer.parameters())
    assert_same_on_all_ranks(found)
    assert torch.equal(layer.weight, whole.weight.chunk(4)[tp_group.rank()])
    before = whole.weight.clone()
    layer.weight.zero_()
    assert torch.equal(whole.weight, before), "a part of its own"


@pytest.mark.ranks(4)
def test_loading_again_replaces_the_weight(tp_group):
    p = problem(9)
    layer = RowParallelLinear(IN, OUT, bias=True, group=tp_group, slice_input_by_last_dim=True).double()
    assert layer(p.x).isnan().all(), "not loaded yet"
    layer.load_full(p.weight, p.bias)
    close(layer(p.x), p.y)
    layer.load_full(2 * p.weight, p.bias)
    found = layer(p.x.requires_grad_())
    close(found, 2 * p.plain + p.bias)
    assert not found.requires_grad
    assert sorted(layer.state_dict()) == ["bias", "weight"]


@pytest.mark.ranks(4)
def test_leading_dims_and_no_tokens(tp_group):
    p = problem(9)
    x = torch.stack([p.x, 2 * p.x, 3 * p.x], 1)  # [T, 3, I]
    expected = linear(x, p.weight, p.bias)
    column = ColumnParallelLinear.from_full(p.weight, p.bias, group=tp_group, gather_output=True)
    row = RowParallelLinear.from_full(
        p.weight, p.bias, group=tp_group, slice_input_by_last_dim=True, reduce="reduce_scatter"
    )
    close(column(x), expected)
    assert_layout(row(x), "local-token", reference=expected, group=tp_group, **EXACT)
    assert list(column(x[:0]).shape) == [0, 3, OUT]
    assert list(row(x[:0]).shape) == [0, 3, OUT]


# -- what people see --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_recorded_calls_name_the_users_line_and_real_shapes(tp_group):
    p = problem(9)
    block = nn.ModuleDict(
        {
            "up": ColumnParallelLinear.from_full(p.weight, group=tp_group, gather_output=True),
            "down": RowParallelLinear.from_full(p.weight.T, group=tp_group, reduce="reduce_scatter"),
        }
    )
    with record() as trace:
        block["down"](my_features(block["up"](p.x), tp_group))
    gather, scatter = trace.calls
    assert gather.site.startswith(__file__)
    assert (gather.api, scatter.api) == ("all_gather_single", "reduce_scatter_single")
    assert [d["shape"] for d in (*gather.inputs, *gather.outputs)] == [[9, 10], [36, 10]]
    assert [d["shape"] for d in (*scatter.inputs, *scatter.outputs)] == [[12, 24], [3, 24]]
    assert "in_features=24, out_features=40, bias=False, tp_size=4, disable_tp=False" in repr(block["up"])


MISTAKES = [
    (lambda g: ColumnParallelLinear(24, 42, group=g), "ColumnParallelLinear: out_features 42 cannot .* over 4 ranks"),
    (lambda g: RowParallelLinear(42, 24, group=g), "RowParallelLinear: in_features 42 cannot .* over 4 ranks"),
    (lambda g: RowParallelLinear(24, 40, group=g, reduce="sum"), "reduce 'sum' unknown .*all_reduce, reduce_scatter"),
    (lambda g: ColumnParallelLinear(24, 40, group="tp"), "group is 'tp'; expected a process group"),
    (lambda g: ColumnParallelLinear(24, 40, group=dist.GroupMember.NON_GROUP_MEMBER), "a group without this rank"),
    (lambda g: ColumnParallelLinear.from_full(torch.ones(40), group=g), r"torch.float32 \[40\]; expected floating"),
    (lambda g: ColumnParallelLinear.from_full(torch.ones(40, 24, dtype=torch.int8)), "torch.int8"),
    (lambda g: ColumnParallelLinear(24, 40, group=g).load_full(torch.ones(40, 24, dtype=torch.int8)), "torch.int8"),
    # a part in place of the whole; the HF order is [out, in]
    (lambda g: ColumnParallelLinear(24, 40, group=g).load_full(torch.ones(10, 24)), r"\[10, 24\]; .*\[40, 24\]"),
    (lambda g: RowParallelLinear(24, 40, group=g).load_full(torch.ones(24, 40)), r"\[24, 40\]; .*\[40, 24\]"),
    (
        lambda g: ColumnParallelLinear.from_full(torch.ones(40, 24), torch.ones(10), group=g),
        r"bias is .*\[10\]; .*\[40\]",
    ),
    (
        lambda g: RowParallelLinear(24, 40, group=g).load_full(torch.ones(40, 24), torch.ones(40)),
        "made with bias=False, loaded with bias True",
    ),
    (
        lambda g: RowParallelLinear(24, 40, bias=True, group=g).load_full(torch.ones(40, 24)),
        "made with bias=True, loaded with bias False",
    ),
    (lambda g: RowParallelLinear(24, 40, group=g)(torch.ones(6)), r"input is \[6\]; expected \[tokens, 6\]"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_told_in_one_line(make, message, tp_group):
    with pytest.raises(UsageError, match=message) as caught:
        make(tp_group)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.ranks(4)
def test_sizes_that_do_not_divide_are_fine_for_a_whole_weight(tp_group):
    layer = RowParallelLinear.from_full(torch.ones(3, 5), group=tp_group, disable_tp=True)
    assert layer(torch.ones(2, 5)).tolist() == [[5.0] * 3] * 2


def test_the_package_offers_the_module():
    assert emulator.nn.RowParallelLinear is RowParallelLinear
    assert "nn" in dir(emulator)
