"""Contracts: what a published specification says about boundaries and collectives, as data, checked on a trace.

A contract knows nothing of plans or lowering. Shapes are in symbols (symbols_of), so one file serves every model
and size.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from emulator import profiles
from emulator.errors import UsageError, first_problem
from emulator.layout.placement import Tokens
from emulator.layout.plan import module_pattern
from emulator.model.config import ModelConfig
from emulator.trace.record import steps_of
from emulator.trace.summary import COUNTED

# later: all but the first; mtp: multi-token prediction, also a layer, a moe_layer and, with an indexer, an
# indexer_layer; indexer: with an indexer of its own; shared: with the ids of an earlier one
Scope = Literal[
    "model", "layer", "later_layer", "dense_layer", "moe_layer", "indexer_layer", "shared_layer", "mtp_layer"
]
Dim = int | str


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    module: str
    per: Scope = "layer"
    when: dict[str, str | list[str]] = {}


class BoundaryRule(_Rule):
    """Every value at this port of this module has the layout and one of the shapes given for the port; per scope, the
    value of this rule's shape is there."""

    port: Literal["input", "output", "output1"]
    layout: str
    shape: list[Dim]


class CollectiveRule(_Rule):
    """`count` calls per scope of this op on this group in this module, with these shapes."""

    group: Literal["tp", "ep", "dp"]
    op: str
    count: int = 1
    dim: int | None = None
    input: list[Dim] | None = None
    output: list[Dim] | None = None


class Contract(BaseModel):
    """A contract file. max_rows: no token value has more rows than this."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    max_rows: Dim | None = None
    boundary: list[BoundaryRule] = []
    collective: list[CollectiveRule] = []


@dataclass(frozen=True)
class Breach:
    """One way in which a trace breaks a contract. seq: where in the trace; counts, which have no place, come last.
    what: count (a call too many or missing), layout (the shape is right), or shape."""

    module: str
    layer: int | None
    expected: dict[str, Any]
    found: dict[str, Any]
    detail: str
    seq: int = 10**8
    port: str = "inside"
    what: Literal["count", "layout", "shape"] = "shape"


def load_contract(name: str) -> Contract:
    """Reads a contract by name or path; UsageError for a malformed file."""
    path = profiles.find("contracts", name)
    try:
        return Contract.model_validate(profiles.load_toml(path))
    except ValidationError as error:
        raise UsageError(f"contract {path}: {first_problem(error)}") from None


def symbols_of(config: ModelConfig, tokens: Tokens, sizes: Mapping[str, int], *, mtp: bool = False) -> dict[str, int]:
    """Values of the symbols that contracts may use. One tp rank cuts nothing, so there n and P are the real tokens; g,
    the rows that each rank brings to an ep group, are padded all the same. mtp: with a multi-token-prediction layer."""
    padded, per = (tokens.padded, tokens.per) if sizes["tp"] > 1 else (tokens.real, tokens.real)
    whole = config.with_mtp_layers(int(mtp))
    kinds = [whole.is_moe(i) for i in range(whole.num_hidden_layers)]
    indexed = sum(whole.has_indexer(i) for i in range(whole.num_hidden_layers))
    return {
        "T": tokens.real, "P": padded, "n": per, "g": tokens.per, "tp": sizes["tp"], "ep": sizes["ep"],
        "H": config.hidden_size, "N": config.num_attention_heads, "v": config.v_head_dim, "qk": config.qk_head_dim,
        "kv": config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim,
        "Q": config.q_lora_rank, "R": config.kv_lora_rank, "r": config.qk_rope_head_dim, "d": config.index_head_dim,
        "K": config.index_topk, "E": config.n_routed_experts, "k": config.num_experts_per_tok,
        "I": config.moe_intermediate_size * config.n_shared_experts, "F": config.intermediate_size,
        "V": config.vocab_size, "layers": len(kinds), "later_layers": config.num_hidden_layers - 1,
        "mtp_layers": int(mtp),
        "dense_layers": kinds.count(False), "moe_layers": kinds.count(True),
        "indexer_layers": indexed, "shared_layers": len(kinds) - indexed if indexed else 0,
    }  # fmt: skip


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int | None:
    """A dimension such as 256, T, N*v, V/tp or R+r; `_` is any size (None)."""
    if isinstance(dim, int) or dim == "_":
        return None if dim == "_" else int(dim)
    if "+" in dim:
        return sum(evaluate(term, symbols) or 0 for term in dim.split("+"))
    value, operator = 1, "*"
    for part in re.split(r"([*/])", dim.replace(" ", "")):
        if part in ("*", "/"):
            operator = part
            continue
        if not part.isdigit() and part not in symbols:
            raise UsageError(f"contract: unknown symbol {part!r} in {dim!r} (allowed: {', '.join(symbols)})")
        number = int(part) if part.isdigit() else symbols[part]
        if operator == "/" and not number:
            raise UsageError(f"contract: {dim!r} divides by zero")
        value = value * number if operator == "*" else value // number
    return value


def check_trace(
    contract: Contract, records: Sequence[dict[str, Any]], symbols: Mapping[str, int], variants: Mapping[str, str]
) -> list[Breach]:
    """All breaches in one rank's trace, in trace order; missing calls and boundaries last."""
    breaches = _check_boundaries(contract, records, symbols, variants)
    if contract.max_rows is not None:
        breaches += _check_rows(evaluate(contract.max_rows, symbols), records)
    breaches += _check_collectives(contract, records, symbols, variants)
    return sorted(breaches, key=lambda b: b.seq)


def _applies(rule: _Rule, variants: Mapping[str, str]) -> bool:
    return all(variants.get(k) in ([v] if isinstance(v, str) else v) for k, v in rule.when.items())


def _scope_size(scope: Scope, symbols: Mapping[str, int]) -> int:
    return 1 if scope == "model" else symbols.get(f"{scope}s", 0)  # older traces know fewer kinds of layer


def _matches(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(w is None or s == w for s, w in zip(shape, wanted))


def _check_boundaries(contract: Contract, records: Sequence[dict], symbols: Mapping, variants: Mapping) -> list[Breach]:
    rules: dict[tuple[str, str], list[tuple[BoundaryRule, list[int | None]]]] = {}
    for rule in contract.boundary:
        if _applies(rule, variants) and _scope_size(rule.per, symbols):
            rules.setdefault((rule.module, rule.port), []).append((rule, [evaluate(d, symbols) for d in rule.shape]))
    breaches, met = [], Counter[int]()
    expected: dict[str, Any]
    for record in records:
        if record["kind"] != "boundary" or record["value"] not in ("token", "group"):
            continue
        here = rules.get((module_pattern(record["module"]), record["port"]), [])
        fits = [rule for rule, shape in here if _matches(record["shape"], shape)]
        for rule in {id(r): r for r in fits}.values():
            met[id(rule)] += 1
        good = [r for r in fits if symbols["tp"] == 1 or r.layout == record["layout"]]
        if here and not good:
            rule, shape = next(((r, s) for r, s in here if r in fits), here[0])
            expected = {"layout": rule.layout, "shape": shape}
            found = {"layout": record["layout"], "shape": record["shape"]}
            detail = f"{record['port']} of {record['module']} is {found['layout']} {found['shape']}"
            place = record.get("seq", 0), record["port"]
            what: Literal["layout", "shape"] = "layout" if fits else "shape"
            breaches.append(Breach(record["module"], record["layer"], expected, found, detail, *place, what))
    for (module, port), members in rules.items():
        for rule, shape in members:
            if met[id(rule)] < _scope_size(rule.per, symbols):
                times = _scope_size(rule.per, symbols)
                expected = {"layout": rule.layout, "shape": shape, "times": times}
                detail = f"{port} of {module} with shape {shape} seen {met[id(rule)]} times"
                breaches.append(Breach(module, None, expected, {"times": met[id(rule)]}, detail))
    return breaches


def _check_rows(limit: int | None, records: Sequence[dict]) -> list[Breach]:
    for record in records:
        for value in [] if record["kind"] != "op" else record["outputs"]:
            is_token = value["layout"].startswith(("full-token", "local-token", "partial"))
            if limit is not None and is_token and value["shape"] and value["shape"][0] > limit:
                detail = f"{record['op']} in {record['module']} makes {value['shape'][0]} rows of {limit} tokens"
                return [
                    Breach(
                        record["module"],
                        record["layer"],
                        {"max_rows": limit},
                        {"shape": value["shape"]},
                        detail,
                        record.get("seq", 0),
                    )
                ]
    return []


def _check_collectives(
    contract: Contract, records: Sequence[dict], symbols: Mapping, variants: Mapping
) -> list[Breach]:
    """Counts are exact: each rule's calls are all there, and no call is left that no rule names."""
    rules = [r for r in contract.collective if _applies(r, variants)]
    counts, breaches = Counter[int](), []
    for record in records:
        if record["kind"] != "op" or record["op"] not in COUNTED or record["traffic"] != "payload":
            continue
        shapes = record["inputs"][0]["shape"], record["outputs"][0]["shape"]
        named = [r for r in rules if _is_call(r, record)]  # of several, the one whose shapes fit
        match = next((r for r in named if _fits(r, shapes, symbols)), named[0] if named else None)
        if match is None:
            detail = f"{record['op']} on {record['group']} in {record['module']}: the contract has no such call"
            found = {"op": record["op"], "group": record["group"], "input": shapes[0], "output": shapes[1]}
            seq = record.get("seq", 0)
            breaches.append(Breach(record["module"], record["layer"], {"op": None}, found, detail, seq, what="count"))
            continue
        counts[id(match)] += 1
        for side, shape in zip((match.input, match.output), shapes):
            wanted = None if side is None else [evaluate(d, symbols) for d in side]
            if wanted is not None and not _matches(shape, wanted):
                detail = f"{record['op']} on {record['group']} in {record['module']} has shape {shape}"
                seq = record.get("seq", 0)
                breaches.append(
                    Breach(record["module"], record["layer"], {"shape": wanted}, {"shape": shape}, detail, seq)
                )
    for rule in rules:
        size = {"tp": symbols["tp"], "ep": symbols["ep"]}.get(rule.group, 1)
        calls = rule.count * _scope_size(rule.per, symbols) if size > 1 else 0
        if counts[id(rule)] != calls:
            detail = f"{rule.op} on {rule.group} in {rule.module}: {counts[id(rule)]} calls, expected {calls}"
            found = {"count": counts[id(rule)]}
            breaches.append(Breach(rule.module, None, {"count": calls}, found, detail, what="count"))
    return breaches


def _fits(rule: CollectiveRule, shapes: Sequence[Sequence[int]], symbols: Mapping) -> bool:
    sides = zip((rule.input, rule.output), shapes)
    return all(side is None or _matches(shape, [evaluate(d, symbols) for d in side]) for side, shape in sides)


def _is_call(rule: CollectiveRule, record: Mapping[str, Any]) -> bool:
    return (
        rule.op == record["op"]
        and rule.group == record["group"]
        and rule.module == module_pattern(record["module"])
        and (rule.dim is None or rule.dim == record["attrs"].get("dim"))
    )


def check_folder(
    contract: Contract, traces: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]], only_step: int | None = None
) -> dict[str, Any]:
    """Checks every step (or one) in the (header, records) of every rank: {verdict, ranks, breaches [{rank, step,
    module, layer, expected, found, detail}]}."""
    mesh = traces[0][0].get("mesh")
    size = math.prod(length for axis, length in mesh.items() if axis != "ep") if mesh else 0
    missing = set(range(size)) - {header["rank"] for header, _ in traces}
    if missing:
        raise UsageError(f"traces of ranks {', '.join(map(str, sorted(missing)))} are missing")
    breaches = []
    for header, records in traces:
        steps = [(step, of_step) for step, of_step in steps_of(records) if only_step in (None, step["step"])]
        if not steps:
            raise UsageError(f"rank {header['rank']}: the trace has no step {only_step}")
        for step, of_step in steps:
            found = check_trace(contract, of_step, step["symbols"], step["variants"])
            breaches += [{"rank": header["rank"], "step": step["step"], **vars(b)} for b in found]
    return {"verdict": "fail" if breaches else "pass", "ranks": len(traces), "breaches": breaches}
