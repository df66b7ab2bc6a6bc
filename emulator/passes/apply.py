"""A user's FX pass on a rank graph: GraphModule in, GraphModule out."""

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from torch import Tensor, fx, nn

from emulator.errors import UsageError
from emulator.layout.annotate import annotate
from emulator.layout.rank_graph import RankGraph, copy_graph
from emulator.passes.normalise import normalise
from emulator.passes.repetition import expand

Pass = Callable[[fx.GraphModule], fx.GraphModule]


def load_pass(spec: str) -> Pass:
    """`package.module:callable`, or `path/to/file.py:callable`.

    Raises UsageError when there is no such module, file or callable, or when importing it fails.
    """
    where, colon, name = spec.rpartition(":")
    if not (where and colon and name):
        raise UsageError(f"pass {spec}: expected package.module:callable or path/to/file.py:callable")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise UsageError(f"pass {spec}: {_told(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        offered = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise UsageError(f"pass {spec}: {where} has no callable {name!r} (it has: {', '.join(offered) or 'none'})")
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"_pass_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apply_pass(rank_graph: RankGraph, parameters: Mapping[str, Tensor], spec: str) -> RankGraph:
    """The rank graph as the pass leaves it, with layouts, boundaries and violations found anew.

    parameters: meta tensors by name, which the pass sees as attributes. gm.meta["rank_graph"] tells sizes and tokens.
    Raises UsageError, with file and line, when the pass raises or what it returns is no rank graph.
    """
    function = load_pass(spec)
    module = as_graph_module(rank_graph, parameters)
    try:
        result = function(module)
    except Exception as error:
        raise UsageError(f"pass {spec}: {_told(error)}") from error
    if not isinstance(result, fx.GraphModule):
        raise UsageError(f"pass {spec}: returned {type(result).__name__}, expected a torch.fx.GraphModule")
    check_graph_is_sound(result.graph, rank_graph, f"pass {spec}")
    normalise(result.graph, rank_graph.sizes, f"pass {spec}")
    whole = expand(replace(rank_graph, graph=result.graph, boundaries=[]))  # a pass may leave repeated regions
    return annotate(whole.graph, rank_graph)


def check_graph_is_sound(graph: fx.Graph, like: RankGraph, who: str) -> None:
    """UsageError for a graph that cannot be run in place of `like`."""
    try:
        graph.lint()
    except Exception as error:
        raise UsageError(f"{who}: the graph is malformed: {_first_line(error)}") from error
    known = {(n.op, n.target) for n in like.graph.nodes if n.op in ("placeholder", "get_attr")}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if (node.op, node.target) not in known:
                raise UsageError(f"{who}: {node.op} {node.target!r} is no input or weight of the program")
            if "layout" not in node.meta:
                raise UsageError(f"{who}: {node.op} {node.target!r} has lost its meta; copy nodes with Graph.node_copy")
        elif node.op == "call_module":
            raise UsageError(f"{who}: node {node.name} calls module {node.target!r}; rank graphs hold functions only")


def as_graph_module(rank_graph: RankGraph, parameters: Mapping[str, Tensor]) -> fx.GraphModule:
    """A GraphModule of a copy of the graph; weights are meta tensors under their checkpoint names."""
    root = nn.Module()
    for node in rank_graph.graph.nodes:
        if node.op == "get_attr":
            _set(root, node.target, parameters[node.target])
    module = fx.GraphModule(root, copy_graph(rank_graph.graph))
    module.meta["rank_graph"] = rank_graph
    return module


def _set(root: nn.Module, name: str, tensor: Tensor) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def _told(error: Exception) -> str:
    """Type, message, and the innermost line of the user's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    ours = str(Path(__file__).parent)
    users = [f for f in frames if not f.filename.startswith(ours) and not f.filename.startswith("<frozen")]
    where = f" ({users[-1].filename}:{users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
