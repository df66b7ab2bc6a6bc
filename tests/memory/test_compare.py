"""The difference of two ledgers: which components, how many bytes, and because of which tensors."""

from emulator.memory.compare import compare


def test_the_rfcs_28_and_38_gib_component_by_component(ledger_of):
    before = ledger_of(
        "glm-5.1", "tp", rules="tensorcast-old", quant="w8a8", tp=16, dp=2, ep=32, embedding="replicated"
    )
    after = ledger_of("glm-5.1", "dsa_cp", rules="tensorcast", quant="w8a8", tp=16, dp=2, ep=32)
    rows = {row.name: row.delta for row in compare(before, after).rows if row.delta}
    assert rows == {
        "embed_tokens": -(154880 - 154880 // 16) * 6144 * 2,
        "q_b_proj": 78 * (16384 - 1024) * 2048,
        "kv_b_proj": 78 * (28672 * 2 - 1792) * 512,
        "indexer_wk_weights_proj": 78 * (128 + 32) * 6144,
        "o_proj": 78 * 6144 * (16384 - 1024),
    }
    assert sum(rows.values()) == 40875282432 - 30549626880
    why = {row.name: row.why for row in compare(before, after).rows}
    assert why["norms"] == ()
    assert why["kv_b_proj"] == (
        "self_attn.kv_b_proj.weight: 78 x [1792, 512] int8 tp:shard(0) -> 78 x [28672, 512] bfloat16 replicated",
    )


def test_tensors_of_one_side_only(ledger_of):
    sides = [
        ledger_of("glm-5.1-mini", "dsa_cp_engine", rules=r, quant="w8a8", tp=4, ep=4) for r in ("tensorcast", "engine")
    ]
    rows = {row.name: row for row in compare(*sides, "category").rows}
    assert (rows["derived"].first, rows["derived"].second) == (0, 5 * 24 * 46 * 44 * 2)
    assert rows["derived"].why == (
        "self_attn.kv_b_proj.W_UV: none -> 5 x [24, 44, 26] bfloat16 replicated",
        "self_attn.kv_b_proj.W_UK_T: none -> 5 x [24, 20, 44] bfloat16 replicated",
    )
    assert sum(row.delta for row in rows.values()) == sides[1].total_bytes - sides[0].total_bytes


def test_forms_of_one_name_that_differ_by_layer(ledger_of):
    sides = [ledger_of("glm-5.1-mini", "tp", rules="engine", quant="none", tp=tp, ep=2) for tp in (4, 2)]
    why = {row.name: row.why for row in compare(*sides, "layer").rows}
    assert (
        "self_attn.o_proj.weight: 1 x [144, 156] bfloat16 tp:shard(1) -> 1 x [144, 312] bfloat16 tp:shard(1)"
        in why["0"]
    )
