"""HF configs: legacy fields, schedules, cuts, structure detection, and one clear line for every mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulator.errors import UsageError
from emulator.model.config import ModelConfig, load_config, parse_config
from emulator.model.structure import DSA_FIELDS, INDEXER_FIELDS, MLA_FIELDS, has_dsa_structure, has_mla_structure

Config = dict[str, Any]


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 300, "a line, not the file"
    return text


# --- rope -------------------------------------------------------------------------------------------------------------


def test_legacy_rope_scaling_is_folded(tiny: Config) -> None:
    tiny |= {
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
    }
    rope = parse_config(tiny, "here").rope_parameters
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("yarn", 50000.0, 40.0)
    assert (rope.original_max_position_embeddings, rope.mscale, rope.mscale_all_dim) == (4096, 1.0, None)


def test_rope_type_of_newer_legacy_configs(tiny: Config) -> None:
    tiny["rope_scaling"] = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert parse_config(tiny, "here").rope_parameters.rope_type == "yarn"


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}], ids=["absent", "null"])
def test_theta_alone_is_default_rope(tiny: Config, scaling: Config) -> None:
    rope = parse_config(tiny | {"rope_theta": 8e6} | scaling, "here").rope_parameters
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("default", 8e6, 1.0)


def test_rope_parameters_win_over_legacy_fields(tiny: Config) -> None:
    tiny |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 5.0}
    assert parse_config(tiny, "here").rope_parameters.rope_theta == 1e6


def test_the_profiles_hold_the_published_rope() -> None:
    glm, v32 = load_config("glm-5.1").rope_parameters, load_config("deepseek-v3.2").rope_parameters
    assert (glm.rope_type, glm.rope_theta) == ("default", 1e6)
    assert (v32.rope_type, v32.rope_theta, v32.factor, v32.original_max_position_embeddings) == ("yarn", 1e4, 40, 4096)


# --- sizes of DESIGN section 3 ----------------------------------------------------------------------------------------


def test_glm_5_1_has_the_sizes_of_the_design() -> None:
    c = load_config("glm-5.1")
    assert (c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank) == (6144, 64, 2048, 512)
    assert (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.qk_head_dim) == (192, 64, 256, 256)
    assert (c.index_n_heads, c.index_head_dim, c.index_topk) == (32, 128, 2048)
    assert (c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (256, 8, 2048)
    assert (c.intermediate_size, c.num_hidden_layers, c.vocab_size) == (12288, 78, 154880)
    assert [c.is_moe(i) for i in range(78)] == [False] * 3 + [True] * 75


def test_deepseek_v3_has_the_published_sizes() -> None:
    # DeepSeek-V3 technical report (arXiv 2412.19437), section 4.2, and the published config.json
    c = load_config("deepseek-v3")
    assert (c.vocab_size, c.hidden_size, c.num_attention_heads, c.num_hidden_layers) == (129280, 7168, 128, 61)
    assert (c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim) == (1536, 512, 128, 64)
    assert (c.v_head_dim, c.intermediate_size, c.moe_intermediate_size) == (128, 18432, 2048)
    assert (c.n_routed_experts, c.num_experts_per_tok, c.n_group, c.topk_group) == (256, 8, 8, 4)
    assert (c.routed_scaling_factor, c.rms_norm_eps, c.n_shared_experts) == (2.5, 1e-6, 1)
    assert [c.is_moe(i) for i in range(61)] == [False] * 3 + [True] * 58
    rope = c.rope_parameters
    assert (rope.rope_type, rope.rope_theta, rope.factor, rope.mscale_all_dim) == ("yarn", 1e4, 40, 1.0)
    assert not has_dsa_structure(c)


@pytest.mark.parametrize(
    ("model_type", "groups", "eps"),
    [("glm_moe_dsa", (1, 1), 1e-5), ("deepseek_v32", (8, 4), 1e-6), ("deepseek_v3", (8, 4), 1e-6)],
)
def test_an_omitted_field_has_the_default_of_its_hf_class(
    tiny: Config, model_type: str, groups: tuple[int, int], eps: float
) -> None:
    # hf_models.md, table of the two classes
    for name in ("n_group", "topk_group", "rms_norm_eps"):
        del tiny[name]
    config = parse_config(tiny | {"model_type": model_type, "n_routed_experts": 16}, "here")
    assert (config.n_group, config.topk_group) == groups
    assert config.rms_norm_eps == eps


@pytest.mark.parametrize("field", ["rms_norm_eps", "routed_scaling_factor", "first_k_dense_replace"])
def test_a_model_of_an_unknown_type_says_what_hf_would_know(tiny: Config, field: str) -> None:
    del tiny[field]
    with pytest.raises(UsageError, match=field) as error:
        parse_config(tiny | {"model_type": "something_new"}, "here")
    one_line(error)


# --- schedules --------------------------------------------------------------------------------------------------------


def test_mlp_layer_types_win_over_first_k_dense(tiny: Config) -> None:
    config = parse_config(tiny | {"mlp_layer_types": ["sparse", "dense"]}, "here")
    assert [config.is_moe(i) for i in range(2)] == [True, False]


def test_indexer_schedule_of_glm_5_2(tiny: Config) -> None:
    # hf_models.md: freq 4, offset 3 => 21 full of 78
    config = parse_config(tiny | {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}, "here")
    full = [i for i in range(78) if config.has_indexer(i)]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert len(full) == 21
    assert full[-1] == 74


def test_every_layer_has_an_indexer_by_default(tiny: Config) -> None:
    config = parse_config(tiny | {"num_hidden_layers": 9}, "here")
    assert all(config.has_indexer(i) for i in range(9))


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full", "shared", "full"]},
        {"index_topk_pattern": "FSF"},
        {"index_topk_pattern": ["full", "shared", "full"]},
        # order of precedence: types, pattern, frequency
        {"indexer_types": ["full", "shared", "full"], "index_topk_pattern": "FFF", "index_topk_freq": 5},
        {"index_topk_pattern": "FSF", "index_topk_freq": 5},
    ],
    ids=["types", "pattern", "pattern list", "types first", "pattern before frequency"],
)
def test_indexer_schedule_by_name(tiny: Config, fields: Config) -> None:
    config = parse_config(tiny | {"num_hidden_layers": 3} | fields, "here")
    assert [config.has_indexer(i) for i in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("model_type", "said", "interleaved"),
    [
        ("glm_moe_dsa", None, True),
        ("glm_moe_dsa", False, True),  # HF hard-codes it by class
        ("deepseek_v32", None, False),
        ("deepseek_v32", True, False),
        ("my_own_dsa", None, False),
        ("my_own_dsa", True, True),
    ],
)
def test_pairing_of_the_indexers_rope(tiny: Config, model_type: str, said: bool | None, interleaved: bool) -> None:
    config = parse_config(tiny | {"model_type": model_type, "indexer_rope_interleave": said}, "here")
    assert config.indexer_interleaved is interleaved


# --- dense MLA --------------------------------------------------------------------------------------------------------


def dense(config: Config) -> Config:
    return {k: v for k, v in config.items() if k not in INDEXER_FIELDS}


@pytest.mark.parametrize("value", [None, 0, "absent"])
def test_a_config_without_an_indexer_is_dense_mla(tiny: Config, value: Any) -> None:
    fields = {} if value == "absent" else dict.fromkeys(INDEXER_FIELDS, value)
    config = parse_config(dense(tiny) | fields | {"model_type": "any_name"}, "here")
    assert [getattr(config, name) for name in INDEXER_FIELDS] == [0, 0, 0]
    assert has_mla_structure(config)
    assert not has_dsa_structure(config)
    assert not any(config.has_indexer(i) for i in range(2))
    assert config.with_layers(1).with_sizes({"vocab_size": 9}).vocab_size == 9


@pytest.mark.parametrize("lost", INDEXER_FIELDS)
def test_half_an_indexer_is_refused(tiny: Config, lost: str) -> None:
    with pytest.raises(UsageError, match=f"half an indexer: missing or zero fields {lost}$") as error:
        parse_config(tiny | {lost: None}, "here")
    one_line(error)
    with pytest.raises(UsageError, match="half an indexer"):
        parse_config(dense(tiny), "here").with_sizes({"index_topk": 3})


def test_rope_of_dense_mla_needs_no_index_head(tiny: Config) -> None:
    assert parse_config(dense(tiny) | {"qk_rope_head_dim": 6}, "here").qk_rope_head_dim == 6


@pytest.mark.parametrize(
    ("said", "interleaved"),
    [
        ({}, True),
        ({"rope_interleave": True}, True),
        ({"rope_interleave": False}, False),
        ({"rope_interleave": None}, False),
    ],
)
def test_pairing_of_the_attentions_rope(tiny: Config, said: Config, interleaved: bool) -> None:
    # an option of HF's DeepseekV3; its DSA classes have none and interleave
    assert parse_config(dense(tiny) | said, "here").rope_interleaved is interleaved
    assert parse_config(tiny | said, "here").rope_interleaved is True


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [(1, "D"), (2, "DS"), (3, "DDS"), (4, "DDDS"), (6, "DDDSSS"), (78, "DDD" + 75 * "S")],
)
def test_a_cut_model_keeps_both_kinds(layers: int, kinds: str) -> None:
    cut = load_config("glm-5.1").with_layers(layers)
    assert cut.num_hidden_layers == layers
    assert "".join("S" if cut.is_moe(i) else "D" for i in range(layers)) == kinds


def test_a_cut_changes_nothing_else() -> None:
    config = load_config("glm-5.1")
    assert config.with_layers(None) is config
    assert config.with_layers(4).model_dump(exclude={"num_hidden_layers", "mlp_layer_types"}) == config.model_dump(
        exclude={"num_hidden_layers", "mlp_layer_types"}
    )
    assert config.num_hidden_layers == 78


@pytest.mark.parametrize("layers", [0, -1, 79])
def test_a_cut_outside_the_model_is_refused(layers: int) -> None:
    with pytest.raises(UsageError, match="1 to 78") as error:
        load_config("glm-5.1").with_layers(layers)
    assert str(layers) in one_line(error)


def test_a_model_of_one_kind_stays_of_one_kind(tiny: Config) -> None:
    dense = parse_config(tiny | {"num_hidden_layers": 4, "first_k_dense_replace": 4}, "here").with_layers(2)
    sparse = parse_config(tiny | {"num_hidden_layers": 4, "first_k_dense_replace": 0}, "here").with_layers(2)
    assert [dense.is_moe(i) for i in range(2)] == [False, False]
    assert [sparse.is_moe(i) for i in range(2)] == [True, True]


# --- structure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [dict, lambda c: SimpleNamespace(**c)], ids=["mapping", "object"])
def test_structure_is_seen_whatever_the_model_is_called(tiny: Config, wrap: Callable[[Config], Any]) -> None:
    assert has_dsa_structure(wrap(tiny))
    assert has_dsa_structure(wrap(tiny | {"model_type": "something_new"}))
    assert has_dsa_structure(wrap({k: v for k, v in tiny.items() if k != "model_type"}))


@pytest.mark.parametrize("field", DSA_FIELDS)
@pytest.mark.parametrize("value", [None, 0], ids=["null", "zero"])
@pytest.mark.parametrize("wrap", [dict, lambda c: SimpleNamespace(**c)], ids=["mapping", "object"])
def test_structure_needs_every_field(tiny: Config, field: str, value: Any, wrap: Callable[[Config], Any]) -> None:
    assert not has_dsa_structure(wrap(tiny | {field: value}))
    del tiny[field]
    assert not has_dsa_structure(wrap(tiny))


def test_the_name_alone_is_not_the_structure() -> None:
    assert not has_dsa_structure({"model_type": "deepseek_v32"})


def test_structure_of_an_object_with_class_attributes(tiny: Config) -> None:
    # a config class may give its sizes as class attributes or properties; they are attributes all the same
    attributes: Config = dict(tiny)
    attributes["index_topk"] = property(lambda self: 3)
    assert has_dsa_structure(type("Config", (), attributes)())


def test_unknown_model_type_is_accepted(tiny: Config) -> None:
    assert parse_config(tiny | {"model_type": "something_new"}, "here").model_type == "something_new"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "n_routed_experts", "num_hidden_layers"])
def test_a_missing_field_is_named(tiny: Config, field: str) -> None:
    del tiny[field]
    with pytest.raises(UsageError, match=field) as error:
        parse_config(tiny, "here/config.json")
    assert one_line(error).startswith("here/config.json")


@pytest.mark.parametrize("lost", [["q_lora_rank"], ["kv_lora_rank", "v_head_dim"], list(MLA_FIELDS)])
def test_missing_structure_names_all_its_fields(tiny: Config, lost: list[str]) -> None:
    # q_lora_rank alone: models whose query has no low-rank projection
    with pytest.raises(UsageError, match="no MLA structure") as error:
        parse_config(tiny | dict.fromkeys(lost), "here")
    assert one_line(error).endswith(f"missing or zero fields {', '.join(lost)}")


BAD = [
    ("negative size", {"hidden_size": -4}, ["hidden_size"]),
    ("text for a number", {"hidden_size": "wide"}, ["hidden_size", "wide"]),
    ("groups that do not divide", {"n_group": 3}, ["n_group 3", "n_routed_experts"]),
    ("groups of one expert", {"n_group": 4, "topk_group": 2}, ["n_group 4"]),  # a group is scored by its two best
    ("more groups kept than there are", {"n_group": 2, "topk_group": 4}, ["topk_group"]),
    ("more experts chosen than there are", {"num_experts_per_tok": 5}, ["num_experts_per_tok"]),
    ("odd rope dim", {"qk_rope_head_dim": 3}, ["qk_rope_head_dim"]),
    ("rope wider than the index head", {"qk_rope_head_dim": 6}, ["qk_rope_head_dim", "index_head_dim"]),
    ("short schedule of MLPs", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "1", "2"]),
    ("short schedule of indexers", {"indexer_types": ["full"]}, ["indexer_types", "1", "2"]),
    ("short pattern of indexers", {"index_topk_pattern": "F"}, ["index_topk_pattern", "1", "2"]),
    ("unknown kind of layer", {"mlp_layer_types": ["dense", "moe"]}, ["mlp_layer_types", "moe"]),
    ("nothing to share", {"indexer_types": ["shared", "full"]}, ["layer 0"]),
    ("unknown rope", {"rope_parameters": {"rope_type": "llama3"}}, ["rope_parameters", "llama3"]),
]


@pytest.mark.parametrize(("change", "named"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_config_that_makes_no_sense(tiny: Config, change: Config, named: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse_config(tiny | change, "here")
    line = one_line(error)
    assert all(word in line for word in named), line


def test_yarn_needs_its_original_length(tiny: Config) -> None:
    # found while reading the config, not as a ValueError in the middle of a run
    with pytest.raises(UsageError, match="original_max_position_embeddings"):
        parse_config(tiny | {"rope_scaling": {"type": "yarn", "factor": 40}}, "here")


FILES = [
    ("not JSON", '{"hidden_size": 12,', "not valid JSON"),
    ("not an object", "[1, 2]", "list"),
]


@pytest.mark.parametrize(("text", "named"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_a_config_file_that_is_none(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=named) as error:
        load_config(str(tmp_path))
    assert "config.json" in one_line(error)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json") as error:
        load_config(str(tmp_path))
    one_line(error)


def test_a_model_folder_or_its_config_file(tiny: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"architectures": ["X"], "torch_dtype": "bfloat16"}))
    assert load_config(str(tmp_path)) == ModelConfig.model_validate(tiny)
    assert load_config(str(tmp_path / "config.json")) == ModelConfig.model_validate(tiny)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"glm-5\.1-mini") as error:
        load_config("glm-9")
    assert "glm-9" in one_line(error)
