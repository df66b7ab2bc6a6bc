"""Value check on one rank: every module boundary against the reference, by token ids, shape and values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.layout.plan import layer_of
from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.model.program import Program
from emulator.runtime.mesh import Mesh
from emulator.runtime.shadow import describe_ids
from emulator.verify.choices import choices_of, differing_rows, num_flips
from emulator.verify.expected import Expectation, Expected, Peer, group_rows_of
from emulator.verify.reference import Tolerance


@dataclass
class ValueReport:
    """What one rank found. failures: first one per node, in graph order; worst: largest error in tolerances. caches,
    exact_caches: cache values compared, and those equal to the reference bit for bit."""

    checked: int = 0
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    worst: float = 0.0
    flips: int = 0
    caches: int = 0
    exact_caches: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


class ValueCheck:
    """Observer of one rank's run.

    force_choices: for dtypes below float64, top-k ids and expert choices are
    compared, then replaced by the reference's, so that one near-tie is not followed through every later layer.
    """

    def __init__(
        self, program: Program, rank_graph: RankGraph, mesh: Mesh, rank: int,
        peers: Sequence[Peer], tolerance: Tolerance, *, force_choices: bool,
    ):  # fmt: skip
        self.rank, self.tolerance, self.peers = rank, tolerance, peers
        self.expectation = Expectation(program, mesh, rank, peers, group_rows_of(rank_graph.graph))
        self.reference = self.expectation.reference
        self.edges: dict[str, list[Boundary]] = {}
        for boundary in rank_graph.boundaries:
            self.edges.setdefault(boundary.node, []).append(boundary)
        self.order = {node.name: i for i, node in enumerate(rank_graph.graph.nodes)}
        self.choices = choices_of(program.graph) if force_choices else set()
        self.report = ValueReport()

    def on_problem(self, node: fx.Node, message: str) -> None:
        self._fail(node, {"tokens": "the same tokens"}, {"tokens": message}, message)

    def on_value(self, node: fx.Node, value: Tensor, ids: Tensor | None) -> Tensor | None:
        """Checks a boundary value; returns a replacement for a discrete choice, or None."""
        origin, layout = node.meta["origin"], node.meta["layout"]
        is_boundary = node.name in self.edges
        if origin not in self.reference or not (is_boundary or origin in self.choices):
            return None
        expected = self.expectation.of(origin, layout)
        if expected is None:
            return None
        if is_boundary:
            self.report.checked += 1
            self._compare(node, value, ids, expected, layout)
        return self._forced(value, expected) if origin in self.choices else None

    def _compare(self, node: fx.Node, value: Tensor, ids: Tensor | None, expected: Expected, layout: Layout) -> None:
        want = {"layout": str(layout), "shape": _shape(expected)}
        found = {"layout": str(layout), "shape": list(value.shape)}
        if expected.ids is not None:
            want["tokens"] = describe_ids(expected.ids)
            found["tokens"] = describe_ids(ids) if ids is not None else "unknown"
            if ids is None or not torch.equal(ids, expected.ids):
                return self._fail(node, want, found, f"holds tokens {found['tokens']}, expected {want['tokens']}")
        if list(value.shape) != want["shape"]:
            return self._fail(node, want, found, f"shape {found['shape']}, expected {want['shape']}")
        real = expected.real_rows(value)
        if not value.is_floating_point() or node.meta["origin"] in self.choices:
            return self._compare_choices(node, real, expected.value, want, found)
        self._compare_floats(node, real, expected.value, want, found)

    def _compare_choices(self, node: fx.Node, value: Tensor, expected: Tensor, want: dict, found: dict) -> None:
        """Integers must be equal (top-k ids: as sets); choices of a lower precision may flip in a share of the rows."""
        origin = node.meta["origin"]
        if not value.numel():
            return
        if value.dim() == 2 and node.meta["layout"].kind == "token":
            rows = differing_rows(value, expected, self.tolerance.absolute[origin])
            if not value.is_floating_point():
                self.report.flips += num_flips(value, expected)
        else:
            rows = (value != expected).reshape(len(value), -1).any(1)
        share = self.tolerance.flips.get(origin, 0.0)
        if int(rows.sum()) > (max(2, share * len(rows)) if share else 0):
            row = int(rows.nonzero()[0])
            found["values"] = f"row {row}: {value[row].flatten()[:8].tolist()}"
            want["values"] = f"row {row}: {expected[row].flatten()[:8].tolist()}"
            self._fail(node, want, found, f"{int(rows.sum())} of {len(rows)} rows hold other ids")

    def _compare_floats(self, node: fx.Node, value: Tensor, expected: Tensor, want: dict, found: dict) -> None:
        if not value.numel():
            return
        if node.meta["layout"].kind == "cache":
            self.report.caches += 1
            self.report.exact_caches += torch.equal(value.nan_to_num(), expected.nan_to_num())
        value, expected = value.double(), expected.double()
        difference = (value - expected).abs()
        difference[value.isnan() & expected.isnan()] = 0.0  # cache slots that nobody wrote
        worst = float(difference.max())
        tolerance = self.tolerance.absolute[node.meta["origin"]]
        report = self.report
        if worst == worst:
            report.max_abs_error = max(report.max_abs_error, worst)
            scale = max(_largest(peer.reference[node.meta["origin"]]) for peer in self.peers)
            report.max_rel_error = max(report.max_rel_error, worst / scale if scale else 0.0)
            report.worst = max(report.worst, worst / tolerance if tolerance else 0.0)
        if worst <= tolerance:
            return
        bad = ~(difference <= tolerance)
        rows = bad.reshape(len(bad), -1).any(1)
        row = int(rows.nonzero()[0])
        at = int(bad[row].flatten().nonzero()[0])
        found["values"] = f"row {row}: {float(value[row].flatten()[at]):.6g}"
        want["values"] = f"row {row}: {float(expected[row].flatten()[at]):.6g} (tolerance {tolerance:.2g})"
        what = "NaN (padding leaked, or memory that nobody wrote)" if worst != worst else f"error {worst:.3g}"
        self._fail(node, want, found, f"{int(rows.sum())} of {len(rows)} rows differ, {what}")

    def _forced(self, value: Tensor, expected: Expected) -> Tensor:
        forced = value.clone()
        rows = torch.arange(len(value)) if expected.ids is None else (expected.ids >= 0).nonzero().squeeze(1)
        forced[rows[: len(expected.value)]] = expected.value
        return forced

    def _fail(self, node: fx.Node, expected: dict[str, Any], found: dict[str, Any], detail: str) -> None:
        for failure in self.report.failures:
            if failure["node"] == node.name:  # ids and values of one node: one failure that tells both
                failure["detail"] += f"; {detail}"
                failure["expected"].update(expected)
                failure["found"].update(found)
                return
        if len(self.report.failures) >= 50:
            return
        edges = self.edges.get(node.name, [])
        edge = edges[0] if edges else None
        module = edge.module if edge else node.meta["module"]
        self.report.failures.append(
            {
                "layer": layer_of(module),
                "module": module,
                "port": edge.port if edge else "inside",
                "rank": self.rank,
                "node": node.name,
                "edges": [(e.module, e.port) for e in edges],
                "order": self.order[node.name],
                "expected": expected,
                "found": found,
                "detail": detail,
            }
        )


def _shape(expected: Expected) -> list[int]:
    """Shape on the rank: the real rows, and padding where the tokens are known."""
    shape = list(expected.value.shape)
    if expected.ids is not None and shape:
        shape[0] = len(expected.ids)
    return shape


def _largest(value: Tensor) -> float:
    return float(value.abs().nan_to_num(0.0).max()) if value.numel() else 0.0
