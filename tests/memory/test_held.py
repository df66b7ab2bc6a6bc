"""Stored bytes, fractal rounding, and the peak while weights are processed, all by hand."""

import pytest
import torch

from emulator.memory.held import Held, Unit, peak_bytes, stored_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "plain", "blocks"),
    [
        ((17, 33), torch.int8, 561, 32 * 64),  # blocks of 16 x 32
        ((17, 33), torch.bfloat16, 1122, 32 * 48 * 2),  # blocks of 16 x 16
        ((3, 16, 5), torch.int32, 960, 3 * 16 * 8 * 4),  # packed 4-bit: 8 integers are 32 bytes
        ((2, 16, 32), torch.int8, 1024, 1024),  # whole blocks already
        ((17, 33), torch.float32, 2244, 2244),  # has no NZ form
        ((33,), torch.bfloat16, 66, 66),  # nor has a vector
    ],
)
def test_nz_rounds_the_last_two_dims_to_blocks(shape, dtype, plain, blocks):
    assert stored_bytes(shape, dtype) == plain
    assert stored_bytes(shape, dtype, nz=True) == blocks


def _held(name: str, size: int, replaces: str | None = None) -> Held:
    return Held(name, "m", "c", 0, (size,), "int8", size, "replicated", "checkpoint_weight", "r", replaces)


def test_the_peak_holds_a_loaded_tensor_beside_all_that_replace_it():
    split = Unit(loading=(_held("kv", 10),), made=(_held("uv", 6, "kv"), _held("uk", 4, "kv")))
    assert peak_bytes([split]) == 20
    # the second layer's kv is still loaded when the first is split: 20 + 6 + 4, then 20 again
    other = Unit(loading=(_held("kv2", 10),), made=(_held("uv2", 6, "kv2"), _held("uk2", 4, "kv2")))
    assert peak_bytes([split, other]) == 30


def test_what_is_freed_first_lowers_the_peak():
    # 100 loaded, + 50 copy = 150, - 100 freed = 50, + 60 = 110: the peak is at the first step
    unit = Unit(loading=(_held("a", 100),), made=(_held("b", 50, "a"), _held("c", 60)))
    assert peak_bytes([unit]) == 150
    # made in the other order, both copies stand beside the loaded one
    unit = Unit(loading=(_held("a", 100),), made=(_held("c", 60), _held("b", 50, "a")))
    assert peak_bytes([unit]) == 210


def test_without_processing_the_peak_is_what_is_loaded():
    assert peak_bytes([Unit(always=(_held("a", 7),)), Unit(always=(_held("b", 5),))]) == 12
