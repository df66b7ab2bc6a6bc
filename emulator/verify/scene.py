"""What a diagnosis looks at, and what it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from emulator.layout.placement import Tokens
from emulator.runtime.mesh import Mesh


@dataclass
class Scene:
    """Everything about the first wrong node of a rank graph, on all ranks, in one process. Lists are by global rank.

    node: an op, view or transition; its meta and that of its argument nodes hold "layout" (a tuple for several outputs)
    and "module". found: its value on every rank, of any shape; empty tensors when the node raised. expected: the real
    rows each rank should hold (the reference cut by the layout), None for partial sums. reference: the whole
    single-device value. operands: values of node.args. ids: global token id of each found row (padding -1), where
    known. wrong: ranks whose value is wrong. tolerance: largest absolute error that is rounding. weights: whole weights
    by parameter name. related: other whole reference values that may stand in for this one (other layers, earlier
    steps, neighbours), by a name fit for people. output: which output found, expected and reference are, where the node
    has several.
    """

    node: fx.Node
    mesh: Mesh
    tokens: Tokens
    found: list[Tensor]
    expected: list[Tensor | None]
    reference: Tensor | None
    operands: list[list[Any]]
    ids: list[Tensor | None]
    wrong: list[int]
    tolerance: float
    weights: Mapping[str, Tensor]
    related: Mapping[str, Tensor]
    output: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """kind: one of diagnosis.KINDS. text: one or two sentences for people. holds: the numbers behind it (JSON-able)."""

    kind: str
    text: str
    holds: dict[str, Any]
