"""Op mapping: sizes worked out by hand from the records' shapes, and records that contradict themselves."""

import re
from pathlib import Path

import pytest

from emulator.cost.comm import COLLECTIVES
from emulator.cost.mapping import Contradiction, Lengths, Place, load_kernels
from emulator.errors import UsageError
from emulator.ops.registry import OPS
from emulator.profiles import root

from .records import linear, op, tensor

FULL = Lengths(12, (5, 3, 1), (5, 13, 101))
LOCAL = Lengths(3, (2, 1), (5, 11))  # rank 1 of 4: two rows of the first request and one of the second
PLACE = Place(FULL, LOCAL)
SPLIT = Place(FULL, LOCAL, frozenset({"indexer"}))


def kernels(record: dict, place: Place = PLACE, quant: str = "none") -> list[tuple]:
    found = load_kernels(quant=quant).kernels(record, place)
    return [(k.name, k.family, k.dtype, dict(k.sizes)) for k in found]


def topk(rows: int, layout: str = "full-token") -> dict:
    """dsa_indexer_topk: Q 20, D 30, 4 heads of 6, top-8."""
    inputs = [
        tensor([rows, 20], layout), tensor([rows, 30], layout), tensor([24, 20], "replicated"),
        tensor([4, 30], "replicated"), tensor([64, 6], "replicated"), tensor([rows], layout, "int64"),
        tensor([2], "replicated", "float32"), tensor([3], "replicated", "int64"), tensor([3], "replicated", "int64"),
        tensor([3, 8], "replicated", "int64"),
    ]  # fmt: skip
    attrs = {"block_size": 16, "topk": 8, "interleaved": True, "scaling": 1.0}
    output = tensor([rows, 8], layout, "int32")
    return op("dsa_indexer_topk", inputs, [output], attrs=attrs, module="model.layers.0.self_attn.indexer")


def attention(rows: int, layout: str = "full-token", heads: int = 4) -> dict:
    """mla_sparse_attention: nope 20, rope 8, latent 44, value 26, top-32."""
    inputs = [
        tensor([rows, heads, 28], layout), tensor([64, 52], "replicated"), tensor([heads, 20, 44], "replicated"),
        tensor([heads, 44, 26], "replicated"), tensor([rows, 32], layout, "int32"),
        *[tensor([3], "replicated", "int64")] * 2, tensor([3, 8], "replicated", "int64"),
    ]  # fmt: skip
    return op(
        "mla_sparse_attention", inputs, [tensor([rows, heads, 26], layout)], module="model.layers.0.self_attn.attn"
    )


def experts(attrs: dict | None = None) -> dict:
    inputs = [
        tensor([7, 20], "expert-rows"),
        tensor([3, 40, 20], "ep:shard(0)"),
        tensor([2, 3], "expert-rows", "int64"),
    ]
    module = "model.layers.0.mlp.experts.gate_up_proj"
    return op("grouped_matmul", inputs, [tensor([7, 40], "expert-rows")], attrs=attrs, module=module)


def test_every_op_is_mapped_or_is_a_collective():
    table = load_kernels()
    assert set(OPS) - set(table.file.ops) - set(COLLECTIVES) == set()


def test_a_linear_in_16_bits_is_one_matmul():
    assert kernels(linear(12, 20, 30)) == [("MatMulV2", "matmul", "bfloat16", {"m": 12, "k": 20, "n": 30})]


@pytest.mark.parametrize(
    ("scheme", "quantise"),
    [("w8a8", ("AscendQuantV2", "static_quant")), ("w8a8_dynamic", ("DynamicQuant", "dynamic_quant"))],
)
def test_a_quantised_linear_quantises_its_input_and_multiplies_in_8_bits(scheme, quantise):
    assert kernels(linear(12, 20, 30), quant=scheme) == [
        (*quantise, "bfloat16", {"rows": 12, "width": 20}),
        ("QuantBatchMatmulV3", "matmul", "int8", {"m": 12, "k": 20, "n": 30}),
    ]


@pytest.mark.parametrize("module", ["model.layers.3.self_attn.kv_b_proj", "model.layers.3.mlp.gate"])
def test_excluded_linears_stay_in_16_bits(module):
    assert [k[:3] for k in kernels(linear(12, 20, 30, module), quant="w8a8")] == [("MatMulV2", "matmul", "bfloat16")]


def test_attention_is_absorbed_and_never_quantised():
    expected = [
        ("BatchMatMulV2", "matmul", "bfloat16", {"batch": 4, "m": 12, "k": 20, "n": 44}),
        ("SparseFlashAttention", "sparse_attention", "bfloat16",
         {"queries": (5, 3, 1), "keys": (5, 13, 101), "heads": 4, "topk": 32, "qk": 52, "v": 44}),
        ("TransposeBatchMatMul", "matmul", "bfloat16", {"batch": 4, "m": 12, "k": 44, "n": 26}),
    ]  # fmt: skip
    assert kernels(attention(12)) == expected
    assert kernels(attention(12), quant="w8a8") == expected


def test_local_queries_have_the_ranks_own_lengths():
    sizes = kernels(attention(3, "local-token"))[1][3]
    assert (sizes["queries"], sizes["keys"]) == ((2, 1), (5, 11))


def test_the_indexers_topk_side_is_split_below_a_full_token_boundary():
    whole, split = kernels(topk(12)), kernels(topk(12), SPLIT)
    names = ["MatMulV2", "InterleaveRope", "MatMulV2", "LightningIndexer"]
    assert [k[0] for k in whole] == [k[0] for k in split] == names
    assert whole[0][3] == {"m": 12, "k": 20, "n": 24}
    assert split[0][3] == {"m": 3, "k": 20, "n": 24}
    assert split[1][3] == {"rows": 3, "width": 16}  # 4 heads, 4 rotated of 6
    assert split[2][3] == {"m": 3, "k": 30, "n": 4}
    assert whole[3][3] == {"queries": (5, 3, 1), "keys": (5, 13, 101), "heads": 4, "dim": 6, "topk": 8}
    assert split[3][3] == {"queries": (2, 1), "keys": (5, 11), "heads": 4, "dim": 6, "topk": 8}
    assert kernels(topk(3, "local-token")) == split  # a graph that cuts the queries itself costs the same
    assert kernels(attention(12), SPLIT) == kernels(attention(12))  # only what the place says is split


def test_attention_is_split_where_asked():
    both = Place(FULL, LOCAL, frozenset({"indexer", "attention"}))
    assert kernels(attention(12), both) == kernels(attention(3, "local-token"))


def test_the_indexers_projection_is_quantised_and_its_head_weights_are_not():
    found = kernels(topk(12), quant="w8a8")
    assert [(k[0], k[2]) for k in found] == [
        ("AscendQuantV2", "bfloat16"), ("QuantBatchMatmulV3", "int8"), ("InterleaveRope", "bfloat16"),
        ("MatMulV2", "bfloat16"), ("LightningIndexer", "bfloat16"),
    ]  # fmt: skip


def test_real_rows_of_each_expert_are_priced():
    assert kernels(experts({"expert_rows": [0, 6, 1]}))[0][3] == {"rows": (0, 6, 1), "k": 20, "n": 40}


def test_rows_are_even_where_the_trace_has_no_values():
    assert kernels(experts())[0][3]["rows"] == (3, 2, 2)
    quantised = kernels(experts(), quant="w8a8")
    assert [(k[0], k[2]) for k in quantised] == [("DynamicQuant", "bfloat16"), ("GroupedMatmul", "int8")]


@pytest.mark.parametrize("gate", [[tensor([5, 40])], [tensor([5, 20]), tensor([5, 20])]])
def test_swiglu_has_the_width_of_gate_and_up(gate):
    assert kernels(op("swiglu", gate, [tensor([5, 20])])) == [
        ("SwiGlu", "swiglu", "bfloat16", {"rows": 5, "width": 40})
    ]


def test_rope_moves_the_rotated_dimensions_only():
    given = [tensor([9, 4, 28]), tensor([9], dtype="int64"), tensor([4], "replicated", "float32")]
    attrs = {"start": 20, "interleaved": True, "scaling": 1.0}
    record = op("rope", given, [tensor([9, 4, 28])], attrs=attrs)
    assert kernels(record) == [("InterleaveRope", "rope", "bfloat16", {"rows": 9, "width": 32})]


def test_weights_derived_at_load_time_cost_nothing():
    record = op(
        "mla_absorb", [tensor([184, 44], "replicated")],
        [tensor([4, 20, 44], "replicated"), tensor([4, 44, 26], "replicated")], attrs={"nope": 20, "value": 26},
    )  # fmt: skip
    assert kernels(record) == []


def test_the_dtype_of_the_run_stands_for_16_bits():
    wide = Place(FULL, LOCAL, run_dtype="float64")
    record = op("add", [tensor([5, 20], dtype="float64")] * 2, [tensor([5, 20], dtype="float64")])
    assert kernels(record, wide)[0][2] == "bfloat16"
    router = op("add", [tensor([5, 20], dtype="float32")] * 2, [tensor([5, 20], dtype="float32")])
    assert kernels(router)[0][2] == "float32"  # wider than a 16-bit run on purpose


def broken(record: dict, which: str, index: int, shape: list[int]) -> dict:
    record[which][index]["shape"] = shape
    return record


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (broken(linear(12, 20, 30), "inputs", 1, [30, 21]), "input 1 is [30, 21], expected [n, k] with k = 20"),
        (broken(linear(12, 20, 30), "outputs", 0, [13, 30]), "output 0 is [13, 30]"),
        (broken(attention(12), "inputs", 2, [4, 19, 44]), "qk == n + latent - R does not hold"),
        (broken(attention(12), "inputs", 4, [11, 32]), "input 4 is [11, 32]"),
        (broken(topk(12), "outputs", 0, [12, 9]), "K == topk does not hold (K 9, topk 8)"),
        (experts({"expert_rows": [1, 2, 3]}), "sum(expert_rows) == M does not hold"),
        (experts({"expert_rows": [4, 3]}), "len(expert_rows) == X does not hold"),
        (op("swiglu", [tensor([5, 20])], [tensor([5, 20])]), "g * num_inputs == 2 * F does not hold"),
        (op("add", [tensor([5, 20])], [tensor([5, 20])]), "1 input tensors, expected 2 to 2"),
        (attention(8), "8 full rows for requests of 9"),
    ],
)
def test_shapes_that_contradict_each_other_or_the_attributes(record, says):
    with pytest.raises(Contradiction, match=re.escape(says)):
        kernels(record)


def own_table(tmp_path: Path, old: str, new: str) -> str:
    text = (root() / "kernels" / "ascend.toml").read_text()
    assert old in text
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_user_can_change_the_table_without_python(tmp_path):
    name = own_table(tmp_path, 'name = "Add", family = "elementwise", sizes = { rows = "T"',
                     'name = "MyAdd", family = "copy", sizes = { rows = "min(T, 3) * 2"')  # fmt: skip
    record = op("add", [tensor([5, 20])] * 2, [tensor([5, 20])])
    (kernel,) = load_kernels(name).kernels(record, PLACE)
    assert (kernel.name, kernel.family, kernel.sizes) == ("MyAdd", "copy", {"rows": 6, "width": 20})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('rows = "T", width = "H"', 'rows = "T +", width = "H"', "op embedding: 'T +' is not an expression"),
        ('rows = "T", width = "H"', 'rows = "T.real", width = "H"', "Attribute is not allowed"),
        ('rows = "T", width = "H"', 'rows = "open(T)", width = "H"', "functions are min"),
        ('tokens = "T"', 'tokens = "Z"', "`tokens` must name a dimension, not 'Z'"),
        ("[ops.embedding]", "[ops.embedding]\nfoo = 1", "ops.embedding.foo: unknown field"),
    ],
)
def test_a_malformed_table_is_told(tmp_path, old, new, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        load_kernels(own_table(tmp_path, old, new))


def test_an_unknown_name_in_a_size_is_told(tmp_path):
    table = load_kernels(own_table(tmp_path, 'rows = "T", width = "H"', 'rows = "rowz", width = "H"'))
    record = op("embedding", [tensor([5], dtype="int64"), tensor([90, 20], "replicated")], [tensor([5, 20])])
    with pytest.raises(UsageError, match="'rowz': unknown name 'rowz'; known: T, V, H"):
        table.kernels(record, PLACE)


def test_an_op_that_the_table_lacks():
    with pytest.raises(UsageError, match="has no op 'fast_add'"):
        kernels(op("fast_add", [], []))


def test_a_weight_type_that_the_table_lacks(tmp_path):
    with pytest.raises(UsageError, match="no kernel for weights of type W4A8_DYNAMIC"):
        kernels(experts(), quant="w8a8_w4a8_moe")


@pytest.mark.parametrize("static", [False, True])
def test_a_run_with_quantised_weights_has_their_scales_among_its_inputs(static):
    beside = [tensor([40, 1], "replicated")] * 2
    if static:
        beside += [tensor([1], "replicated"), tensor([1], "replicated", "int8")]
        beside += [tensor([40], "replicated", "int32"), tensor([40], "replicated", "float32")]
    quant = "w8a8" if static else "w8a8_dynamic"
    plain, quantised = linear(3, 20, 40), linear(3, 20, 40)
    quantised["inputs"] += beside
    assert kernels(quantised, quant=quant) == kernels(plain, quant=quant)
    indexer = topk(12)
    indexer["inputs"] += [tensor([24, 1], "replicated")] * 2 + beside[2:]
    assert kernels(indexer, quant=quant) == kernels(topk(12), quant=quant)
    grouped = experts()
    grouped["inputs"] += [tensor([3, 40, 1], "ep:shard(0)")] * 2
    assert kernels(grouped, quant=quant) == kernels(experts(), quant=quant)
    quantised["inputs"][2] = tensor([41, 1], "replicated")
    with pytest.raises(Contradiction, match=r"input 2 is \[41, 1\]"):
        kernels(quantised, quant=quant)
