"""User passes by module or file: what they may do to a graph, and one clear line for what they may not."""

import pytest

from emulator.errors import UsageError
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.propagation import propagate
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.passes.apply import apply_pass, load_pass

PROGRAM = build_program(load_config("glm-5.1-mini"))

PASSES = '''
import operator
import torch
from torch import fx

def nothing(gm):
    return gm

def rebuilt(gm):
    graph, at = fx.Graph(), {}
    for node in gm.graph.nodes:
        at[node] = graph.node_copy(node, at.__getitem__)
    return fx.GraphModule(gm, graph)

def unfused(gm):
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.emulator.add_rms_norm2:
            x, residual, weight, eps = node.args
            with gm.graph.inserting_before(node):
                total = gm.graph.call_function(torch.ops.emulator.add, (residual, x))
                normed = gm.graph.call_function(torch.ops.emulator.rms_norm, (total, weight, eps))
            for user in list(node.users):
                user.replace_all_uses_with(normed if user.args[1] == 0 else total)
                gm.graph.erase_node(user)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm

def functional(gm):
    """The same all_reduce, as torch's functional collective."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.emulator.all_reduce:
            with gm.graph.inserting_before(node):
                funcol = torch.ops._c10d_functional
                new = gm.graph.call_function(funcol.all_reduce.default, (node.args[0], "sum", "tp"))
                new = gm.graph.call_function(funcol.wait_tensor.default, (new,))
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm

def no_reduction(gm):
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.emulator.all_reduce)
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    return gm

def raises(gm):
    return {}["missing"]

def returns_nothing(gm):
    gm.graph.lint()

def new_input(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("mine")
    return gm

constant = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PASSES)
    return path


def _lowered(plan="tp"):
    return lower(PROGRAM, load_plan(plan), {"tp": 4, "ep": 4}, 13)


def _boundaries(graph) -> set:
    return {(b.module, b.port) for b in graph.boundaries}


@pytest.mark.parametrize("name", ["nothing", "rebuilt", "unfused", "functional"])
def test_sound_passes_keep_layouts_origins_and_boundaries(file, name):
    before = _lowered()
    after = apply_pass(before, PROGRAM.parameters, f"{file}:{name}")
    assert after.violations == []
    taken_apart = {b for b in _boundaries(before) ^ _boundaries(after) if b != ("model.embed_tokens", "input")}
    assert not taken_apart or name == "unfused"  # its norms have other outputs
    known = {n.meta["origin"]: str(n.meta["layout"]) for n in before.graph.nodes if n.op == "call_function"}
    found = {n.meta["origin"]: str(n.meta["layout"]) for n in after.graph.nodes if n.op == "call_function"}
    lost = set(known) - set(found)
    assert all("norm" in name or "getitem" in name for name in lost)  # only what was taken apart
    assert {o: found[o] for o in found if o} == {o: known[o] for o in found if o}
    modules = {n.meta["module"] for n in after.graph.nodes}
    assert modules <= {n.meta["module"] for n in before.graph.nodes}


def test_a_lost_reduction_is_found_without_running(file):
    after = apply_pass(_lowered(), PROGRAM.parameters, f"{file}:no_reduction")
    assert after.violations[0].module == "model.layers.0.input_layernorm"  # the embedding's was the first
    assert after.violations[0].found.startswith("partial")
    assert [v.node for v in after.violations] == [v.node for v in propagate(after)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["KeyError", "'missing'", "mine.py:"]),
        ("returns_nothing", ["returned NoneType", "GraphModule"]),
        ("new_input", ["'mine'", "no input or weight"]),
        ("constant", ["no callable 'constant'", "nothing, rebuilt"]),
        ("absent", ["no callable 'absent'"]),
    ],
)
def test_what_a_pass_may_not_do(file, name, words):
    with pytest.raises(UsageError) as caught:
        apply_pass(_lowered(), PROGRAM.parameters, f"{file}:{name}")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "package.module:callable"),
        ("no.such.module:f", "No module named"),
        ("/no/such/file.py:f", "no such file"),
    ],
)
def test_what_names_no_pass(spec, words):
    with pytest.raises(UsageError, match=words):
        load_pass(spec)


def test_a_file_with_a_syntax_error(tmp_path):
    (tmp_path / "bad.py").write_text("def f(gm:\n")
    with pytest.raises(UsageError, match="SyntaxError"):
        load_pass(f"{tmp_path}/bad.py:f")
