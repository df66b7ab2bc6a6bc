"""check_graph on hand-written rank graphs: torch functions, aten ops, our ops and functional collectives."""

import pytest
import torch
import torch.distributed._functional_collectives  # registers _c10d_functional
from torch import fx, nn

from emulator.errors import UsageError
from emulator.jobs.graph_check import check_graph

T, H, F = 11, 6, 8


class TwoLinears(nn.Module):
    """A dense MLP as one rank runs it: local-token in, gather, column and row shards, reduce_scatter, local out."""

    def __init__(self, tp: int, fault: str = ""):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(F, H, generator=generator, dtype=torch.float64), requires_grad=False)
        self.down = nn.Parameter(torch.randn(H, F, generator=generator, dtype=torch.float64), requires_grad=False)
        self.tp, self.fault = tp, fault

    def forward(self, x):
        ops = torch.ops.emulator
        full = ops.unpad(ops.all_gather(x, "tp", self.tp, 0), 0, T) if self.fault != "local" else x
        hidden = torch.relu(torch.nn.functional.linear(full, self.up))
        out = torch.nn.functional.linear(hidden, self.down)
        padded = -(-T // self.tp) * self.tp
        if self.fault == "no reduction":
            out = ops.slice(ops.pad(out, 0, padded), "tp", self.tp, 0)
        elif self.fault == "twice":
            out = ops.slice(
                ops.pad(ops.all_reduce(ops.all_reduce(out, "tp", self.tp), "tp", self.tp), 0, padded), "tp", self.tp, 0
            )
        elif self.fault == "local":
            out = ops.all_reduce(out, "tp", self.tp)
        else:
            out = ops.reduce_scatter(ops.pad(out, 0, padded), "tp", self.tp, 0)
        return x + out


LAYOUTS = {"x": "local-token", "up": "tp:shard(0)", "down": "tp:shard(1)"}


def _x():
    return torch.randn(T, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_right_graph_passes_and_gives_its_outputs(tp):
    model = TwoLinears(tp)
    report = check_graph(fx.symbolic_trace(model), {"x": _x()}, LAYOUTS, tp, tokens=T)
    assert report.passed, str(report)
    per = -(-T // tp)
    whole = _x() + torch.relu(_x() @ model.up.T) @ model.down.T
    for rank in range(tp):
        rows = whole[rank * per : (rank + 1) * per]
        torch.testing.assert_close(report.outputs[rank][: len(rows)], rows)
    counts = {(c["group"], c["op"]): c["count"] for c in report.collectives}
    assert counts == {("tp", "all_gather"): 1, ("tp", "reduce_scatter"): 1}


@pytest.mark.parametrize(
    ("fault", "rule", "node", "kind"),
    [
        ("no reduction", "which no rank completes", "slice_1", "not_reduced"),
        ("twice", "4 times too large", "all_reduce_1", "reduced_twice"),
        ("local", "rows of different tokens meet shards", "all_reduce", "mixed_tokens"),
    ],
)
def test_a_wrong_graph_is_named_before_and_after_it_runs(fault, rule, node, kind):
    graph = fx.symbolic_trace(TwoLinears(4, fault))
    report = check_graph(graph, {"x": _x()}, LAYOUTS, 4, tokens=T)
    assert not report.passed
    assert rule in str(report)
    assert not report.outputs  # a graph that breaks a rule is not run
    report = check_graph(graph, {"x": _x()}, LAYOUTS, 4, tokens=T, run_anyway=True)
    assert report.culprit, str(report)
    assert (report.culprit["node"], report.culprit["kind"]) == (node, kind), str(report)


def _functional(x, weight):
    funcol = torch.ops._c10d_functional
    partial = torch.ops.aten.mm.default(x, weight)
    return funcol.wait_tensor(funcol.all_reduce(partial, "sum", "tp"))


def test_aten_ops_and_functional_collectives():
    weight = torch.randn(H, F, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    graph = fx.symbolic_trace(_functional)
    layouts = {"x": "shard(1)", "weight": "tp:shard(0)"}
    report = check_graph(graph, {"x": _x(), "weight": weight}, layouts, 2, tokens=T)
    assert report.passed, str(report)
    torch.testing.assert_close(report.outputs[1], _x() @ weight)
    # the same graph on an input that is whole on every rank: each product is complete, the sum is twice too large
    layouts = {"x": "full-token", "weight": "replicated"}
    report = check_graph(graph, {"x": _x(), "weight": weight}, layouts, 2, tokens=T, run_anyway=True)
    assert "2 times too large" in str(report)
    assert report.culprit["kind"] == "reduced_twice"


def test_a_reference_of_ones_own():
    graph = fx.symbolic_trace(_functional)
    weight = torch.eye(H, dtype=torch.float64)
    layouts = {"x": "shard(1)", "weight": "tp:shard(0)"}
    inputs = {"x": _x(), "weight": weight}
    assert check_graph(graph, inputs, layouts, 2, tokens=T, reference=lambda x, weight: x).passed
    assert not check_graph(graph, inputs, layouts, 2, tokens=T, reference=lambda x, weight: x + 1e-6).passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: {**a, "inputs": {}}, "no input 'x'"),
        (lambda a: {**a, "layouts": {"y": "full-token"}}, "layouts name 'y'"),
        (lambda a: {**a, "layouts": {"x": "sideways"}}, "'sideways' unknown"),
    ],
)
def test_what_makes_no_sense_is_one_line(change, words):
    given = change({"inputs": {"x": _x()}, "layouts": LAYOUTS})
    with pytest.raises(UsageError, match=words) as caught:
        check_graph(fx.symbolic_trace(TwoLinears(2)), given["inputs"], given["layouts"], 2, tokens=T)
    assert "\n" not in str(caught.value)


def test_a_group_that_is_no_axis():
    def forward(x):
        return torch.ops._c10d_functional.all_reduce(x, "sum", "cp")

    with pytest.raises(UsageError, match=r"group 'cp' \(allowed: tp, ep"):
        check_graph(fx.symbolic_trace(forward), {"x": _x()}, {"x": "partial"}, 2, tokens=T)


def test_modules_of_the_users_graph_are_entered():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(H, F, dtype=torch.float64)

        def forward(self, x):
            return torch.ops.emulator.all_gather(self.proj(x), "tp", 2, 1)

    layouts = {"x": "full-token", "proj.weight": "tp:shard(0)", "proj.bias": "tp:shard(0)"}
    block = Block()
    report = check_graph(fx.symbolic_trace(block), {"x": _x()}, layouts, 2, tokens=T)
    assert report.passed, str(report)
    torch.testing.assert_close(report.outputs[0], block.proj(_x()).detach())


def test_a_plan_gives_the_weights_their_placements():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(H, F, bias=False, dtype=torch.float64)

        def forward(self, x):
            return torch.ops.emulator.all_gather(self.lm_head(x), "tp", 2, 1)

    head = Head()
    report = check_graph(fx.symbolic_trace(head), {"x": _x()}, "tp", 2, tokens=T)  # tp: lm_head is shard(0)
    assert report.passed, str(report)
    torch.testing.assert_close(report.outputs[1], head.lm_head(_x()).detach())
