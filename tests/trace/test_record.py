"""Trace files: written line by line, read back, and refused in one line when they are not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.errors import UsageError
from emulator.trace.record import SCHEMA, TraceWriter, fresh_folder, read_trace, trace_files

HEADER = {"rank": 2, "mesh": {"tp": 4}, "symbols": {"T": 9}, "variants": {"embedding": "row"}}


def write(path: Path, *records: dict[str, Any]) -> Path:
    writer = TraceWriter(path, HEADER)
    for record in records:
        writer.append(record)
    writer.close()
    return path


def one_line(error: pytest.ExceptionInfo[UsageError], path: Path) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [{"kind": "op", "op": "linear", "attrs": {"eps": 1e-6}}, {"kind": "boundary", "shape": [3, None]}]
    header, found = read_trace(write(tmp_path / "rank_2.jsonl", *records))
    assert header == {"schema": SCHEMA, **HEADER}
    assert found == [{"seq": i, **r} for i, r in enumerate(records)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    # a rank that dies leaves every record up to that point
    writer = TraceWriter(tmp_path / "rank_0.jsonl", HEADER)
    writer.append({"kind": "op"})
    assert len((tmp_path / "rank_0.jsonl").read_text().splitlines()) == 2
    writer.append({"kind": "op"})
    assert len(read_trace(tmp_path / "rank_0.jsonl")[1]) == 2
    writer.close()


def test_without_a_path_records_are_only_kept() -> None:
    writer = TraceWriter(None, HEADER)
    writer.append({"kind": "op"})
    writer.append({"kind": "op"})
    writer.close()
    assert [r["seq"] for r in writer.records] == [0, 1]


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "rank_0.jsonl", {"kind": "op", "op": "a"}, {"kind": "op", "op": "b"})
    path.write_bytes(path.read_bytes()[:-8])
    assert [r["op"] for r in read_trace(path)[1]] == ["a"]


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "rank_0.jsonl", *({"kind": "op", "op": o} for o in "abc"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:-5], lines[3]]) + "\n")
    with pytest.raises(UsageError, match="line 3") as error:
        read_trace(path)
    one_line(error, path)


@pytest.mark.parametrize("schema", [SCHEMA + 1, "1", None])
def test_another_schema_is_refused(tmp_path: Path, schema: Any) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps({"schema": schema, "rank": 0}) + "\n")
    with pytest.raises(UsageError, match="schema") as error:
        read_trace(path)
    line = one_line(error, path)
    assert repr(schema) in line
    assert str(SCHEMA) in line


HEADERS = [
    ("empty file", ""),
    ("no JSON", "hello\n"),
    ("header cut short", '{"schema": 1, "ran'),
    ("JSON, but no header", "[1, 2]\n"),
    ("a record where the header belongs", '{"kind": "op", "op": "linear"}\n'),
]


@pytest.mark.parametrize("text", [h[1] for h in HEADERS], ids=[h[0] for h in HEADERS])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_trace(path)
    one_line(error, path)


def test_files_come_in_rank_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"rank_{rank}.jsonl").touch()
    (tmp_path / "summary.json").touch()
    assert [p.name for p in trace_files(tmp_path)] == ["rank_0.jsonl", "rank_2.jsonl", "rank_10.jsonl"]


@pytest.mark.parametrize("make", [True, False], ids=["empty", "absent"])
def test_a_folder_without_traces(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "runs"
    if make:
        folder.mkdir()
    with pytest.raises(UsageError, match="no trace") as error:
        trace_files(folder)
    one_line(error, folder)


def test_a_fresh_folder_forgets_an_earlier_run_and_nothing_else(tmp_path: Path) -> None:
    # a run on 2 ranks after one on 4 must not leave traces of ranks 2 and 3 behind
    folder = tmp_path / "a" / "b"
    assert fresh_folder(folder) == folder
    for name in ("rank_3.jsonl", "summary.json", "notes.txt"):
        (folder / name).touch()
    fresh_folder(folder)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="--out") as error:
        fresh_folder(tmp_path / "out")
    one_line(error, tmp_path / "out")
