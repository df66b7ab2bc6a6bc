"""The arguments of slices, under the names that other tools read."""

import json

from emulator.export.slice_args import cost_args, kernel_args, micros, slice_args

from .timelines import ABSORB, US, cost, hand_run, record, tensor


def test_a_collective_carries_what_hta_reads() -> None:
    piece = hand_run().timelines[0].slices[0][1]
    args = slice_args(piece, (0, 1))
    assert args["Collective name"] == "_allgather_base"
    assert (args["In msg nelems"], args["Out msg nelems"]) == (24, 48)
    assert (args["Group size"], args["Rank"], args["dtype"]) == (2, 0, "bfloat16")
    assert (args["Process Group Name"], args["Process Group Description"]) == ("tp0", "tp")
    assert args["Process Group Ranks"] == "[0, 1]"
    assert (args["bytes"], args["wait_us"], args["cost_us"]) == (48, 6.0, 5.0)
    assert (args["layout_in"], args["layout_out"]) == (["local-token"], ["full-token"])
    assert args["value_state"] == "full-token"
    assert "token_window" not in args


def test_an_op_carries_shapes_kernels_and_cost() -> None:
    linear, _, attention = hand_run().timelines[0].slices[1]
    args = slice_args(linear, (1,))
    assert args["Input Dims"] == [[4, 8], [6, 8]] == json.loads(args["simulation_shapes"])
    assert args["output_shapes"] == [[4, 6]]
    assert args["Input type"] == ["bfloat16", "bfloat16"]
    assert args["kernel_type"] == "MatMulV2"
    assert (args["cost_us"], args["cost_source"], args["cost_bound"]) == (16.0, "measured", "cube")
    assert (args["flops"], args["memory_bytes"]) == (384.0, 224.0)
    assert (args["module"], args["seq"], args["token_window"]) == ("model.layers.0.mlp.gate", 1, [0, 4])
    assert "Collective name" not in args
    # a kernel without an Ascend name shows the op's; the total is as uncertain as its weakest part
    args = slice_args(attention, (1,))
    assert args["kernel_type"] == "BatchMatMulV2;mla_sparse_attention"
    assert (args["cost_us"], args["cost_source"], args["cost_bound"]) == (8.0, "analytic", "memory")
    assert args["flops"] == 1192.0


def test_sources_and_kernels() -> None:
    assert cost_args([cost(1, source="measured"), cost(1, source="interpolated")])["cost_source"] == "interpolated"
    args = kernel_args(ABSORB, cost(3))
    assert args["sizes"] == {"m": 8, "k": 2, "n": 3, "batch": 2}
    assert (args["family"], args["dtype"], args["cost_us"]) == ("matmul", "bfloat16", 3.0)
    assert micros(1.23456789e-3) == 1234.568


def test_a_slice_of_tokens_is_no_collective() -> None:
    cut = record(1, "slice", "m", [tensor([8, 6])], [tensor([4, 6], "local-token")], group="tp")
    piece = hand_run().timelines[0].slices[0][0]
    args = slice_args(type(piece)(0, "compute", 0.0, US, 0.0, cut, 0), (0,))
    assert "Collective name" not in args
    assert args["kernel_type"] == "slice"
