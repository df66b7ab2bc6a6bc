"""Contract checks on hand-made records: each kind of breach is found and named, and nothing else is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from emulator import profiles
from emulator.errors import UsageError
from emulator.layout.placement import Tokens
from emulator.model.config import load_config
from emulator.verify.contract import Breach, Contract, check_folder, check_trace, evaluate, load_contract, symbols_of

Record = dict[str, Any]

# 9 tokens on tp 4: 12 padded, 3 a rank; one dense layer and one MoE layer
SYMBOLS = {
    "T": 9, "P": 12, "n": 3, "tp": 4, "ep": 4, "H": 10, "N": 8, "v": 5, "V": 16,
    "layers": 2, "later_layers": 1, "dense_layers": 1, "moe_layers": 1,
}  # fmt: skip
ATTN, EXPERTS = "model.layers.*.self_attn", "model.layers.*.mlp.experts"
CONTRACT = Contract.model_validate(
    {
        "description": "small",
        "max_rows": "P",
        "boundary": [
            {"module": ATTN, "port": "input", "layout": "full-token", "shape": ["T", "H"]},
            {"module": f"{ATTN}.o_proj", "port": "output", "layout": "local-token", "shape": ["n", "H"]},
            {"module": EXPERTS, "port": "output", "layout": "local-token", "shape": ["n", "H"], "per": "moe_layer"},
        ],
        "collective": [
            {"group": "tp", "op": "all_gather", "module": ATTN, "dim": 0, "input": ["n", "H"], "output": ["P", "H"]},
            {
                "group": "tp", "op": "reduce_scatter", "module": "model.embed_tokens", "per": "model",
                "when": {"embedding": "row"},
            },
            {
                "group": "ep", "op": "all_to_all", "module": EXPERTS, "per": "moe_layer", "count": 2,
                "input": ["_", "H"], "output": ["_", "H"],
            },
        ],
    }
)  # fmt: skip
ROW = {"embedding": "row"}


def boundary(module: str, port: str, layout: str, shape: list[int], layer: int, value: str = "token") -> Record:
    return {
        "kind": "boundary", "module": module, "port": port, "layout": layout, "shape": shape, "layer": layer,
        "value": value,
    }  # fmt: skip


def call(
    op: str, group: str | None, module: str, given: list[int], made: list[int], *, layer: int | None = None,
    layout: str = "full-token", traffic: str = "payload", dim: int | None = 0,
) -> Record:  # fmt: skip
    return {
        "kind": "op", "op": op, "group": group, "module": module, "layer": layer, "traffic": traffic,
        "attrs": {} if dim is None else {"dim": dim}, "inputs": [{"shape": given, "layout": "local-token"}],
        "outputs": [{"shape": made, "layout": layout}],
    }  # fmt: skip


@pytest.fixture
def records() -> list[Record]:
    """What one rank should have written."""
    made = [call("reduce_scatter", "tp", "model.embed_tokens", [12, 10], [3, 10], layout="local-token")]
    for layer in (0, 1):
        attn = f"model.layers.{layer}.self_attn"
        made += [
            call("all_gather", "tp", attn, [3, 10], [12, 10], layer=layer),
            call("unpad", None, attn, [12, 10], [9, 10], layer=layer),
            boundary(attn, "input", "full-token", [9, 10], layer),
            call("linear", None, f"{attn}.o_proj", [3, 40], [3, 10], layer=layer, layout="local-token"),
            boundary(f"{attn}.o_proj", "output", "local-token", [3, 10], layer),
        ]
    experts = "model.layers.1.mlp.experts"
    made += [
        call("all_to_all", "ep", experts, [1, 16], [4, 4], layer=1, traffic="metadata"),
        call("all_to_all", "ep", experts, [6, 10], [7, 10], layer=1, layout="expert-rows"),
        call("all_to_all", "ep", experts, [7, 10], [6, 10], layer=1, layout="token-rows"),
        boundary(experts, "output", "local-token", [3, 10], 1),
    ]
    return made


def check(records: list[Record], symbols: dict[str, int] | None = None, **variants: str) -> list[Breach]:
    return check_trace(CONTRACT, records, symbols or SYMBOLS, variants or ROW)


def find(records: list[Record], **wanted: Any) -> Record:
    return next(r for r in records if all(r.get(k) == v for k, v in wanted.items()))


def test_a_trace_that_keeps_the_contract(records: list[Record]) -> None:
    assert check(records) == []


def test_wrong_layout(records: list[Record]) -> None:
    find(records, kind="boundary", module="model.layers.1.self_attn")["layout"] = "local-token"
    first = check(records)[0]
    assert (first.module, first.layer) == ("model.layers.1.self_attn", 1)
    assert first.expected == {"layout": "full-token", "shape": [9, 10]}
    assert first.found == {"layout": "local-token", "shape": [9, 10]}
    assert "input of model.layers.1.self_attn is local-token" in first.detail


def test_wrong_shape(records: list[Record]) -> None:
    find(records, kind="boundary", module="model.layers.0.self_attn.o_proj")["shape"] = [9, 10]
    first = check(records)[0]
    assert (first.module, first.found["shape"]) == ("model.layers.0.self_attn.o_proj", [9, 10])
    assert first.expected["shape"] == [3, 10]


def test_what_each_breach_is_about(records: list[Record]) -> None:
    find(records, kind="boundary", module="model.layers.1.self_attn")["layout"] = "local-token"
    find(records, kind="boundary", module="model.layers.1.self_attn.o_proj")["shape"] = [4, 10]
    find(records, op="all_gather", module="model.layers.0.self_attn")["outputs"][0]["shape"] = [13, 10]
    records.append(call("all_reduce", "tp", "model.layers.1.self_attn.o_proj", [3, 10], [3, 10], layer=1))
    records.remove(find(records, op="reduce_scatter"))
    found = {(b.what, b.detail) for b in check(records)}
    assert found == {
        ("layout", "input of model.layers.1.self_attn is local-token [9, 10]"),
        ("shape", "output of model.layers.1.self_attn.o_proj is local-token [4, 10]"),
        ("shape", "output of model.layers.*.self_attn.o_proj with shape [3, 10] seen 1 times"),
        ("shape", "all_gather in model.layers.0.self_attn makes 13 rows of 12 tokens"),
        ("shape", "all_gather on tp in model.layers.0.self_attn has shape [13, 10]"),
        ("count", "all_reduce on tp in model.layers.1.self_attn.o_proj: the contract has no such call"),
        ("count", "reduce_scatter on tp in model.embed_tokens: 0 calls, expected 1"),
    }


def test_a_layout_is_told_even_where_shapes_coincide() -> None:
    # T < tp, single-token decode: a full row and a local row look alike, the layouts do not
    symbols = SYMBOLS | {"T": 1, "P": 4, "n": 1}
    rule = {"module": ATTN, "port": "input", "layout": "full-token", "shape": ["T", "H"]}
    contract = Contract.model_validate({"description": "x", "boundary": [rule]})
    good = [boundary(f"model.layers.{i}.self_attn", "input", "full-token", [1, 10], i) for i in (0, 1)]
    assert check_trace(contract, good, symbols, {}) == []
    bad = copy.deepcopy(good)
    bad[1]["layout"] = "local-token"
    assert [b.module for b in check_trace(contract, bad, symbols, {})] == ["model.layers.1.self_attn"]


def test_missing_boundary(records: list[Record]) -> None:
    records.remove(find(records, kind="boundary", module="model.layers.1.mlp.experts"))
    (breach,) = check(records)
    assert breach.module == EXPERTS
    assert breach.expected["times"] == 1
    assert breach.found == {"times": 0}


def test_caches_and_dispatched_rows_are_no_token_values(records: list[Record]) -> None:
    attn = "model.layers.0.self_attn"
    records.append(boundary(attn, "input", "replicated", [640, 7], 0, value="cache"))
    records.append(boundary("model.layers.1.mlp.experts", "output", "expert-rows", [7, 10], 1, value="rows"))
    assert check(records) == []


CALLS: list[tuple[str, Callable[[list[Record]], Any], str, str]] = [
    (
        "extra call of a module that has a rule",
        lambda r: r.append(call("all_gather", "tp", "model.layers.0.self_attn", [3, 10], [12, 10], layer=0)),
        ATTN, "3 calls, expected 2",
    ),
    (
        "extra call that no rule names",
        lambda r: r.append(call("all_reduce", "tp", "model.layers.0.self_attn.o_proj", [3, 10], [3, 10], layer=0)),
        "model.layers.0.self_attn.o_proj", "all_reduce on tp in model.layers.0.self_attn.o_proj: the contract has no",
    ),
    (
        "call on another group",
        lambda r: find(r, op="all_gather").update(group="ep"),
        "model.layers.0.self_attn", "all_gather on ep",
    ),
    (
        "call on another dim",
        lambda r: find(r, op="all_gather").update(attrs={"dim": 1}),
        "model.layers.0.self_attn", "the contract has no such call",
    ),
    ("missing call", lambda r: r.remove(find(r, op="all_gather")), ATTN, "1 calls, expected 2"),
    (
        "wrong count per layer",
        lambda r: r.remove(find(r, op="all_to_all", traffic="payload")),
        EXPERTS, "1 calls, expected 2",
    ),
    (
        "wrong input shape",
        lambda r: find(r, op="all_gather")["inputs"][0].update(shape=[9, 10]),
        "model.layers.0.self_attn", "has shape [9, 10]",
    ),
    (
        "wrong output shape",
        lambda r: find(r, op="all_to_all", traffic="payload")["outputs"][0].update(shape=[7, 11]),
        "model.layers.1.mlp.experts", "has shape [7, 11]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "module", "detail"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_calls_are_exact(
    records: list[Record], change: Callable[[list[Record]], Any], module: str, detail: str
) -> None:
    change(records)
    breach = check(records)[0]
    assert breach.module == module
    assert detail in breach.detail


def test_gathering_the_residual_makes_too_many_rows(records: list[Record]) -> None:
    # the 4096 -> 65536 bug: a gather of a value that is full already; here 12 -> 48
    records.insert(5, call("add", None, "model.layers.0.mlp", [48, 10], [48, 10], layer=0))
    (breach,) = check(records)
    assert (breach.module, breach.layer) == ("model.layers.0.mlp", 0)
    assert breach.expected == {"max_rows": 12}
    assert breach.found == {"shape": [48, 10]}


def test_dispatched_rows_and_caches_may_be_many(records: list[Record]) -> None:
    find(records, op="all_to_all", traffic="payload")["outputs"][0].update(shape=[700, 10])  # expert-rows: skewed load
    records.append(call("cache_write", None, "model.layers.0.self_attn.cache", [640, 7], [640, 7], layout="replicated"))
    assert check(records) == []


@pytest.mark.parametrize("traffic", ["metadata", "verification"])
def test_only_payload_is_counted(records: list[Record], traffic: str) -> None:
    records.append(call("all_gather", "tp", "model.layers.0.self_attn", [3], [12], layer=0, traffic=traffic))
    assert check(records) == []


def test_one_rank_makes_no_calls_and_has_no_layouts(records: list[Record]) -> None:
    symbols = SYMBOLS | {"tp": 1, "ep": 1, "P": 9, "n": 9}
    alone = [r for r in records if r["kind"] == "boundary"]
    for record in alone:
        record.update(layout="full-token", shape=[9, 10])
    assert check(alone, symbols) == []
    alone[0]["shape"] = [9, 11]  # shapes hold all the same
    assert check(alone, symbols) != []
    alone[0]["shape"] = [9, 10]
    alone.append(call("all_gather", "tp", "model.layers.0.self_attn", [9, 10], [9, 10], layer=0))
    assert "1 calls, expected 0" in check(alone, symbols)[0].detail


def test_rules_of_another_variant_do_not_apply(records: list[Record]) -> None:
    assert "the contract has no such call" in check(records, embedding="replicated")[0].detail
    records.remove(find(records, op="reduce_scatter"))
    assert check(records, embedding="replicated") == []
    assert [b.module for b in check(records)] == ["model.embed_tokens"]


def test_a_rule_may_list_variants() -> None:
    rule = {"module": "m", "port": "input", "layout": "full-token", "shape": [1], "per": "model"}
    contract = Contract.model_validate({"description": "x", "boundary": [rule | {"when": {"v": ["a", "b"]}}]})
    assert len(check_trace(contract, [], SYMBOLS, {"v": "a"})) == 1
    assert len(check_trace(contract, [], SYMBOLS, {"v": "b"})) == 1
    assert check_trace(contract, [], SYMBOLS, {"v": "c"}) == []
    assert check_trace(contract, [], SYMBOLS, {}) == []


@pytest.mark.parametrize(
    ("per", "times"), [("model", 1), ("layer", 2), ("later_layer", 1), ("dense_layer", 1), ("moe_layer", 1)]
)
def test_scopes(per: str, times: int) -> None:
    rule = {"group": "tp", "op": "slice", "module": "m", "per": per, "count": 3}
    contract = Contract.model_validate({"description": "x", "collective": [rule]})
    (breach,) = check_trace(contract, [], SYMBOLS, {})
    assert breach.expected == {"count": 3 * times}
    assert check_trace(contract, [call("slice", "tp", "m", [4], [1])] * 3 * times, SYMBOLS, {}) == []


def test_a_folder_of_ranks_names_the_rank(records: list[Record]) -> None:
    broken = copy.deepcopy(records)
    broken.remove(find(broken, op="all_gather"))
    step = {"kind": "step", "step": 3, "symbols": SYMBOLS, "variants": ROW}
    records, broken = [step, *records], [step, *broken]
    headers = [{"rank": r} for r in (0, 1)]
    good = check_folder(CONTRACT, [(headers[0], records), (headers[1], records)])
    assert good == {"verdict": "pass", "ranks": 2, "breaches": []}
    bad = check_folder(CONTRACT, [(headers[0], records), (headers[1], broken)])
    assert (bad["verdict"], bad["ranks"]) == ("fail", 2)
    assert [(b["rank"], b["step"]) for b in bad["breaches"]] == [(1, 3)]
    assert set(bad["breaches"][0]) == {
        "rank",
        "step",
        "module",
        "layer",
        "port",
        "seq",
        "expected",
        "found",
        "detail",
        "what",
    }


# --- symbols ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "value"),
    [(256, 256), ("256", 256), ("T", 9), ("N*v", 40), ("V/tp", 4), ("N / tp * v", 10), ("2*H", 20), ("_", None)],
)
def test_dimensions(dim: int | str, value: int | None) -> None:
    assert evaluate(dim, SYMBOLS) == value


def test_an_unknown_symbol_is_named() -> None:
    with pytest.raises(UsageError, match="'X'") as error:
        evaluate("N*X", SYMBOLS)
    assert "N*X" in str(error.value)
    assert "\n" not in str(error.value)


def test_symbols_of_the_rfcs_workload() -> None:
    symbols = symbols_of(load_config("glm-5.1"), Tokens(4096, 16), {"tp": 16, "ep": 16})
    assert (symbols["T"], symbols["P"], symbols["n"]) == (4096, 4096, 256)
    assert (symbols["H"], symbols["N"], symbols["v"], symbols["qk"]) == (6144, 64, 256, 256)
    assert (symbols["Q"], symbols["R"], symbols["r"], symbols["d"], symbols["K"]) == (2048, 512, 64, 128, 2048)
    assert (symbols["E"], symbols["k"], symbols["I"], symbols["F"], symbols["V"]) == (256, 8, 2048, 12288, 154880)
    assert (symbols["layers"], symbols["dense_layers"], symbols["moe_layers"]) == (78, 3, 75)
    assert symbols_of(load_config("glm-5.1"), Tokens(9, 4), {"tp": 4, "ep": 4})["P"] == 12


@pytest.mark.parametrize("name", profiles.names("contracts"))
def test_every_shipped_contract_speaks_of_known_symbols(name: str) -> None:
    contract = load_contract(name)
    symbols = symbols_of(load_config("glm-5.1"), Tokens(4096, 16), {"tp": 16, "ep": 16})
    dims = [d for rule in contract.boundary for d in rule.shape]
    dims += [d for rule in contract.collective for side in (rule.input, rule.output) for d in side or []]
    assert dims
    for dim in dims:
        evaluate(dim, symbols)


def test_the_dsa_contract_has_the_rfcs_shapes() -> None:
    # RFC 3.3.1 on GLM-5.1, 4096 tokens, tp 16
    contract = load_contract("dsa_cp_prefill")
    symbols = symbols_of(load_config("glm-5.1"), Tokens(4096, 16), {"tp": 16, "ep": 16})
    rules = [b for b in contract.boundary if b.when.get("moe") != "mc2" and b.per != "shared_layer"]
    shapes = {(b.module.removeprefix("model.layers.*."), b.port): b for b in rules}

    def of(module: str, port: str) -> tuple[str, list[int | None]]:
        rule = shapes[module, port]
        return rule.layout, [evaluate(d, symbols) for d in rule.shape]

    assert of("self_attn", "input") == ("full-token", [4096, 6144])
    assert of("self_attn.attn", "output") == ("full-token", [4096, 64, 256])
    assert of("self_attn.o_proj", "input") == ("local-token", [256, 64, 256])
    assert of("self_attn.o_proj", "output") == ("local-token", [256, 6144])
    assert of("post_attention_layernorm", "output1") == ("local-token", [256, 6144])
    assert of("mlp.gate", "output") == ("local-token", [256, 256])
    assert of("mlp.topk", "output") == ("local-token", [256, 8])
    assert evaluate(contract.max_rows or 0, symbols) == 4096


MALFORMED = [
    ("unknown field", 'description = "x"\nrows = 3', "rows"),
    ("unknown port", 'description = "x"\n[[boundary]]\nmodule = "m"\nport = "in"\nlayout = "a"\nshape = []', "port"),
    ("unknown group", 'description = "x"\n[[collective]]\nmodule = "m"\ngroup = "pp"\nop = "slice"', "group"),
]


@pytest.mark.parametrize(("text", "named"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_a_malformed_contract_is_one_line(tmp_path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="mine") as error:
        load_contract(str(path))
    assert named in str(error.value)
    assert "\n" not in str(error.value)
