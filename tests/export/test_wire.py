"""The wire format, against the worked examples of protobuf.dev (Encoding)."""

from emulator.export.wire import data, delimited, number, packed, varint


def test_worked_examples() -> None:
    assert varint(1) == b"\x01"
    assert varint(150) == b"\x96\x01"
    assert varint(2**64 - 1) == b"\xff" * 9 + b"\x01"
    assert number(1, 150) == b"\x08\x96\x01"
    assert data(2, "testing") == b"\x12\x07testing"
    assert data(3, number(1, 150)) == b"\x1a\x03\x08\x96\x01"
    assert packed(6, [3, 270, 86942]) == b"\x32\x06\x03\x8e\x02\x9e\xa7\x05"
    assert packed(6, []) == b""
    assert delimited(b"abc") == b"\x03abc"
    assert delimited(b"x" * 300)[:2] == b"\xac\x02"
