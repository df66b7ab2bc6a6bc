"""send and recv of a checked group: a receive reaches gloo once its sender has posted a message that fits."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from emulator.runtime.board import DONE, CallMismatch, PeerFailed, PeerStalled
from emulator.runtime.comm_call import CommCall

if TYPE_CHECKING:
    from emulator.runtime.checked_group import CheckedGroup


class PointToPoint:
    """Messages of one rank in one group. Every rank posts its sends, whoever they are for, in one sequence."""

    def __init__(self, group: "CheckedGroup"):
        self.group = group
        self.slot = group.slot + 1
        self.sent, self.received = Counter[int](), Counter[int]()
        self.read: dict[int, int] = {}  # per source: posts looked at
        self.inbox: dict[int, list[Mapping[str, Any]]] = {}  # per source: messages for me that no receive has taken
        self.lost: set[int] = set()
        self.pending: list[_Receive] = []

    def send(self, tensors: Any, dst: int, tag: int) -> "_Send":
        call = self._describe("send", tensors, dst, tag)
        self.sent[dst] += 1
        self.group.board.post(self.slot, self.group.global_rank, {**call.post(), "dst": dst, "tag": tag})
        return _Send(self, call, self.group.inner.send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int) -> "_Receive":
        call = self._describe("recv", tensors, src, tag)
        self.received[src] += 1
        receive = _Receive(self, call, tensors, src, tag)
        self.pending.append(receive)
        self.progress()
        return receive

    def progress(self) -> None:
        """Hands gloo every receive whose message has been posted."""
        for receive in list(self.pending):
            message = self._message(receive.src, receive.tag)
            if message is not None:
                self.pending.remove(receive)
                receive.launch(message)

    def _message(self, src: int, tag: int) -> Mapping[str, Any] | None:
        board, member = self.group.board, self.group.members[src]
        at = self.read.get(src, 0)
        while board.all_posted(self.slot, [member], at + 1):
            at += 1
            post = board.read_post(self.slot, member, at)
            if post is None:  # we fell too far behind to know its messages: gloo takes them unchecked
                self.lost.add(src)
            elif post.get("dst") == self.group.rank():
                self.inbox.setdefault(src, []).append(post)
        self.read[src] = at
        for index, post in enumerate(self.inbox.get(src, [])):
            if post["tag"] == tag:
                return self.inbox[src].pop(index)
        return {} if src in self.lost else None

    def await_message(self, receive: "_Receive") -> None:
        """Waits until the sender of `receive` has posted."""
        group, call = self.group, receive.call
        deadline = time.monotonic() + group.timeout
        group.board.set_status(group.global_rank, f"waiting in recv from rank {call.peer} at {call.site}")
        while receive in self.pending:
            group.board.idle()
            self.progress()
            if receive not in self.pending:
                break
            if group.board.aborted:
                raise PeerFailed("another rank failed")
            source = group.members[receive.src]
            doing = group.board.status(source)[1]
            late = time.monotonic() > deadline
            if late or doing == DONE:
                self.progress()
                if receive in self.pending:
                    why = f"did not send within {group.timeout:g} s" if late else "finished without sending"
                    raise PeerStalled(
                        f"recv from rank {source} at {call.site}: rank {source} {why} (it is {doing})", [source]
                    )
            time.sleep(2e-4)
        group.board.set_status(group.global_rank, f"running after recv at {call.site}")

    def counts(self) -> dict[str, dict[int, int]]:
        """Messages sent and received per group rank."""
        return {"sent": dict(self.sent), "received": dict(self.received)}

    def _describe(self, op: str, tensors: Any, peer: int, tag: int) -> CommCall:
        inputs, outputs = (tensors, []) if op == "send" else ([], tensors)
        call = self.group.describe(op, inputs, outputs, None)
        call.peer, call.tag = self.group.members[peer], tag
        self.group.log.start(call)
        return call


class _Send(dist.Work):
    def __init__(self, channel: PointToPoint, call: CommCall, inner: Any):
        super().__init__()
        self.channel, self.call, self.inner = channel, call, inner

    def wait(self, timeout: Any = None) -> bool:
        group = self.channel.group
        self.call.waited = True
        group.board.set_status(group.global_rank, f"waiting in send to rank {self.call.peer} at {self.call.site}")
        while (group.board.idle() or self.channel.pending) and not self.inner.is_completed():
            # a large send ends only when the peer receives; the peer may be sending to us
            self.channel.progress()
            time.sleep(1e-4)
        self.inner.wait()
        group.board.set_status(group.global_rank, f"running after send at {self.call.site}")
        group.log.finish(self.call)
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed()


class _Receive(dist.Work):
    def __init__(self, channel: PointToPoint, call: CommCall, tensors: Any, src: int, tag: int):
        super().__init__()
        self.channel, self.call, self.tensors, self.src, self.tag = channel, call, tensors, src, tag
        self.inner: Any = None

    def launch(self, message: Mapping[str, Any]) -> None:
        if message and message["inputs"] != self.call.outputs:
            sender = self.channel.group.members[self.src]
            raise CallMismatch(
                f"rank {sender} sends {message['inputs']} at {message['site']}, rank "
                f"{self.channel.group.global_rank} receives {self.call.outputs} at {self.call.site}",
                [sender, self.channel.group.global_rank],
            )
        self.inner = self.channel.group.inner.recv(self.tensors, self.src, self.tag)

    def wait(self, timeout: Any = None) -> bool:
        self.call.waited = True
        if self.inner is None:
            self.channel.await_message(self)
        self.inner.wait()
        self.channel.group.log.finish(self.call)
        return True

    def is_completed(self) -> bool:
        self.channel.progress()
        return self.inner is not None and self.inner.is_completed()
