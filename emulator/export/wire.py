"""Protocol Buffers' wire format, as much as a writer needs: varints, length-delimited fields, messages in a stream.

Source: protobuf.dev, Encoding. (The messages written here have a dozen fields; generated code would pin a protobuf
version on every user.)
"""

from collections.abc import Iterable


def varint(value: int) -> bytes:
    """An unsigned number below 2^64."""
    assert 0 <= value < 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A field of a uint64, int64 (not negative), bool or enum type."""
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes | str) -> bytes:
    """A field of a string, bytes or message type."""
    raw = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def packed(field: int, values: Iterable[int]) -> bytes:
    """A repeated field of numbers, packed; nothing at all when there are none."""
    raw = b"".join(map(varint, values))
    return data(field, raw) if raw else b""


def delimited(message: bytes) -> bytes:
    """A message in a stream: its length, then itself."""
    return varint(len(message)) + message
