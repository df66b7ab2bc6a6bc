"""Reading plans: what they inherit, and one clear line for every mistake."""

from collections.abc import Callable

import pytest
from torch.distributed.tensor.placement_types import Shard

from emulator.errors import UsageError
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan, module_pattern
from emulator.ops.registry import LOCAL, R

LAYER = "model.layers.7"
HEADER = 'description = "mine"\n'


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# --- what plans say ---------------------------------------------------------------------------------------------------


def test_dsa_cp_is_sp_with_whole_attention_weights() -> None:
    # RFC 3.3: structural logic layered on sequence parallelism; q_b/kv_b keep the full layout, o_proj runs whole
    sp, dsa = load_plan("sp"), load_plan("dsa_cp")
    changed = {f"model.layers.*.self_attn.{m}" for m in ("q_b_proj", "kv_b_proj", "o_proj")}
    assert set(dsa.rows) == set(sp.rows)
    assert {m for m in dsa.rows if dsa.rows[m] != sp.rows[m]} == changed
    assert sp.weight_of(f"{LAYER}.self_attn.q_b_proj") == {"tp": Shard(0)}
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        assert dsa.weight_of(f"{LAYER}.self_attn.{name}") == {}
    assert dsa.input_of(f"{LAYER}.self_attn.o_proj") == ("token", {"tp": LOCAL})
    assert dsa.output_of(f"{LAYER}.self_attn.o_proj") == ("token", {"tp": LOCAL})
    assert dsa.input_of(f"{LAYER}.self_attn") == ("token", {"tp": R})  # inherited


def test_a_plan_has_its_own_contract_or_its_parents(write_plan: Callable[..., str]) -> None:
    assert load_plan("dsa_cp").contract != load_plan("sp").contract
    assert load_plan(write_plan(HEADER + 'extends = "sp"')).contract == load_plan("sp").contract


def test_rows_override_field_by_field(write_plan: Callable[..., str]) -> None:
    child = write_plan(HEADER + 'extends = "sp"\n[modules]\n"lm_head" = { weight = "replicated" }')
    plan = load_plan(child)
    assert plan.weight_of("lm_head") == {}
    assert plan.input_of("lm_head") == ("token", {"tp": R})  # kept from sp


def test_variants_default_and_choice() -> None:
    assert load_plan("dsa_cp").variants == {
        "embedding": "row", "moe": "all_to_all", "dense_mlp": "gather_scatter", "shared_experts": "replicated",
    }  # fmt: skip
    gate = f"{LAYER}.mlp.shared_experts.gate_proj"
    assert load_plan("dsa_cp").weight_of(gate) == {}
    assert load_plan("dsa_cp", {"shared_experts": "gather_scatter"}).weight_of(gate) == {"tp": Shard(0)}


def test_a_star_is_one_name_component() -> None:
    plan = load_plan("sp")
    assert plan.row("model.layers.12.self_attn.o_proj") is not None
    assert plan.row("model.layers.12.self_attn.o_proj.deeper") is None
    assert plan.row("model.layers.12") is None
    assert module_pattern("model.layers.12.mlp.experts") == "model.layers.*.mlp.experts"
    assert module_pattern("model.norm") == "model.norm"
    assert module_pattern("model.layers.3") == "model.layers.*"


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_unknown_plan_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="dsa_pc") as error:
        load_plan("dsa_pc")
    text = one_line(error)
    assert "dsa_cp" in text
    assert "sp" in text


def test_unknown_variant() -> None:
    with pytest.raises(UsageError, match="embeding") as error:
        load_plan("sp", {"embeding": "row"})
    assert "embedding" in one_line(error)  # the allowed ones


def test_unknown_option() -> None:
    with pytest.raises(UsageError, match="embedding='column'") as error:
        load_plan("sp", {"embedding": "column"})
    assert "row, replicated" in one_line(error)


BROKEN = [
    ("bad layout word", '[modules]\n"lm_head" = { input = "fulltoken" }', ["lm_head", "fulltoken", "full-token"]),
    ("bad output word", '[modules]\n"lm_head" = { output = "shard(0)" }', ["lm_head", "shard(0)"]),
    ("bad weight word", '[modules]\n"lm_head" = { weight = "split" }', ["lm_head", "split", "replicated"]),
    ("unknown field of a row", '[modules]\n"lm_head" = { inputs = "full-token" }', ["lm_head", "inputs"]),
    ("unknown field of the plan", 'modulez = 3', ["modulez"]),
    ("row that is no table", '[modules]\n"lm_head" = "full-token"', ["lm_head"]),
    ("variant without a default", '[variants.v.options.a]\n"lm_head" = {}', ["variants.v", "default"]),
    ("default that is no option", '[variants.v]\ndefault = "b"\n[variants.v.options.a]\n"m" = {}', ["v='b'", "a"]),
    ("bad word in an option", '[variants.v]\ndefault = "a"\n[variants.v.options.a]\n"m" = { input = "x" }', ["'x'"]),
    ("unknown parent", 'extends = "spp"', ["spp"]),
    ("not TOML", "[modules\nx = 1", ["mine.toml", "line 2"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_malformed_plan_is_one_line_that_names_the_culprit(
    text: str, named: list[str], write_plan: Callable[..., str]
) -> None:
    with pytest.raises(UsageError) as error:
        load_plan(write_plan(HEADER + text))
    line = one_line(error)
    assert all(word in line for word in named), line
    assert len(line) < 400, "a line, not the file"


def test_a_plan_needs_a_description(write_plan: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="description") as error:
        load_plan(write_plan('[modules]\n"lm_head" = { input = "full-token" }'))
    assert len(one_line(error)) < 200


def test_plans_that_extend_each_other(write_plan: Callable[..., str]) -> None:
    write_plan(HEADER, "b")  # so that the path exists
    first = write_plan(HEADER, "a")
    second = write_plan(f"{HEADER}extends = '{first}'", "b")
    write_plan(f"{HEADER}extends = '{second}'", "a")
    with pytest.raises(UsageError, match="extends itself") as error:
        load_plan(first)
    assert "plan a" in one_line(error)


UNMATCHED = [
    ("model.layers.*.self_atn.o_proj", ["self_atn", "model.layers.*.self_attn.o_proj"]),  # suggests the near one
    ("model.layers.*.mlp.router", ["mlp.router"]),
    ("o_proj", ["'o_proj'", "model.layers.*.self_attn.o_proj"]),
    ("model.layers.3.self_attn.o_proj", ["model.layers.3.self_attn.o_proj"]),  # one layer: patterns only
]


@pytest.mark.parametrize(("pattern", "named"), UNMATCHED, ids=[u[0] for u in UNMATCHED])
def test_a_row_that_matches_no_module(pattern: str, named: list[str], write_plan: Callable, program_of) -> None:
    plan = load_plan(write_plan(f'{HEADER}extends = "sp"\n[modules]\n"{pattern}" = {{ input = "full-token" }}'))
    with pytest.raises(UsageError, match="matches no module") as error:
        lower(program_of("glm-5.1-mini", 3), plan, {"tp": 2, "ep": 1}, 8)
    line = one_line(error)
    assert all(word in line for word in named), line


def test_rows_for_modules_that_a_cut_model_lacks_are_fine(program_of) -> None:
    # one layer of GLM is dense: the rows for experts match nothing, and that is no mistake
    lower(program_of("glm-5.1-mini", 1), load_plan("sp"), {"tp": 2, "ep": 1}, 8)


IMPOSSIBLE = [
    ("weight dim that is not there", "model.layers.*.self_attn.q_b_proj", "shard(3)", ["q_b_proj", "3"]),
    ("axis without a size", "model.layers.*.self_attn.q_b_proj", "dp:shard(0)", ["q_b_proj", "dp"]),
]


@pytest.mark.parametrize(("module", "weight", "named"), [i[1:] for i in IMPOSSIBLE], ids=[i[0] for i in IMPOSSIBLE])
def test_a_weight_that_cannot_be_split_so(
    module: str, weight: str, named: list[str], write_plan: Callable, program_of
) -> None:
    path = write_plan(f'{HEADER}extends = "sp"\n[modules]\n"{module}" = {{ weight = "{weight}" }}')
    with pytest.raises(UsageError) as error:
        lower(program_of("glm-5.1-mini", 3), load_plan(path), {"tp": 2, "ep": 1}, 8)
    line = one_line(error)
    assert all(word in line for word in named), line
