"""Replicated weights exist once per host: 16 ranks that map them, against 16 that copy them."""

import gc

import psutil
import pytest
import torch
from torch import Tensor

from emulator.jobs.prepare import Prepared, add_weights, load_weights, prepare
from emulator.runtime.comm_call import num_bytes
from emulator.runtime.rank_process import RankContext
from emulator.runtime.rank_weights import local_shard
from emulator.runtime.threads import single_thread
from emulator.runtime.world import World
from emulator.scenario import load_scenario

RANKS, VOCABULARY = 16, 31200  # an embedding of 36 MB beside weights of 1 MB
MB = 1e6


def _parts(prepared: Prepared, rank: int) -> list[Tensor]:
    nodes = [n for n in prepared.rank_graph.graph.nodes if n.op == "get_attr"]
    layouts = {n.target: n.meta["layout"] for n in nodes}
    return [local_shard(prepared.weights[name], layout, prepared.mesh, rank) for name, layout in layouts.items()]


def _memory() -> tuple[float, float]:
    info = psutil.Process().memory_full_info()
    return info.uss / MB, info.pss / MB


def _touch(tensors: list[Tensor]) -> float:
    """Reads a value of every page (4096 bytes)."""
    return sum(float(t.flatten()[:: 4096 // t.element_size()].double().sum()) for t in map(_contiguous, tensors))


def _contiguous(tensor: Tensor) -> Tensor:
    """A view of a shard of in-features is no row of pages; its own columns are read one by one."""
    return tensor if tensor.is_contiguous() else tensor.t() if tensor.t().is_contiguous() else tensor[:, :1].clone()


def _mapped(prepared: Prepared, context: RankContext) -> tuple[float, float, float]:
    """MB of this rank's weights, and what reading them adds to its private and its proportional memory."""
    before = _begin(context)
    parts = _parts(prepared, context.rank)
    _touch(parts)
    _meet(context)  # a page counts as shared once all ranks have read it
    after = _memory()
    _meet(context)
    return sum(num_bytes(p) for p in parts) / MB, after[0] - before[0], after[1] - before[1]


def _begin(context: RankContext) -> tuple[float, float]:
    gc.disable()  # it would write to every inherited object, and so copy its page
    _touch([torch.ones(1000)])
    _meet(context)
    before = _memory()
    _meet(context)
    return before


def _meet(context: RankContext) -> None:
    context.board.agree(0, range(context.mesh.size), context.rank, {"op": "meet"}, 60)


def _copied(prepared: Prepared, context: RankContext) -> tuple[float, float, float]:
    """The same with a copy of its own."""
    before = _begin(context)
    parts = [p.clone() for p in _parts(prepared, context.rank)]
    _meet(context)
    after = _memory()
    _meet(context)
    return sum(num_bytes(p) for p in parts) / MB, after[0] - before[0], after[1] - before[1]


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "w8a8_dynamic"])
def test_replicated_weights_exist_once(quant):
    given = {
        "plan": "dsa_cp", "parallel": {"tp": RANKS, "ep": RANKS}, "layers": 2, "tokens": 16, "quant": quant,
        "model_sizes": {"vocab_size": VOCABULARY, "num_attention_heads": 16, "intermediate_size": 256},
        "variants": {"embedding": "replicated", "dense_mlp": "replicated"},
    }  # fmt: skip
    with single_thread():
        prepared = prepare(load_scenario("glm-5.1-mini", given), graph_only=True)
        add_weights(prepared, load_weights(prepared.program, prepared.scenario))
        world = World(prepared.mesh, timeout=120, communicate=False)
        mapped, copied = world.run(_mapped, prepared), world.run(_copied, prepared)
    held = sum(h for h, _, _ in mapped) / RANKS
    uss, pss = ([sum(m[i] for m in found) for found in (mapped, copied)] for i in (1, 2))
    print(
        f"\n{quant}: {held:.1f} MB of weights on each of {RANKS} ranks; private memory (USS) grows by {uss[0]:.1f} MB "
        f"in all when they map them, {uss[1]:.1f} MB when they copy them; proportional (PSS) by {pss[0]:.1f} and "
        f"{pss[1]:.1f} MB"
    )
    assert held > VOCABULARY * 144 * 8 / MB  # the embedding is whole on every rank
    assert uss[1] > 0.9 * RANKS * held
    own = VOCABULARY // RANKS * 144 * 8 / MB  # of the one sharded weight: nobody else reads those pages
    assert uss[0] < RANKS * (own + 3)  # and what reading takes in a process
    assert pss[0] < held + RANKS * (own + 3)
