"""Objects between processes: cloudpickle for functions and objects, shared memory for tensors.

Tensors are written once into an anonymous memory file and mapped on the other side, so they come back without a copy
through the pipe, and nothing is left behind in shared memory when a process dies.
"""

import io
import mmap
import os
import pickle
import socket
import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle
import torch
from torch import Tensor

_ALIGN = 64


def _code_with_filename(code: types.CodeType) -> tuple:
    """cloudpickle forgets the file a function came from; tracebacks and call sites need it."""
    make, args, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in args), *rest


class _Pickler(cloudpickle.Pickler):
    """Takes plain CPU tensors out of the pickle."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code_with_filename}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, buffer: io.BytesIO):
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or not obj.numel():
            return None
        start = self.end
        self.end = -(-(start + obj.numel() * obj.element_size()) // _ALIGN) * _ALIGN
        self.tensors.append(obj.detach().contiguous())
        return start, obj.dtype, tuple(obj.shape), obj.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, memory: mmap.mmap | None):
        super().__init__(buffer)
        self.memory = memory

    def persistent_load(self, pid: Any) -> Tensor:
        start, dtype, shape, requires_grad = pid
        count = torch.Size(shape).numel()
        tensor = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start).view(shape)
        return tensor.requires_grad_(requires_grad)


def encode(value: Any) -> tuple[bytes, int | None]:
    """(pickle, file descriptor of the tensors' memory or None). The caller closes the descriptor."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    if not pickler.tensors:
        return buffer.getvalue(), None
    handle = os.memfd_create("emulator-tensors")
    os.ftruncate(handle, pickler.end)
    with mmap.mmap(handle, pickler.end) as memory:
        start = 0
        for tensor in pickler.tensors:
            size = tensor.numel() * tensor.element_size()
            memory[start : start + size] = _raw(tensor)
            start = -(-(start + size) // _ALIGN) * _ALIGN
    return buffer.getvalue(), handle


def _raw(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def decode(payload: bytes, handle: int | None) -> Any:
    """The value again. Its tensors are views of the memory, private to this process (writes are not seen elsewhere)."""
    memory = None
    if handle is not None:
        memory = mmap.mmap(handle, os.fstat(handle).st_size, access=mmap.ACCESS_COPY)
    return _Unpickler(io.BytesIO(payload), memory).load()


class Channel:
    """One end of a socket pair over which encoded values travel."""

    def __init__(self, end: socket.socket):
        self.socket = end

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, encoded: tuple[bytes, int | None]) -> None:
        payload, handle = encoded
        header = len(payload).to_bytes(8, "little") + bytes([handle is not None])
        if handle is None:
            self.socket.sendall(header)
        else:
            socket.send_fds(self.socket, [header], [handle])
        self.socket.sendall(payload)

    def receive(self) -> Any:
        """The next value; EOFError when the other side is gone."""
        header, handles, _, _ = socket.recv_fds(self.socket, 9, 1)
        while header and len(header) < 9:
            header += self.socket.recv(9 - len(header))
        if not header:
            raise EOFError
        try:
            return decode(self._exactly(int.from_bytes(header[:8], "little")), handles[0] if handles else None)
        finally:
            for handle in handles:
                os.close(handle)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(min(1 << 20, size - len(parts)))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()
