"""Watches the c10d and functional collectives of process groups that are not checked ones, such as stock gloo ones.

A dispatch mode sees every c10d operator on its way to the backend, so it works in any process, without any change to
how its groups were made.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emulator.runtime.checked_group import CheckedGroup
from emulator.runtime.comm_call import (
    ASYNC_APIS,
    CommCall,
    caller,
    describe_tensors,
    group_label,
    kept_bytes,
    sent_bytes,
    traffic_of,
)
from emulator.runtime.comm_log import CommLog

# c10d operator -> (canonical op, names of the arguments that hold inputs and outputs)
_C10D = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all", "input", "output"),
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv", "", "tensors"),
}
# functional operator, whatever its ending (_coalesced, _out, _) -> canonical op
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_ROOTED = ("reduce", "broadcast", "gather", "scatter")


class CommWatch(TorchDispatchMode):
    """While entered, gives `log` every call of this process on a group that c10d knows and that is not checked."""

    def __init__(self, log: CommLog):
        super().__init__()
        self.log = log
        self._works: dict[Any, CommCall] = {}  # not yet awaited; holding a work keeps its identity
        self._results: dict[int, CommCall] = {}  # address of a functional result -> its call
        self._wait: Callable = dist.Work.wait

    def __enter__(self) -> Any:
        # no operator tells when a c10d Work is awaited
        self._wait = wait = dist.Work.wait

        def watched_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            done = wait(work, *args, **kwargs)
            self._finish(self._works.pop(work, None))
            return done

        dist.Work.wait = watched_wait  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        self._works.clear()
        self._results.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in _C10D:
            return self._run_c10d(func, name, args, kwargs)
        if func.namespace == "_c10d_functional":
            if name == "wait_tensor":
                self._finish(self._results.pop(_address(args[0]), None))
            op = next((op for start, op in _FUNCTIONAL.items() if name.startswith(start)), None)
            if op is not None:
                return self._run_functional(func, op, args, kwargs)
            if name in ("isend", "irecv", "batch_p2p_ops"):
                return self._run_functional_messages(func, name, args, kwargs)
        if any(t is not Tensor for t in types):
            return NotImplemented  # a DTensor or an unfinished result: its own handler makes the calls, seen here
        return func(*args, **kwargs)

    def _run_c10d(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        given = _bind(func, args, kwargs)
        group = dist.ProcessGroup.unbox(given["process_group"])
        if not _is_users(group):
            return func(*args, **kwargs)
        op, inputs, outputs = _C10D[name]
        call = _describe(op, given.get(inputs, []), given.get(outputs, []), group, given)
        call.is_async = given.get("async_op", False) if call.api not in ASYNC_APIS else True
        self.log.start(call)
        result = func(*args, **kwargs)
        if call.is_async:
            self._works[dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)] = call
        else:
            self._finish(call)
        return result

    def _run_functional(self, func: Any, op: str, args: tuple, kwargs: dict) -> Any:
        given = _bind(func, args, kwargs)
        group = _named(given["group_name"])
        if not _is_users(group):
            return func(*args, **kwargs)
        inputs = given.get("input", given.get("inputs"))
        call = _describe(op, inputs, [], group, {**given, "root_rank": given.get("src")})
        call.is_async = True
        self.log.start(call)
        result = func(*args, **kwargs)
        call.outputs = describe_tensors(result)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            self._results[_address(tensor)] = call
        return result

    def _run_functional_messages(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        given = _bind(func, args, kwargs)
        group = _named(given["group_name"])
        if _is_users(group):
            if name == "batch_p2p_ops":
                messages = list(zip(*(given[n] for n in ("op_list", "tensors", "peer_list", "tag_list"))))
            else:
                messages = [(name, given["tensor"], given.get("dst", given.get("src")), given["tag"])]
            for kind, tensor, peer, tag in messages:
                inputs, outputs = ([tensor], []) if kind == "isend" else ([], [tensor])
                call = _describe(kind[1:], inputs, outputs, group, {"dst": peer, "tag": tag})
                call.is_async = True
                self.log.start(call)
                self._results[_address(tensor)] = call
        return func(*args, **kwargs)

    def _finish(self, call: CommCall | None) -> None:
        if call is not None:
            call.waited = True
            self.log.finish(call)


def watch_needed() -> bool:
    """Whether this process has, or may yet make, groups that are not checked ones."""
    groups = dist.distributed_c10d._world.pg_map
    return not groups or not all(isinstance(group, CheckedGroup) for group in groups)


def own_log() -> CommLog | None:
    """The log that the checked groups of this process write to; None in a process that has none."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return group.log if isinstance(group, CheckedGroup) else None


def _describe(op: str, inputs: Any, outputs: Any, group: Any, given: dict[str, Any]) -> CommCall:
    api, site, module, is_object = caller()
    members, size, index = dist.get_process_group_ranks(group), group.size(), group.rank()
    root = given.get("root_rank") if op in _ROOTED else None
    peer = given.get("dst", given.get("src")) if op in ("send", "recv") else None
    splits = _splits(inputs, outputs, given, size) if op == "all_to_all" and isinstance(inputs, Tensor) else None
    kept = kept_bytes(inputs, index, size, splits and splits[0]) if op == "all_to_all" else 0
    return CommCall(
        op=op,
        api=api or op,
        group=group_label(group.group_desc, "world" if size == dist.get_world_size() else "group"),
        members=members,
        inputs=describe_tensors(inputs),
        outputs=describe_tensors(outputs),
        splits=splits,
        root=None if root is None else members[root],
        peer=None if peer is None else members[peer],
        tag=given.get("tag"),
        reduce_op=_reduce_op(given.get("reduce_op")) if op in ("all_reduce", "reduce", "reduce_scatter") else None,
        traffic=traffic_of((inputs, outputs), is_object),
        site=site,
        module=module,
        bytes=sent_bytes(op, inputs, size, is_root=root in (None, index), kept=kept),
    )


def _splits(inputs: Tensor, outputs: Any, given: dict[str, Any], size: int) -> tuple[list[int], list[int]]:
    """Rows (sent, received) per rank; c10d and the functional operator name them differently, empty means even."""
    rows = [inputs.shape[0], outputs.shape[0] if isinstance(outputs, Tensor) else inputs.shape[0]]
    named = [given.get("input_split_sizes"), given.get("output_split_sizes")]
    sent, received = (list(split) if split else [total // size] * size for split, total in zip(named, rows))
    return sent, received


def _reduce_op(op: Any) -> str | None:
    """sum, max, ... from the name that functional operators take, or the boxed ReduceOp of c10d."""
    return op if op is None or isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name.lower()


def _is_users(group: Any) -> bool:
    return group in dist.distributed_c10d._world.pg_map and not isinstance(group, CheckedGroup)


def _named(group: Any) -> Any:
    """Functional operators take a group or its name."""
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def _bind(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    named = {}
    for index, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = args[index] if index < len(args) else kwargs.get(argument.name, default)
    return named


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
