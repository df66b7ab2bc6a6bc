"""What the model's modules are made of: the batch, options, parameters, linear and norm over the op vocabulary.

The modules of this folder know nothing of ranks. They run eagerly and are traced into the Program.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.model.config import HF_LATENT_NORM_EPS
from emulator.ops.linear import QUANTISED

ops = torch.ops.emulator


@dataclass(frozen=True)
class Batch:
    """What a step works on. Packed rows (TND): request i owns the next query_lens[i] rows.

    input_ids, positions, slots: int64 [T]; token_mask: bool [T]; query_lens, kv_lens: int64 [requests], kv_lens
    counting the request's own queries; block_table: int64 [requests, blocks]; latent_caches: per layer [S, R+r];
    index_caches: per layer [S, d]. next_ids: int64 [T], the token after each of input_ids in its request; only the
    multi-token-prediction layer reads them.
    """

    input_ids: Any
    positions: Any
    slots: Any
    token_mask: Any
    query_lens: Any
    kv_lens: Any
    block_table: Any
    latent_caches: Any
    index_caches: Any
    next_ids: Any = None


@dataclass(frozen=True)
class ProgramOptions:
    """latent_norm_eps: eps of q_a/kv_a_layernorm, None = the config's (engines), default HF's fixed 1e-6.
    block_size: slots per block of the paged caches. quant: scheme of the weights (profiles/quant). attention: what
    attention multiplies, whatever the weights are: the run's dtype, or (dense MLA only) int8 codes. mtp: whether the
    model's multi-token-prediction layer runs behind it."""

    latent_norm_eps: float | None = HF_LATENT_NORM_EPS
    block_size: int = 16
    quant: str = "none"
    attention: Literal["float", "int8"] = "float"
    mtp: bool = False


def parameter(*shape: int, unit: int = 1) -> nn.Parameter:
    """A meta parameter. unit: features that must stay on one rank when it is split (a head's width)."""
    made = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    made.shard_unit = unit  # type: ignore[attr-defined]
    return made


class Linear(nn.Module):
    """Its weights are a set: float, or quantised codes with their scales; the op is the same."""

    quantisable = True

    def __init__(self, in_features: int, out_features: int, bias: bool = False, unit: int = 1):
        super().__init__()
        self.weight = parameter(out_features, in_features, unit=unit)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, *self.quantised())

    def quantised(self) -> list[Tensor]:
        """The tensors beside a quantised weight, in the op's order; none of a float one."""
        return [getattr(self, name) for name in QUANTISED if name in self._parameters]


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.weight = parameter(vocab, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)


class LMHead(Linear):
    quantisable = False

    def forward(self, x: Tensor) -> Tensor:
        return ops.lm_head(x, self.weight)


class RMSNorm(nn.Module):
    """rms_norm; with a residual, add_rms_norm2 -> (normed, new residual)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps)
        normed, total = ops.add_rms_norm2(x, residual, self.weight, self.eps)
        return normed, total


class FinalNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None):
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
