"""Assertions about what ranks hold and what they called.

All ranks of the group make the same call; each learns of every rank's result, so either all of them raise, with the
same words, or none. Their own traffic is not recorded. Spans of rows such as 24..48 leave out the end.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from emulator.errors import UsageError
from emulator.layout.placement import Tokens
from emulator.runtime.quiet import QuietGroup
from emulator.testing.diagnose import Tolerance, explain, recognise
from emulator.testing.record import Trace, record, table


def assert_collectives(
    expected: Mapping[str, Mapping[str, int]], *, trace: Trace | None = None
) -> AbstractContextManager[Trace]:
    """This rank's calls are exactly those expected: {group: {op: number of calls}}; other groups and ops count as 0.

        with assert_collectives({"tp": {"all_gather": 2, "reduce_scatter": 1}}):
            model(x)
        assert_collectives({"tp": {"barrier": 1}}, trace=trace)

    trace: what record() gave, checked at once; without one the call must be the subject of a `with`.
    Raises AssertionError listing expected and found numbers, with the call sites. Each rank checks its own calls.
    """
    if trace is None:
        return _recording(expected)
    _compare_counts(expected, trace)
    return nullcontext(trace)


@contextmanager
def _recording(expected: Mapping[str, Mapping[str, int]]) -> Iterator[Trace]:
    with record() as trace:
        yield trace
    _compare_counts(expected, trace)


def _compare_counts(expected: Mapping[str, Mapping[str, int]], trace: Trace) -> None:
    found = trace.counts()
    keys = dict.fromkeys((group, op) for counts in (expected, found) for group, ops in counts.items() for op in ops)
    lines = []
    for group, op in keys:
        wanted, made = expected.get(group, {}).get(op, 0), found.get(group, {}).get(op, 0)
        if wanted != made:
            lines.append(f"{op} on {group}: expected {wanted}, found {made}")
            calls = [c for c in trace.payload() if (c.group, c.op) == (group, op)]
            lines += [f"    {line}" for line in table(calls).splitlines()] if calls else []
    if lines:
        raise AssertionError("\n  ".join(["assert_collectives: other calls than expected", *lines]))


def assert_layout(
    x: Tensor,
    layout: str,
    *,
    reference: Tensor,
    tokens: int | None = None,
    group: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """x holds its part of `reference` as the layout word says, on every rank of the group.

    layout: full-token (all real tokens), local-token (rank r holds rows [r * n, (r+1) * n), n = ceil(tokens / size);
    rows past the last token are padding and may hold anything), shard(d) (an even slice of dim d) or partial (the sum
    over the group is the reference). reference: the whole value, tokens on dim 0, on every rank. tokens: real tokens
    (default: the reference's rows). group: a process group (default: all ranks). rtol, atol: by default those of
    torch.testing.assert_close for the dtypes.
    Raises AssertionError naming each wrong rank, its rows, and what the found value looks like; UsageError for a layout
    or a size that cannot be.
    """
    real = len(reference) if tokens is None else tokens
    if not 0 <= real <= len(reference):
        raise UsageError(f"tokens = {real}: the reference has {len(reference)} rows")
    x, reference = _plain(x), _plain(reference)[:real]
    quiet = QuietGroup(group)
    tolerance = Tolerance.of(rtol, atol, x, reference)
    title = f"assert_layout: not {layout} on {quiet.label}"
    if layout == "partial":
        _check_sum(x, reference, quiet, tolerance, title)
        return
    check = _checker(layout, reference, quiet)
    quiet.meet("assert_layout")
    outcomes = quiet.exchange(_attempt(check, x, reference, quiet, tolerance))
    problems = [problem for problem, _ in outcomes]
    if any(problems):
        hints = []
        if all(fits for _, fits in outcomes) and tolerance.same(quiet.total(x), reference.double().cpu()):
            hints = ["the sum over the group is the reference: the value is partial"]
        raise AssertionError(_report(title, quiet, problems, hints))


def assert_sums_to(
    x: Tensor, reference: Tensor, group: Any = None, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """The sum of x over the ranks of the group is `reference` (which every rank has).

    Raises AssertionError with what the sum looks like and which ranks' parts are odd.
    """
    x, reference = _plain(x), _plain(reference)
    quiet = QuietGroup(group)
    _check_sum(x, reference, quiet, Tolerance.of(rtol, atol, x, reference), f"assert_sums_to on {quiet.label}")


def assert_same_on_all_ranks(x: Tensor, group: Any = None) -> None:
    """All ranks of the group hold the same values, exactly (NaN equals NaN), in the same shape and dtype.

    Raises AssertionError naming the ranks in the minority, where each first differs, and by how much.
    """
    x = _plain(x).detach()
    quiet = QuietGroup(group)
    quiet.meet("assert_same_on_all_ranks")
    title = f"assert_same_on_all_ranks: values differ on {quiet.label}"
    kinds = quiet.exchange(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
    if len(set(kinds)) > 1:
        raise AssertionError(_report(title, quiet, [f"holds {kind}" for kind in kinds]))
    data = x.cpu().contiguous()
    digests = quiet.exchange(hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy().data).digest())
    if len(set(digests)) == 1:
        return
    usual = digests.index(max(digests, key=digests.count))
    wanted = quiet.exchange(data if quiet.index == usual else None)[usual]
    source = quiet.members[usual]
    problems = quiet.exchange(_difference(data, wanted, f"rank {source}"))
    if any(problems):
        alike = [m for m, problem in zip(quiet.members, problems) if not problem]
        raise AssertionError(_report(f"{title}; ranks {', '.join(map(str, alike))} agree", quiet, problems))


# -- checks of one rank ------------------------------------------------------------------------------------------------


def _checker(layout: str, reference: Tensor, quiet: QuietGroup) -> Any:
    """What looks at one rank's value: (x, reference, quiet, tolerance) -> problem or empty."""
    if layout == "full-token":
        return _full
    if layout == "local-token":
        return _local
    if match := re.fullmatch(r"shard\((\d)\)", layout):
        dim = int(match[1])
        if dim >= reference.dim() or reference.shape[dim] % quiet.size:
            raise UsageError(f"{layout}: dim {dim} of {list(reference.shape)} cannot be cut into {quiet.size} slices")
        return lambda *args: _sharded(dim, *args)
    raise UsageError(f"layout {layout!r} unknown (allowed: full-token, local-token, shard(d), partial)")


def _attempt(check: Any, x: Tensor, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance) -> tuple[str, bool]:
    """(problem or empty, whether the value may be a part of a sum)."""
    try:
        return check(x, reference, quiet, tolerance), x.shape == reference.shape
    except Exception as error:  # the other ranks wait for this one's result
        return f"cannot be checked: {type(error).__name__}: {error}", False


def _full(x: Tensor, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance) -> str:
    if x.shape == reference.shape:
        return explain(x, reference, 0, quiet.size, tolerance)
    padded = Tokens(len(reference), quiet.size).padded
    if x.shape == (padded, *reference.shape[1:]) and tolerance.same(x[: len(reference)], reference):
        return f"holds {padded} rows, {padded - len(reference)} of them padding, expected {len(reference)}"
    return _odd_shape(x, reference.shape, f"all rows 0..{len(reference)}", reference, quiet, tolerance)


def _local(x: Tensor, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance) -> str:
    tokens = Tokens(len(reference), quiet.size)
    start, stop = tokens.window(quiet.index)
    if x.shape == (tokens.per, *reference.shape[1:]):
        return explain(x[: stop - start], reference, start, quiet.size, tolerance)
    share = f"{tokens.real} tokens padded to {tokens.padded} over {quiet.size} ranks"
    rows = f"rows {start}..{stop} ({share})"
    return _odd_shape(x, (tokens.per, *reference.shape[1:]), rows, reference, quiet, tolerance)


def _sharded(dim: int, x: Tensor, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance) -> str:
    width = reference.shape[dim] // quiet.size
    shape = (*reference.shape[:dim], width, *reference.shape[dim + 1 :])
    start = quiet.index * width
    if x.shape == shape:  # seen along dim, a slice is a window of rows
        turned = x.movedim(dim, 0), reference.movedim(dim, 0)
        return explain(*turned, start, quiet.size, tolerance, "rows" if dim == 0 else f"indices of dim {dim}")
    return _odd_shape(x, shape, f"{start}..{start + width} of dim {dim}", reference, quiet, tolerance)


def _odd_shape(x: Tensor, shape: Any, part: str, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance) -> str:
    known = recognise(x, reference, quiet.size, tolerance)
    return f"{known or 'holds an unknown value'}, shape {list(x.shape)}; expected {part}, shape {list(shape)}"


def _check_sum(x: Tensor, reference: Tensor, quiet: QuietGroup, tolerance: Tolerance, title: str) -> None:
    quiet.meet("assert_sums_to")
    shapes = quiet.exchange((list(x.shape), list(reference.shape)))
    if any(shape != shapes[0][1] or wanted != shapes[0][1] for shape, wanted in shapes):
        told = [f"holds shape {shape}, the reference has {wanted}" for shape, wanted in shapes]
        raise AssertionError(_report(title, quiet, told))
    total, wanted = torch.atleast_1d(quiet.total(x)), torch.atleast_1d(reference.cpu())
    problem = explain(total, wanted, 0, quiet.size, tolerance)
    outcomes = quiet.exchange((problem, _odd_part(x, reference, total, tolerance)))
    if any(problem for problem, _ in outcomes):
        worst = next(problem for problem, _ in outcomes if problem)
        hints = []
        parts = [part for _, part in outcomes]
        if all(part == "holds the whole reference" for part in parts):
            parts, hints = [""] * quiet.size, ["every rank holds the whole reference: the value is full, not partial"]
        raise AssertionError(_report(f"{title}: the sum over {quiet.size} ranks {worst}", quiet, parts, hints))


def _odd_part(x: Tensor, reference: Tensor, total: Tensor, tolerance: Tolerance) -> str:
    """What is odd about one rank's part of a sum."""
    if bool(x.isnan().any()):
        return "has NaN in its part"
    if not bool(x.any()):
        return "has a part of all zeros"
    if tolerance.same(x, reference):
        return "holds the whole reference"
    if tolerance.same(total - x.double().cpu(), reference.double().cpu()):
        return "has a part without which the sum is right"
    return ""


def _difference(found: Tensor, wanted: Tensor, source: str) -> str:
    differs = (found != wanted) & ~((found != found) & (wanted != wanted))
    if not bool(differs.any()):
        return ""
    at = differs.nonzero()[0].tolist()
    gap = (found.double() - wanted.double()).abs()
    value, want = found[tuple(at)].item(), wanted[tuple(at)].item()
    return (
        f"differs from {source} in {int(differs.sum())} of {found.numel()} values, first at {at}: {value!r} against "
        f"{want!r}, by {float(gap[tuple(at)]):.4g}; largest difference {float(gap[differs].max()):.4g}"
    )


def _report(title: str, quiet: QuietGroup, problems: list[str], hints: list[str] | None = None) -> str:
    """Title, then a line per rank that has a problem."""
    lines = [f"rank {member} {problem}" for member, problem in zip(quiet.members, problems) if problem]
    return "\n  ".join([title, *lines, *(hints or [])])


def _plain(x: Tensor) -> Tensor:
    """The local tensor of a DTensor; the value of an unfinished functional result."""
    if hasattr(x, "to_local"):
        x = x.to_local()
    return x.wait() if hasattr(x, "wait") else x
