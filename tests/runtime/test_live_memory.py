"""The tracker of live memory: worked numbers, and the storages that a real executor holds."""

import torch
from torch import Tensor

from emulator.jobs.prepare import prepare
from emulator.jobs.rank import run_shapes
from emulator.runtime.collectives import Collectives, Unattended
from emulator.runtime.executor import Executor
from emulator.runtime.live_memory import LiveMemory
from emulator.scenario import load_scenario
from emulator.trace.record import TraceWriter


class _Board:
    def set_status(self, rank, text):
        pass


def test_a_view_is_no_new_memory_and_a_value_lives_to_its_last_use():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.relu, (x,))
    view = graph.call_function(torch.flatten, (made, 0))
    small = graph.call_function(torch.sum, (view,))
    for node in graph.nodes:
        node.meta["module"] = "model.layers.0.mlp"
    memory = LiveMemory()
    memory.appeared(x, torch.zeros(4, 2))
    memory.appeared(made, torch.zeros(4, 2))  # 32 bytes
    memory.dropped(x)
    memory.appeared(view, torch.zeros(8))
    memory.dropped(made)
    assert memory.now == 32  # held by the view
    memory.appeared(small, torch.zeros(()))  # 4 bytes
    memory.dropped(view)
    assert (memory.now, memory.peak) == (4, 36)
    report = memory.report()
    assert (report["node"], report["module"]) == (small.name, "model.layers.0.mlp")
    assert [(e["node"], e["bytes"]) for e in report["live"]] == [(made.name, 32), (small.name, 4)]
    assert report["modules"] == {"model.layers.*.mlp": 36}


class _Storages:
    """Observer: the storages that the executor holds for computed values, after every node."""

    def __init__(self):
        self.peak, self.executor, self.outside = 0, None, set()

    def on_value(self, node, value, ids):
        held = {}
        for owner, held_value in self.executor.env.items():
            if owner.op in ("placeholder", "get_attr"):
                continue
            for tensor in held_value if isinstance(held_value, (tuple, list)) else (held_value,):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.outside:
                    held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(held.values()))

    def on_problem(self, node, message):
        raise AssertionError(message)


def _single(mode: str):
    given = {"plan": "tp", "parallel": {"tp": 1}, "tokens": 13, "layers": 3, "mode": mode}
    return prepare(load_scenario("glm-5.1-mini", given))


def _run_real(observer=None) -> dict:
    """The memory record of a real run on one rank."""
    part, writer = _single("real"), TraceWriter(None, {})
    inputs = {k: getattr(part.batch, k) for k in part.batch.__dataclass_fields__}
    executor = Executor(
        part.rank_graph, mesh=part.mesh, rank=0, weights=lambda name, layout: part.weights[name], inputs=inputs,
        collectives=Collectives(part.mesh, 0, _Board(), None, 1.0), board=_Board(), writer=writer, observer=observer,
    )  # fmt: skip
    if observer is not None:
        observer.executor = executor
        caches = [*inputs["latent_caches"], *inputs["index_caches"]]
        observer.outside = {c.untyped_storage().data_ptr() for c in caches}
    executor.run()
    return writer.records[-1]


def test_the_peak_is_what_the_executor_holds():
    observer = _Storages()
    record = _run_real(observer)
    assert record["kind"] == "memory"
    assert record["peak_bytes"] == observer.peak > 0


def test_shape_mode_has_the_same_peak():
    part, writer = _single("shape"), TraceWriter(None, {})
    common = {"mesh": part.mesh, "rank": 0, "board": _Board(), "writer": writer, "phase": "prefill"}
    run_shapes(part, 0, {**common, "collectives": Unattended(part.mesh, 0, _Board(), None, 0.0)})
    assert writer.records[-1] == {**_run_real(), "seq": writer.records[-1]["seq"]}
