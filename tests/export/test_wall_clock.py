"""Timelines from the records' own times."""

from typing import Any

import pytest

from emulator.export.wall_clock import is_collective, wall_timelines

from .timelines import GATHER, LINEAR, header, step


def at(seconds: float, duration: float, base: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**base, "start": seconds, "duration": duration, **more}


def traces() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    boundary = {"kind": "boundary"}
    verification = at(2.0, 1.0, GATHER, traffic="verification")
    zero = [step(0), boundary, at(1.0, 0.5, LINEAR), verification, at(3.0, 0.25, GATHER), step(1), at(9.0, 1.0, LINEAR)]
    one = [step(0), at(1.5, 0.5, LINEAR), at(2.0, 2.0, GATHER), at(3.9999999, 1.0, GATHER)]
    return [(header(0), zero), (header(1), one)]


def test_a_step_starts_with_its_first_record() -> None:
    first, second = wall_timelines(traces())
    assert [[(p.stream, p.start, p.seconds, p.index) for p in own] for own in first.slices] == [
        [("compute", 0.0, 0.5, 1), ("comm", 2.0, 0.25, 3)],
        # what rounding made overlap is moved apart
        [("compute", 0.5, 0.5, 0), ("comm", 1.0, 2.0, 1), ("comm", 3.0, pytest.approx(0.9999999), 2)],
    ]
    assert first.seconds == pytest.approx(3.9999999)
    assert first.device == ""
    assert [len(own) for own in second.slices] == [1, 0]  # rank 1 stopped before
    assert (second.slices[0][0].start, second.seconds, second.step) == (0.0, 1.0, 1)
    assert all(p.wait == 0 and p.kernels == () for own in first.slices for p in own)


def test_the_nth_calls_of_a_group_meet() -> None:
    first, second = wall_timelines(traces())
    assert first.meetings == (((0, 1), (1, 1)), ((1, 2),))
    assert second.meetings == ()


def test_a_slice_of_tokens_talks_to_nobody() -> None:
    assert is_collective(GATHER)
    assert not is_collective({**GATHER, "op": "slice"})
    assert not is_collective(LINEAR)
