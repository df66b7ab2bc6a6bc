"""Collectives over the link level that a group spans: transfer only, waiting for other ranks is the replay's.

Form: launch + wide [more than 8 ranks] + switch * (ranks - 1) [above 512 KiB per rank] + wire. The protocol
switch: near 512 KiB per rank HCCL changes its algorithm, and the time steps up by a handshake per peer; a plain latency
and bandwidth line misses by 20 % where this misses by 7 % (public communication reports of an msmodeling fork, 8 and 16
dies of an A3).
"""

import math

from emulator.cost.device import Device
from emulator.cost.kernel import Kernel
from emulator.cost.work import MICROSECOND, Term, Unpriceable, Work, launch, size

SWITCH = 512 * 1024  # bytes per rank
WIDE = 8  # ranks; a launch over more takes longer


def group(kernel: Kernel) -> tuple[int, ...]:
    ranks = kernel.sizes.get("ranks")
    if not isinstance(ranks, tuple | list) or not ranks or not all(isinstance(r, int) and r >= 0 for r in ranks):
        raise Unpriceable(kernel, f"size 'ranks' must list the global ranks of the group, not {ranks!r}")
    if len(set(ranks)) != len(ranks):
        raise Unpriceable(kernel, f"size 'ranks' lists a rank twice: {ranks!r}")
    return tuple(ranks)


def wire_bytes(kernel: Kernel, ranks: int) -> float:
    """Bytes one rank sends (or receives, if more) with bandwidth-optimal algorithms (Chan et al., CCPE 19(13), 2007).

    all_gather and reduce_scatter (N-1)*shard; all_reduce 2*(N-1)/N*tensor; broadcast and send the tensor; all_to_all
    the larger of sent and received.
    """
    op, given = kernel.sizes.get("op"), size(kernel, "bytes")
    if op in ("all_gather", "reduce_scatter"):
        return (ranks - 1) * given
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks * given
    if op in ("broadcast", "send"):
        return given if ranks > 1 else 0.0
    if op == "all_to_all":
        return max(given, size(kernel, "received", given)) if ranks > 1 else 0.0
    raise Unpriceable(kernel, f"unknown collective {op!r}")


def shard(kernel: Kernel, ranks: int) -> float:
    """Bytes that pass between two ranks at a time, which HCCL decides by: the shard, or a 1/N part."""
    given = size(kernel, "bytes")
    return given if kernel.sizes["op"] in ("all_gather", "reduce_scatter") else given / ranks


def collective(kernel: Kernel, device: Device) -> Work:
    """One call on one rank of the group. send: one copy between two ranks, latency and wire."""
    ranks = group(kernel)
    count = len(ranks)
    link = device.level(ranks)
    wire = wire_bytes(kernel, count)
    reduces = kernel.sizes["op"] in ("reduce_scatter", "all_reduce")
    if kernel.sizes["op"] == "send":
        terms = [Term("latency", link.latency, "communication"), Term("wire", wire / link.bandwidth, "communication")]
        return Work(0.0, wire, tuple(terms))
    terms = [launch(), Term("wire_reduce" if reduces else "wire", wire / link.bandwidth, "communication")]
    terms.append(Term("wide", MICROSECOND if count > WIDE else 0.0, "launch"))
    if shard(kernel, count) > SWITCH:
        terms.append(Term("switch", (count - 1) * MICROSECOND, "communication"))
    return Work(0.0, wire, tuple(terms))


def exchange(kernel: Kernel, device: Device) -> Work:
    """MoE dispatch or combine fused with its exchange: tokens * topk rows of `hidden` go to the ranks of the experts.

    ranks: how many share the experts; they are taken as neighbours. Optional row_bytes: bytes of one row on the wire
    (default: hidden elements, and a 4-byte scale for int8). 1/ranks of the rows stay at home. Further steps grow with
    log2 of the ranks.
    """
    tokens, hidden, topk, ranks = (size(kernel, name) for name in ("tokens", "hidden", "topk", "ranks"))
    if ranks < 1:
        raise Unpriceable(kernel, "size 'ranks' must be at least 1")
    item = 1 if kernel.dtype == "int8" else 2
    row = size(kernel, "row_bytes", hidden * item + (4 if kernel.dtype == "int8" else 0))
    link = device.level(tuple(range(int(ranks))))
    wire = tokens * topk * row * (ranks - 1) / ranks
    steps = math.log2(ranks)
    terms = (
        launch(),
        Term("latency", steps * link.latency, "communication"),
        Term("wire", wire / link.bandwidth, "communication"),
        Term("spread", steps * wire / link.bandwidth, "communication"),
    )
    return Work(0.0, wire, terms)
