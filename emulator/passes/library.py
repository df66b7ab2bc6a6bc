"""The package's own passes in the form that `--pass` takes: GraphModule in, GraphModule out."""

from torch import fx

from emulator.layout.annotate import annotate
from emulator.passes.sequence_parallel import sequence_parallel


def sequence_parallel_pass(module: fx.GraphModule) -> fx.GraphModule:
    """sequence_parallel of the rank graph that `module` holds."""
    before = annotate(module.graph, module.meta["rank_graph"])
    return fx.GraphModule(module, sequence_parallel(before).graph)
