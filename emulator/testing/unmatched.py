"""Communication that a test leaves open. On the rank: runs what was posted and never waited for. In the parent: pairs
the messages of all ranks. Either way the next test gets fresh groups."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from emulator.runtime.board import PeerStalled
from emulator.runtime.checked_group import CheckedGroup, own_groups
from emulator.testing.outcome import GroupEnd, Phase, RankOutcome

if TYPE_CHECKING:
    from emulator.runtime.rank_process import RankContext


def settle(context: "RankContext", outcome: RankOutcome) -> None:
    """Fills in the outcome's calls, groups and regroup; adds a failed call phase for a collective that the other
    ranks did not make."""
    groups = own_groups()
    lasting = {id(group) for group in (*context.groups.values(), torch.distributed.group.WORLD)}
    outcome.regroup = any(id(group) not in lasting for group in groups) or len(groups) < len(context.groups) > 0
    if context.log.calls:
        last = context.log.calls[-1]
        outcome.last_call = f"{last.api or last.op} ({last.op} on {last.group}) at {last.site}"
    broken = context.board.aborted or outcome.disturbed
    for group in groups:
        if broken:
            group.queue.clear()  # half-made calls: the parent has the ranks join new groups
            continue
        try:
            group.finish()
            _finish_receives(group)
        except Exception as error:
            context.board.abort()
            group.queue.clear()
            broken = True
            outcome.phases.append(_unmatched(outcome, error))
    if broken:
        outcome.calls = [vars(call) for call in context.log.calls]
    else:
        outcome.groups = [_end(group, context) for group in groups if _has_messages(group)]


def _finish_receives(group: CheckedGroup) -> None:
    group.point_to_point.progress()
    for receive in group.point_to_point.pending:
        call = receive.call
        raise PeerStalled(
            f"recv on {group.label} at {call.site}: posted for rank {call.peer} and never waited for, and no message "
            f"has come",
            [group.global_rank],
        )


def _unmatched(outcome: RankOutcome, error: Exception) -> Phase:
    name = type(error).__name__
    return Phase(
        when="call",
        kind="failed",
        report={"longrepr": f"left a call unmatched: {error}"},
        error=name,
        culprits=list(getattr(error, "culprits", [])),
        stopped=name == "PeerFailed",
        doing=outcome.last_call,
    )


def _has_messages(group: CheckedGroup) -> bool:
    return bool(group.point_to_point.sent or group.point_to_point.received)


def _end(group: CheckedGroup, context: "RankContext") -> GroupEnd:
    counts = group.point_to_point.counts()
    sites = [
        (call.op, call.peer, call.site)
        for call in context.log.calls
        if call.op in ("send", "recv") and call.group == group.label and call.peer is not None
    ]
    return GroupEnd(group.slot, group.label, group.members, counts["sent"], counts["received"], sites)


def unpaired_messages(outcomes: Sequence[RankOutcome]) -> Iterator[tuple[list[int], str]]:
    """(ranks, text) for every pair of ranks whose sends and receives do not match."""
    ends = {(end.slot, outcome.rank): end for outcome in outcomes for end in outcome.groups}
    for (slot, rank), end in ends.items():
        for index, peer in enumerate(end.members):
            other = ends.get((slot, peer))
            me = end.members.index(rank)
            sent, received = end.sent.get(index, 0), other.received.get(me, 0) if other else 0
            if sent > received:
                yield [rank, peer], _missing(end, "send", rank, "sent", sent, peer, "received", received)
            wanted, given = end.received.get(index, 0), other.sent.get(me, 0) if other else 0
            if wanted > given:
                yield [rank, peer], _missing(end, "recv", rank, "posted receives for", wanted, peer, "sent", given)


def _missing(end: GroupEnd, op: str, rank: int, did: str, many: int, peer: int, other_did: str, few: int) -> str:
    sites = [site for kind, with_rank, site in end.sites if kind == op and with_rank == peer]
    where = f" (the last one at {sites[-1]})" if sites else ""
    to = "to" if op == "send" else "from"
    return (
        f"unmatched {op} on {end.label}: rank {rank} {did} {many} message{'s' if many > 1 else ''} {to} rank {peer}"
        f"{where}, rank {peer} {other_did} {few}"
    )
