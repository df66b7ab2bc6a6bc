"""What a rank's c10d call is: one canonical name per operation whatever torch calls it, sizes, and who called."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = tuple(os.path.join(_PACKAGE, part, "") for part in ("runtime", "testing"))
_WRAPPERS = ("typing_extensions.py", "contextlib.py", "functools.py")  # between a torch function and who called it
_API_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_MODULE_CALL = nn.Module._call_impl.__code__
_OBJECT_APIS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
ASYNC_APIS = ("isend", "irecv", "batch_isend_irecv")  # always asynchronous; the others say so in their options


@dataclass
class CommCall:
    """One communication call of one rank.

    op: all_reduce, reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, scatter, barrier, send, recv.
    api: the function the user called. group: mesh axis, or the group's own description. members: global ranks.
    inputs, outputs: [{shape, dtype}]. splits: rows (send, receive) of an all_to_all on one tensor. root, peer: global
    ranks (peer None: a receive from anyone). reduce_op: sum, max, ... waited: its end has been awaited. site: file:line
    of the caller. module: the nn.Module whose forward was running, if any: its qualified name in the outermost module
    that was running, or the class name of that one. traffic: payload, or metadata (sizes of pickled objects). bytes:
    sent by this rank. number: 1, 2, ... among the calls of its group (messages: among those with the same peer and
    direction) since the rank's function began. start_ns, end_ns: wall clock; end_ns 0 while not awaited.
    """

    op: str
    api: str
    group: str
    members: list[int]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    splits: tuple[list[int], list[int]] | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    reduce_op: str | None = None
    is_async: bool = False
    waited: bool = False
    traffic: str = "payload"
    site: str = ""
    module: str | None = None
    bytes: int = 0
    number: int = 0
    start_ns: int = 0
    end_ns: int = 0

    def post(self) -> dict[str, Any]:
        """The part that ranks compare, and the names that an error shows."""
        return {
            "op": self.op, "group": self.group, "site": self.site, "module": self.module, "root": self.root,
            "reduce_op": self.reduce_op, "inputs": self.inputs, "outputs": self.outputs, "splits": self.splits,
        }  # fmt: skip


def describe_tensors(tensors: Any) -> list[dict[str, Any]]:
    """[{shape, dtype}] of a tensor or (nested) list of tensors."""
    if isinstance(tensors, Tensor):
        return [{"shape": list(tensors.shape), "dtype": str(tensors.dtype).removeprefix("torch.")}]
    return [d for t in tensors or () for d in describe_tensors(t)]


def num_bytes(tensors: Any) -> int:
    """Payload bytes of a tensor or (nested) list of tensors."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(num_bytes(t) for t in tensors or ())


def sent_bytes(op: str, inputs: Any, size: int, *, is_root: bool = True, kept: int = 0) -> int:
    """Bytes one rank sends in a group of `size`, by the algorithm-free minimum: all_gather (size-1) * x; reduce_scatter
    and all_to_all all but what it keeps; all_reduce twice (size-1)/size * x; broadcast and scatter from the root only;
    gather and reduce from all but the root."""
    total = num_bytes(inputs)
    if op == "all_gather" or (op == "broadcast" and is_root):
        return total * (size - 1)
    if op == "all_reduce":
        return 2 * total * (size - 1) // size
    if op == "reduce_scatter" or (op == "scatter" and is_root):
        return total * (size - 1) // size
    if op == "all_to_all":
        return total - kept
    if op in ("gather", "reduce"):
        return 0 if is_root else total
    return total if op == "send" else 0


def kept_bytes(inputs: Any, index: int, size: int, send_rows: Sequence[int] | None = None) -> int:
    """Bytes of an all_to_all that rank `index` of `size` sends to itself."""
    if not isinstance(inputs, Tensor):
        return num_bytes(inputs[index])
    rows = inputs.shape[0] if inputs.dim() else 0
    if not rows:
        return 0
    return num_bytes(inputs) // rows * (send_rows[index] if send_rows else rows // size)


def group_label(description: str, fallback: str) -> str:
    """What people call a group: the name it was made with (a DeviceMesh says mesh_tp for its axis tp), or `fallback`
    when it has none."""
    return fallback if description in ("", "undefined", "default_pg") else description.removeprefix("mesh_")


def traffic_of(tensors: Any, is_object: bool) -> str:
    """payload or metadata: calls on pickled objects exchange the objects' sizes (int64) beside their bytes (uint8)."""
    return "metadata" if is_object and any(d["dtype"] == "int64" for d in describe_tensors(tensors)) else "payload"


def caller() -> tuple[str, str, str | None, bool]:
    """(api, file:line, module, is_object): walks out of torch to the function the user called and where.

    is_object: the call moves pickled objects.
    """
    frame: FrameType | None = sys._getframe(1)
    api, site, is_object = "", "unknown", False
    running: list[nn.Module] = []  # modules whose forward is on the stack, inner ones first
    while frame is not None:
        name, code = frame.f_code.co_filename, frame.f_code.co_name
        if frame.f_code is _MODULE_CALL:
            running.append(frame.f_locals["self"])
        if site == "unknown":
            if name.startswith(_TORCH):
                if name.endswith(_API_FILES) and not code.startswith("_") and code != "wrapper":
                    api, is_object = code, is_object or code in _OBJECT_APIS
                elif code == "redistribute_local_tensor":
                    api = "DTensor.redistribute"
            elif not name.startswith(_OURS) and not name.endswith(_WRAPPERS):
                site = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return api, site, _qualified_name(running[::-1]), is_object


def _qualified_name(running: Sequence[nn.Module]) -> str | None:
    """Name of the last module, from the names that each one has inside the one before it."""
    names = [_name_inside(outer, inner) for outer, inner in pairwise(running)]
    return ".".join(names) or (type(running[0]).__name__ if running else None)


def _name_inside(outer: nn.Module, inner: nn.Module) -> str:
    level = [("", outer)]
    while level:  # nearest first: a layer is found before its parts are looked at
        below = [(f"{prefix}{name}", m) for prefix, module in level for name, m in module.named_children()]
        for name, module in below:
            if module is inner:
                return name
        level = [(f"{name}.", module) for name, module in below]
    return type(inner).__name__
