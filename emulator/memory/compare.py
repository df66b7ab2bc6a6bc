"""Why two ledgers differ: bytes by component and category, and the tensors behind each difference."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from emulator.layout.plan import module_pattern
from emulator.memory.held import Held
from emulator.memory.ledger import Ledger


@dataclass(frozen=True)
class Row:
    """One component, category or layer on both sides. why: the tensors that take more or less, the largest
    difference first, with their counts."""

    name: str
    first: int
    second: int
    why: tuple[str, ...] = ()

    @property
    def delta(self) -> int:
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """rows: by the chosen key, in order of the model; their deltas sum to that of the totals."""

    first: Ledger
    second: Ledger
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "first_bytes": self.first.total_bytes,
            "second_bytes": self.second.total_bytes,
            "delta_bytes": self.second.total_bytes - self.first.total_bytes,
            "rows": [
                {"name": r.name, "first_bytes": r.first, "second_bytes": r.second, "delta_bytes": r.delta, "why": r.why}
                for r in self.rows
            ],
        }


def compare(first: Ledger, second: Ledger, key: str = "component") -> Comparison:
    """The two ledgers side by side, by component, category or layer."""
    sums = first.by(key), second.by(key)
    names = list(dict.fromkeys((*sums[0], *sums[1])))
    alike = _alike(first, key), _alike(second, key)
    rows = []
    for name in names:
        a, b = alike[0].get(name, {}), alike[1].get(name, {})
        changed = [(t, a.get(t, []), b.get(t, [])) for t in dict.fromkeys((*a, *b))]
        changed = sorted((c for c in changed if _grown(*c[1:])), key=lambda c: -abs(_grown(*c[1:])))
        why = [_told(*c) for c in changed]
        rows.append(Row(name, sums[0].get(name, 0), sums[1].get(name, 0), tuple(why)))
    return Comparison(first, second, tuple(rows))


def _alike(ledger: Ledger, key: str) -> dict[str, dict[str, list[Held]]]:
    """Tensors by the key's value, and then by name with * for the layer."""
    found: dict[str, dict[str, list[Held]]] = defaultdict(lambda: defaultdict(list))
    for tensor in ledger.tensors:
        value = getattr(tensor, key)
        found["-" if value is None else str(value)][module_pattern(tensor.name)].append(tensor)
    return found


def _grown(first: list[Held], second: list[Held]) -> int:
    return sum(t.bytes for t in second) - sum(t.bytes for t in first)


def _told(name: str, first: list[Held], second: list[Held]) -> str:
    """What is different about the tensors of one name."""
    short = name.removeprefix("model.layers.*.").removeprefix("model.")
    return f"{short}: {_words(_forms(first))} -> {_words(_forms(second))}"


def _forms(tensors: list[Held]) -> dict[str, int]:
    """How often each form (shape, dtype, placement) occurs."""
    forms: dict[str, int] = defaultdict(int)
    for t in tensors:
        shape = ", ".join(map(str, t.shape))
        forms[f"[{shape}] {t.dtype} {t.placement}"] += 1
    return dict(forms)


def _words(forms: dict[str, int]) -> str:
    return " and ".join(f"{count} x {form}" for form, count in forms.items()) or "none"
