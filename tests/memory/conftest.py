"""Ledgers of the profiles' models, each built once per session."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from emulator.layout.plan import plan_for
from emulator.memory.ledger import Ledger, Settings, build_ledger
from emulator.memory.parameters import raw_sizes
from emulator.memory.rules import load_accounting
from emulator.model.config import load_config, model_folder
from emulator.model.quantisation import load_scheme
from emulator.runtime.mesh import Mesh

MakeLedger = Callable[..., Ledger]


@pytest.fixture(scope="session")
def ledger_of() -> MakeLedger:
    """ledger_of(model, plan, rules=, quant=, tp=, dp=1, ep=, phase="prefill", dtype=bfloat16, config={}, **settings and
    variants)"""

    @cache
    def make(
        model: str, plan: str, rules: str, quant: str, sizes: tuple[int, ...], phase: str, dtype: torch.dtype,
        mtp: int, nz: bool, rank: int, layers: int | None, config: tuple, variants: tuple,
    ) -> Ledger:  # fmt: skip
        tp, dp, ep = sizes
        return build_ledger(
            Settings(
                config=load_config(model).with_layers(layers).model_copy(update=dict(config)),
                plan=plan_for(plan, dict(variants), phase),
                mesh=Mesh(tp=tp, dp=dp, ep=ep), scheme=load_scheme(quant), rules=load_accounting(rules),
                names=(quant, rules), dtype=dtype, mtp_layers=mtp, nz=nz, rank=rank,
                sizes=raw_sizes(model_folder(model)),
            )
        )  # fmt: skip

    def call(
        model: str, plan: str, *, rules: str, quant: str, tp: int, dp: int = 1, ep: int, phase: str = "prefill",
        dtype: torch.dtype = torch.bfloat16, mtp: int = 0, nz: bool = False, rank: int = 0,
        layers: int | None = None,
        config: dict[str, Any] | None = None, **variants: str,
    ) -> Ledger:  # fmt: skip
        return make(
            model, plan, rules, quant, (tp, dp, ep), phase, dtype, mtp, nz, rank, layers,
            tuple(sorted((config or {}).items())), tuple(sorted(variants.items())),
        )  # fmt: skip

    return call
