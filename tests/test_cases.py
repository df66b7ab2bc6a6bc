"""The public bug catalogue, case by case: the test that holds its right values, the fault that has its wrong ones, or
why this stage cannot express it."""

from pathlib import Path

import pytest

from emulator.faults.catalogue import FAULTS

WINDOWS, BATCHES = "layout/test_windows.py", "multirank/test_batches.py"
# id -> (file, function) of the test with its right values, where a run's own checks are not that test
RIGHT = {
    "negative-key-length-on-graph-padding": (WINDOWS, "test_key_length_of_graph_pad_requests"),
    "draft-steps-share-length-buffers": (WINDOWS, "test_draft_steps_have_their_own_lengths"),
    "dummy-run-reuses-live-slots": (WINDOWS, "test_dummy_step_has_no_slots"),
    "one-token-last-chunk-taken-for-decode": (WINDOWS, "test_worked_example"),
    "short-row-topk-minus-one-read-as-index": (WINDOWS, "test_short_rows_find_fewer_keys_than_topk"),
    "rope-positions-and-query-in-different-layouts": (WINDOWS, "test_positions_are_cut_like_queries"),
    "sp-padding-adds-a-request": (WINDOWS, "test_padding_adds_no_request"),
    "dummy-request-missing-in-kv-lengths": (WINDOWS, "test_padding_adds_no_request"),
    "capture-sizes-not-multiples-of-tp": (WINDOWS, "test_capture_sizes_are_multiples_of_tp"),
    "dp-padding-target-mixes-local-and-global": (WINDOWS, "test_rows_agreed_over_dp"),
    "dp-ranks-padded-to-different-lengths": (WINDOWS, "test_rows_agreed_over_dp"),
    "dummy-graph-size-from-unpadded-tokens": (WINDOWS, "test_rows_agreed_over_dp"),
    "all2all-split-assumed-even": (WINDOWS, "test_all2all_pads_only_up_to_tp"),
    "mc2-mask-buffer-not-tp-aligned": (WINDOWS, "test_mc2_mask"),
    "tp-o-proj-cloned-per-layer": ("memory/test_ledger.py", "test_elements_of_an_attention_layer"),
    "sp-prefill-only-with-weight-gather": ("multirank/test_o_proj_paths.py", "test_all_to_all_serves_prefill_too"),
    "role-selects-wrong-o-proj-path": ("multirank/test_o_proj_paths.py", "test_roles_and_states"),
    "empty-query-rank-skips-gather": (BATCHES, "test_ranks_without_a_token_make_the_same_calls"),
}
LATER = {
    "dcp-cache-written-with-replicated-slots": "needs a dcp axis",
    "decode-slots-compacted-with-equal-query-lengths": "needs a pcp axis",
    "pipeline-boundary-leaks-shard-or-pad": "needs pipeline stages",
    "pipeline-buffers-sized-for-full-rows": "needs pipeline stages",
    "replicated-wq-b-exceeds-matmul-limit": "needs DeepSeek V4, whose wq_b reaches the limit",
}
ALL = 40


def test_every_case_is_accounted_for():
    by_fault = {case for fault in FAULTS.values() for case in fault.cases}
    assert not by_fault & set(LATER)
    assert not set(RIGHT) & set(LATER)
    assert len(by_fault | set(RIGHT) | set(LATER)) == ALL


@pytest.mark.parametrize("case", RIGHT)
def test_its_test_exists(case):
    file, function = RIGHT[case]
    assert f"def {function}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(
    ("tokens", "tp", "state"),
    [([1], 4, "decode"), ([1], 2, "decode"), ([2], 4, "prefill"), ([3], 4, "prefill")],
)
def test_row_counts_that_coincide_are_no_layout(tokens, tp, state):
    """layout-inferred-from-row-count, layer-boundary-leaves-and-reenters-sp, residual-chunk-silently-skipped: one row
    of a rank is one local row or the whole batch; the tag tells, and every plan equals the reference."""
    from emulator.jobs.job import run
    from emulator.scenario import load_scenario, parse_requests

    batch = parse_requests(",".join(f"{n}:{7 if state == 'decode' else 0}" for n in tokens)).model_dump()
    for plan in ("tp", "sp"):
        given = {"plan": plan, "parallel": {"tp": tp}, "step": [batch], "layers": 3}
        summary = run(load_scenario("glm-5.1-mini", given))
        assert summary["verdict"] == "pass", (plan, summary["checks"])
        assert summary["steps"][0]["phase"] == state
    cut = next(c for c in summary["collectives"] if c["op"] == "reduce_scatter" and "o_proj" in c["module"])
    assert cut["count"] == 3  # once a layer, never skipped because row counts coincide
