"""Region markers change nothing: neither values nor shapes nor layouts."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from emulator.ops.region import MARKERS
from emulator.ops.registry import OPS

ops = torch.ops.emulator


def test_rule_kernel_and_fake_of_markers() -> None:
    placements = (Replicate(), Shard(0), Partial("sum"))
    values = [torch.randn(3, 5), torch.arange(4)]
    numbers = {"region_begin": (3, 75), "copy_region": (4,), "region_end": ()}
    assert set(MARKERS) == set(numbers)
    assert not set(MARKERS) & set(OPS)  # no rank executes one
    for name, marker in MARKERS.items():
        assert marker.rule(placements) == placements
        op = getattr(ops, name)
        out = op(values, *numbers[name])
        assert all(torch.equal(a, b) for a, b in zip(out, values, strict=True))
        with FakeTensorMode() as mode:
            fake = op([mode.from_tensor(v) for v in values], *numbers[name])
        assert [(f.shape, f.dtype) for f in fake] == [(v.shape, v.dtype) for v in values]
        torch.library.opcheck(op.default, (values, *numbers[name]), test_utils=("test_schema", "test_faketensor"))
