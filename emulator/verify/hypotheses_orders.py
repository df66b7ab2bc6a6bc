"""Named orders of token rows, to be compared with the order found."""

from collections.abc import Iterator, Sequence

from emulator.layout.placement import Tokens

PAD = -1


def natural(tokens: Tokens) -> list[int]:
    """Padded rows in order: 0 .. real-1, then padding."""
    return [i if i < tokens.real else PAD for i in range(tokens.padded)]


def orders(tokens: Tokens, *, local: bool) -> Iterator[tuple[str, list[int]]]:
    """(name, token at every position) of orders that layouts use or mistake for one another.

    Position i of a full-token value is its row i; rank r's local rows are the positions [r * per, (r + 1) * per). Whole
    windows in another order are no order of local rows: there each rank just holds another's window.
    """
    rows, per, parts = natural(tokens), tokens.per, tokens.parts
    blocks = [rows[r * per : (r + 1) * per] for r in range(parts)]
    found = [
        ("reversed", rows[: tokens.real][::-1]),
        ("reversed, padding first", rows[::-1]),
        ("reversed within each rank's window", [i for block in blocks for i in _backwards(block)]),
        ("reversed within each rank's window, padding first", [i for block in blocks for i in block[::-1]]),
        ("round-robin (rank r has rows r, r + tp, ...)", [i for r in range(parts) for i in rows[r::parts]]),
        ("one row of each rank in turn (round-robin undone)", [i for n in range(per) for i in rows[n::per]]),
        ("zigzag (rank r has chunks r and 2 tp - 1 - r)", _zigzag(tokens)),
        ("zigzag undone", _inverse(_zigzag(tokens), tokens.real)),
    ]
    if not local:
        found.append(("in the ranks' reversed order", _joined(blocks, range(parts)[::-1])))
        for first in range(parts):
            for second in range(first + 1, parts):
                ranks = list(range(parts))
                ranks[first], ranks[second] = second, first
                found.append((f"with the windows of ranks {first} and {second} swapped", _joined(blocks, ranks)))
        for k in range(1, parts):
            ranks = [(r - k) % parts for r in range(parts)]
            found.append((f"with every window {k} rank{'s' if k > 1 else ''} later", _joined(blocks, ranks)))
    for name, order in found:
        yield name, order
        if PAD in order:  # where padding was left out before
            yield name, [i for i in order if i != PAD]


def _backwards(block: list[int]) -> list[int]:
    return [*[i for i in block[::-1] if i != PAD], *[i for i in block if i == PAD]]


def _joined(blocks: list[list[int]], ranks: Sequence[int]) -> list[int]:
    return [i for r in ranks for i in blocks[r]]


def _zigzag(tokens: Tokens) -> list[int]:
    parts, chunk = tokens.parts, -(-tokens.real // (2 * tokens.parts))
    rows = [i if i < tokens.real else PAD for i in range(2 * parts * chunk)]
    pieces = [rows[c * chunk : (c + 1) * chunk] for c in range(2 * parts)]
    return [i for r in range(parts) for i in (*pieces[r], *pieces[2 * parts - 1 - r])]


def _inverse(order: list[int], real: int) -> list[int]:
    compact = [i for i in order if i != PAD]
    place = {token: at for at, token in enumerate(compact)}
    return [place[i] for i in range(real)]
