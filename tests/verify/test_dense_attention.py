"""Diagnosis of dense attention with another softmax scale, on a shard of heads per rank."""

import pytest
import torch

from emulator.layout.placement import Layout
from emulator.verify.diagnosis import diagnose

from .test_diagnosis import LOCAL, Arg, Bench, Shard, ops, parameter, token

N, NOPE, ROPE, RANK, VALUE, BLOCK = 4, 6, 2, 7, 5, 4


@pytest.mark.parametrize(("width", "meant"), [("nope", NOPE), ("latent row", RANK + ROPE)])
def test_softmax_scale_of_another_width(width: str, meant: int) -> None:
    bench = Bench(2, 13)
    q, cache = bench.random(13, N, NOPE + ROPE), bench.random(4 * BLOCK, RANK + ROPE)
    w_uk, w_uv = bench.random(N, NOPE, RANK), bench.random(N, RANK, VALUE)
    lens, table = torch.tensor([13]), torch.tensor([[2, 0, 3, 1]])
    whole = (q, cache, w_uk, w_uv, lens, lens, table, BLOCK)
    used, right = (NOPE + ROPE) ** -0.5, meant**-0.5
    heads, batch = parameter(LOCAL), Layout("batch")
    arguments = [
        Arg("q", bench.shards(q, 1), token(Shard(1))), Arg("cache", bench.full(cache), Layout("cache")),
        Arg("w_uk_t", bench.shards(w_uk, 0), heads), Arg("w_uv", bench.shards(w_uv, 0), heads),
        Arg("query_lens", bench.full(lens), batch), Arg("kv_lens", bench.full(lens), batch),
        Arg("block_table", bench.full(table), batch), BLOCK, used,
    ]  # fmt: skip
    found = bench.shards(ops.multihead_latent_attention(*whole, used), 1)
    reference = ops.multihead_latent_attention(*whole, right)
    scene = bench.scene(ops.multihead_latent_attention, arguments, found, reference, token(Shard(1)))

    diagnosis = diagnose(scene)
    assert diagnosis.kind == "wrong_constant", diagnosis.text
    assert diagnosis.holds == {"argument": "scale", "used": used, "right": right}
