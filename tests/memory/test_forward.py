"""The forward peak of a run: how high, where, and what was live."""

from emulator.jobs.job import run
from emulator.report.run import print_summary
from emulator.scenario import load_scenario


def test_the_peak_of_a_full_size_prefill_is_its_logits(capsys):
    given = {"plan": "dsa_cp", "parallel": {"tp": 2, "ep": 2}, "layers": 1, "mode": "shape", "tokens": 4096}
    summary = run(load_scenario("glm-5.1", given))
    memory = summary["forward_memory"]
    gathered, shard = 4096 * 154880 * 2, 4096 * 154880 // 2 * 2  # of all ranks, beside the rank's own
    assert memory["peak_bytes"] == gathered + shard
    assert memory["by_category"] == {"communication": gathered, "activation": shard}
    assert (memory["op"], memory["module"], memory["step"]) == ("all_gather", "lm_head", 0)
    assert [(v["shape"], v["bytes"]) for v in memory["live"]] == [([4096, 154880], gathered), ([4096, 77440], shard)]
    assert [r["peak_bytes"] for r in summary["per_rank"]] == [gathered + shard] * 2
    # caches of one layer: 4096 slots and a spare block of 16, each 576 + 128 values of bf16
    assert memory["cache_bytes"] == 4112 * 704 * 2
    print_summary(summary)
    printed = capsys.readouterr().out
    assert "forward peak 1815.00 MiB on rank 0 (" in printed
    assert "at all_gather of lm_head" in printed
    assert "1210.00 MiB  all_gather" in printed


def test_the_step_with_the_peak_is_named():
    steps = [{"requests": [{"q": 4}]}, {"requests": [{"q": 24, "context": 4}]}]
    summary = run(load_scenario("glm-5.1-mini", {"plan": "tp", "layers": 2, "step": steps}))
    memory = summary["forward_memory"]
    assert memory["step"] == 1
    assert sum(memory["by_category"].values()) == memory["peak_bytes"]
    assert memory["peak_bytes"] == max(r["peak_bytes"] for r in summary["per_rank"])
    assert summary["per_rank"][memory["rank"]]["memory"]["node"] == memory["node"]
