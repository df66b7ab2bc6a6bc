"""What a rank's c10d call is: one canonical name per operation whatever torch calls it, sizes, and who called."""

import os
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))
_API_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_OBJECT_APIS = {
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
    "send_object_list": "send",
    "recv_object_list": "recv",
}


@dataclass
class CommCall:
    """One communication call of one rank.

    op: all_reduce, reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, scatter, barrier, send, recv.
    api: the function the user called. inputs, outputs: [{shape, dtype}]. splits: rows (send, receive) of an uneven
    all_to_all. root, peer: global ranks. reduce_op: sum, max, ... site: file:line of the caller. module: qualified name
    of the nn.Module whose forward was running, if any. traffic: payload, or metadata (sizes of pickled objects).
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


def caller() -> tuple[str, str, str | None, bool]:
    """(api, file:line, module, is_object): walks out of torch to the function the user called and where.

    is_object: the call moves pickled objects.
    """
    frame: FrameType | None = sys._getframe(1)
    api, module, is_object = "", None, False
    while frame is not None:
        name, code = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(_TORCH):
            if name.endswith(_API_FILES) and not code.startswith("_") and code != "wrapper":
                api, is_object = code, is_object or code in _OBJECT_APIS
        elif not name.startswith(_HERE) or "/runtime/" not in name:
            break
        frame = frame.f_back
    site = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"
    return api, site, module, is_object
