"""From the errors of several ranks to the one that explains them."""

from collections.abc import Sequence
from typing import Any

from emulator.errors import RankError, UsageError

# what explains what: a death explains a stall, a stall explains the waits for it, an exception the ranks it left alone
_ORDER = ("Died", "Stalled", "other", "CallMismatch", "PeerStalled", "PeerFailed")


def explain(error: RankError) -> str:
    """The report of a failed run for people: the error, what each other rank was doing, and the rank's traceback."""
    report = error.report
    lines = [f"error: {error}"]
    lines += [f"  rank {rank} was {doing or 'starting'}" for rank, doing in (report.get("others") or {}).items()]
    if "flight_records" in report:
        lines.append(f"  the calls of each rank, for torch's own analyser: {report['flight_records']}")
    culprit = report.get("culprit")
    if culprit:
        lines.append(f"  node {culprit['node']} ({culprit['op']}) of {culprit['module']}")
        lines.append(f"  cause {culprit['kind']}: {culprit['text']}")
    elif "traceback" in report and report.get("kind") not in ("PeerStalled", "CallMismatch"):
        lines.append(report["traceback"])
    return "\n".join(lines)


def failure_of(errors: Sequence[dict[str, Any]], doing: Sequence[str]) -> Exception:
    """The error of a run: the first cause, what every other rank was doing, and who is to blame.

    errors: one description per failed rank; doing: what each rank said last.
    """
    causes = [e for e in errors if not e["secondary"]] or list(errors)
    cause = min(causes, key=lambda e: (_ORDER.index(e["kind"] if e["kind"] in _ORDER else "other"), e["rank"]))
    if cause.get("usage_error"):
        return UsageError(cause["message"])
    culprits = cause.get("culprits") or [cause["rank"]]
    last = {**dict(enumerate(doing)), **{e["rank"]: e["doing"] for e in errors}}
    others = {r: text for r, text in last.items() if r != cause["rank"]}
    message = f"rank {cause['rank']}: {cause['kind']}: {cause['message']} (while {cause['doing'] or 'starting'})"
    same = sorted(e["rank"] for e in causes if (e["kind"], e["message"]) == (cause["kind"], cause["message"]))
    if len(same) > 1:
        message += f"; the same on ranks {', '.join(map(str, same))}"
    return RankError(message, {**cause, "culprits": culprits, "ranks": same, "others": others, "errors": list(errors)})
