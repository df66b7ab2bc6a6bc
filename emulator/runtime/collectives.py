"""The one place that talks to other ranks. Every call is compared on the board before the transport is entered."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from emulator.ops.transition import window_lengths, windows_of
from emulator.runtime.board import AXES, Board, CallMismatch, compare_calls, compare_pairs
from emulator.runtime.comm_call import CommCall, num_bytes, sent_bytes
from emulator.runtime.comm_log import CommLog
from emulator.runtime.mesh import Mesh
from emulator.runtime.transport import Transport

_SAME = ("op", "module", "dtype", "shape", "dim", "layout")


class Collectives:
    """A rank's transition ops over its mesh.

    transport: None when nothing moves (shape mode); then `evaluate(target, args, kwargs)` gives the shapes.
    on_mixed: called with a message when a reduction is about to sum different tokens (the ids differ between ranks).
    """

    def __init__(
        self, mesh: Mesh, rank: int, board: Board, transport: Transport | None, timeout: float
    ):  # fmt: skip
        self.mesh, self.rank, self.board, self.transport, self.timeout = mesh, rank, board, transport, timeout
        self.log: CommLog | None = None  # gets every call, for a dump after a failure
        self.evaluate: Callable[..., Tensor] | None = None
        self.on_mixed: Callable[[str], None] = lambda message: None

    def call(
        self, op: str, x: Tensor, *args: Any, node: str, module: str, layout: str, ids: Tensor | None = None
    ) -> Tensor:
        """Executes a transition op of the rank graph on this rank's tensor. ids: global token id of each row of x."""
        if op == "slice":
            axis, size, dim = args
            if self.evaluate is not None:
                return self.evaluate(torch.ops.emulator.slice, (x, *args), {})
            return x.chunk(size, dim)[self.mesh.index(axis, self.rank)].clone()
        if op == "slice_rows":
            counts, axis, size = args
            of_ranks = splits(counts, size)
            index = self.mesh.index(axis, self.rank)
            return x.narrow(0, sum(of_ranks[:index]), of_ranks[index]).clone()
        if op in ("local_query_lens", "local_kv_lens"):
            return self._local_lengths(op, x, args)
        axis = args[2] if op == "all_to_all_rows" else args[0]
        call: dict[str, Any] = {
            "op": op,
            "group": axis,
            "node": node,
            "module": module,
            "dtype": str(x.dtype),
            "shape": list(x.shape),
            "layout": layout,
        }
        if op == "broadcast":  # only the owner holds the value
            call["shape"] = [args[3], *x.shape[1:]]
        call["dim"] = [] if op == "all_to_all_rows" else list(args[2:])
        logged = self._log(call, args)
        if op == "all_to_all_rows":
            output = self._all_to_all_rows(x, *args, call=call)
        else:
            output = self._collective(op, x, args, call, ids)
        if logged is not None and self.log is not None:
            self.log.finish(logged)
        return output

    def _local_lengths(self, op: str, x: Tensor, args: tuple) -> Tensor:
        """Per-request lengths of this rank's windows."""
        if self.evaluate is not None:
            return self.evaluate(getattr(torch.ops.emulator, op), (x, *args), {})
        axis, size, per, order = args[-4:]
        windows = windows_of(order, size, per, self.mesh.index(axis, self.rank))
        queries, keys = (args[0], x) if op == "local_kv_lens" else (x, x)
        return window_lengths(queries, keys, windows)[op == "local_kv_lens"]

    def _collective(self, op: str, x: Tensor, args: tuple, call: dict[str, Any], ids: Tensor | None) -> Tensor:
        axis = args[0]
        if op in ("all_reduce", "reduce_scatter") and ids is not None:
            call["ids"] = zlib.crc32(ids.numpy().tobytes())
        posts = self._agree(axis, call, _SAME)
        if len({p.get("ids") for p in posts}) > 1:
            self.on_mixed(f"{op} on {axis} sums rows of different tokens")
        return self._move(op, x, axis, *args[1:])

    def _agree(self, axis: str, call: dict[str, Any], fields: tuple[str, ...]) -> list[Mapping[str, Any]]:
        members = self.mesh.members(axis, self.rank)
        self.board.set_status(self.rank, f"waiting in {call['op']} ({call['node']}) of {call['module']}")
        posts = self.board.agree(AXES.index(axis), members, self.rank, call, self.timeout)
        compare_calls(axis, members, posts, fields)
        return posts

    def _log(self, call: Mapping[str, Any], args: tuple) -> CommCall | None:
        """The call in the terms of recorders and dumps."""
        if self.log is None:
            return None
        axis, dtype, shape = call["group"], call["dtype"].removeprefix("torch."), list(call["shape"])
        splits = None
        if call["op"] == "all_to_all_rows":
            splits = (args[0], args[1])
            shape[0] = sum(args[1])
        elif call["op"] == "all_gather":
            shape[args[2]] *= args[1]
        elif call["op"] == "reduce_scatter":
            shape[args[2]] //= args[1]
        elif call["op"] == "all_to_all":
            shape[args[2]], shape[args[3]] = shape[args[2]] // args[1], shape[args[3]] * args[1]
        logged = CommCall(
            op="all_to_all" if splits else call["op"],
            api=call["op"],
            group=axis,
            members=self.mesh.members(axis, self.rank),
            inputs=[{"shape": call["shape"], "dtype": dtype}],
            outputs=[{"shape": shape, "dtype": dtype}],
            splits=splits,
            site=f"{call['module']} ({call['node']})",
            module=call["module"],
        )
        self.log.start(logged)
        return logged

    def _move(self, op: str, x: Tensor, axis: str, size: int, *dims: int) -> Tensor:
        if self.evaluate is not None:  # shape mode: nothing moves, the op's fake kernel tells the shape
            return self.evaluate(getattr(torch.ops.emulator, op), (x, axis, size, *dims), {})
        assert self.transport is not None, "this world has no transport"
        if op == "all_reduce":
            return self.transport.all_reduce(x, axis)
        if op == "reduce_scatter":
            return self.transport.reduce_scatter(x.movedim(dims[0], 0), axis).movedim(0, dims[0])
        if op == "broadcast":
            owner, rows = dims
            return self.transport.broadcast(x, axis, owner, (rows, *x.shape[1:]))
        if op == "all_gather":
            return self.transport.all_gather(x.movedim(dims[0], 0), axis).movedim(0, dims[0]).contiguous()
        assert op == "all_to_all", op
        split_dim, concat_dim = dims
        pieces = torch.stack(x.chunk(size, split_dim))
        moved = self.transport.all_to_all(pieces, axis, [1] * size, [1] * size)
        return torch.cat(list(moved.unbind(0)), concat_dim)

    def _all_to_all_rows(
        self, rows: Tensor, send: list[int], receive: list[int], axis: str, size: int, *, call: dict[str, Any]
    ) -> Tensor:
        """Uneven all_to_all: send[i] rows go to, receive[i] rows come from, the i-th rank of the group."""
        if sum(send) != rows.shape[0]:
            raise CallMismatch(f"{call['module']}: {rows.shape[0]} rows, but the split list sends {sum(send)}")
        call.update(width=list(rows.shape[1:]), splits=(send, receive))
        posts = self._agree(axis, call, ("op", "module", "dtype", "width", "layout"))
        sends, receives = zip(*(p["splits"] for p in posts))
        compare_pairs(axis, self.mesh.members(axis, self.rank), sends, receives, call["module"])
        if self.evaluate is not None:
            return self.evaluate(torch.Tensor.new_empty, (rows, (sum(receive), *rows.shape[1:])), {})
        assert self.transport is not None, "this world has no transport"
        return self.transport.all_to_all(rows, axis, send, receive)


class Unattended(Collectives):
    """One rank's calls without the others, for shapes only: no call is compared with another's."""

    def _agree(self, axis: str, call: dict[str, Any], fields: tuple[str, ...]) -> list[Mapping[str, Any]]:
        return [call]

    def _all_to_all_rows(
        self, rows: Tensor, send: list[int], receive: list[int], axis: str, size: int, *, call: dict[str, Any]
    ) -> Tensor:
        assert self.evaluate is not None
        return self.evaluate(torch.Tensor.new_empty, (rows, (sum(receive), *rows.shape[1:])), {})


def splits(counts: Tensor, size: int) -> list[int]:
    """Rows per rank of a counts matrix: [size, X] (rows from each source for each expert here) sums over experts;
    [1, E] (rows here for each expert) sums each rank's block of experts."""
    return counts.reshape(size, -1).sum(1).tolist()


def bytes_sent(op: str, x: Tensor, size: int, kept_rows: int = 0) -> int:
    """Bytes one rank sends in a transition op (formulas: comm_call.sent_bytes); `slice` sends none. An even all_to_all
    keeps x/size, an uneven one kept_rows of its rows. Who sends nothing in a broadcast holds nothing either."""
    total = num_bytes(x)
    if op == "all_to_all_rows":
        return sent_bytes("all_to_all", x, size, kept=total // max(x.shape[0], 1) * kept_rows)
    return sent_bytes(op, x, size, kept=total // size)
