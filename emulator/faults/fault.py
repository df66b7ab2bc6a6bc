"""What a fault is: one named mistake of a graph, a weight, a batch description or one rank's behaviour."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from emulator.faults.on_graph import GraphEdit
from emulator.faults.on_rank import RankSite
from emulator.layout.placement import Tokens
from emulator.model.config import ModelConfig
from emulator.runtime.mesh import Mesh

Kind = Literal["graph", "weights", "metadata", "behaviour"]


@dataclass(frozen=True)
class Place:
    """A node: module (`*` for the layer number) and any of these ops; no ops: any node of the module."""

    module: str
    ops: tuple[str, ...] = ()


def at(module: str, *ops: str) -> Place:
    """A place; a module of a decoder layer may leave out `model.layers.*.`"""
    whole = module.startswith(("model.", "lm_head"))
    return Place(module if whole else f"model.layers.*.{module}", ops)


@dataclass(frozen=True)
class Case:
    """What a claim of no effect may depend on: the model, the ranks, how the tokens lie, and the token ids [T]."""

    config: ModelConfig
    mesh: Mesh
    tokens: Tokens
    input_ids: Tensor

    def num_real(self, rank: int) -> int:
        """Real rows in a rank's window."""
        start, end = self.tokens.window(self.mesh.index("tp", rank))
        return end - start


NoEffect = Callable[[Case], str | None]


def always(case: Case) -> None:
    """There is an effect, whatever the sizes."""


def no_padding(case: Case) -> str | None:
    if case.tokens.padded == case.tokens.real:
        return f"{case.tokens.real} tokens divide over {case.mesh.tp} ranks: there is no padding"
    return None


def all_have_rows(case: Case) -> str | None:
    return "every rank holds a real row" if all(case.num_real(r) for r in range(case.mesh.tp)) else None


def no_row_on_rank_1(case: Case) -> str | None:
    return None if case.num_real(1) else "rank 1 holds no real row"


@dataclass(frozen=True)
class Fault:
    """inject: edits the SPMD graph (kind graph), or what one rank holds, is told or does (other kinds).

    places: where its first wrong node is. diagnoses: kinds of diagnosis that are right for it. cases: entries of the
    public bug catalogue that it expresses. layers: fewest layers that show it. plan, variants: where it applies. mtp:
    whether it is in the multi-token-prediction layer. ep_parts: the expert-parallel group is tp / ep_parts ranks (None:
    as large as can be). timeout: seconds after which its ranks have stalled (None: the scenario's). no_effect: why it
    provably changes nothing for some sizes.
    """

    name: str
    summary: str
    kind: Kind
    inject: Callable[[Any], None]
    places: tuple[Place, ...]
    diagnoses: frozenset[str]
    cases: tuple[str, ...] = ()
    layers: int = 1
    plan: str = "dsa_cp"
    variants: Mapping[str, str] = field(default_factory=dict)
    mtp: bool = False
    ep_parts: int | None = None
    timeout: float | None = None
    no_effect: NoEffect = always


def graph_fault(**fields: Any) -> Callable[[Callable[[GraphEdit], None]], Fault]:
    """A fault of the graph that all ranks run, from a function that makes it."""
    return _named("graph", fields)


def rank_fault(kind: Kind, **fields: Any) -> Callable[[Callable[[RankSite], None]], Fault]:
    """A fault of what a rank holds, is told or does, from a function that makes it there."""
    return _named(kind, fields)


def _named(kind: Kind, fields: dict[str, Any]) -> Callable[[Callable[[Any], None]], Fault]:
    """The function's name and the first line of its docstring are the fault's name and summary."""

    def make(function: Callable[[Any], None]) -> Fault:
        assert function.__doc__, f"{function.__name__} says nothing of itself"
        summary = " ".join(function.__doc__.split("\n\n")[0].split())
        places = fields.pop("places")
        return Fault(
            name=function.__name__.replace("_", "-"), summary=summary, kind=kind, inject=function,
            places=(places,) if isinstance(places, Place) else tuple(places),
            diagnoses=frozenset(_words(fields.pop("diagnoses", ()))), **fields,
        )  # fmt: skip

    return make


def _words(given: str | Iterable[str]) -> Iterable[str]:
    return given.split() if isinstance(given, str) else given
