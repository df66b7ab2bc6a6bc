"""A tiny DSA config and checkpoints written for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 20, "hidden_size": 12, "intermediate_size": 10,
    "moe_intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 3, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 7, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 5, "index_topk": 3, "index_n_heads": 2, "index_head_dim": 4,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Content of a config.json with every field that a model of an unknown type must give."""
    return dict(TINY)


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """save_checkpoint(tensors, name="checkpoint") -> its folder, with one model.safetensors."""

    def save(tensors: dict[str, Tensor], name: str = "checkpoint") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        return folder

    return save


@pytest.fixture
def numbered() -> Callable[..., Tensor]:
    """numbered(*shape, start=0): distinct whole numbers, so that a row in the wrong place shows."""

    def make(*shape: int, start: int = 0) -> Tensor:
        return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)

    return make
