"""Dense MLP and mixture of experts, as single-device modules; names follow the HF checkpoint.

Legend: T tokens, D hidden, E experts, k experts per token, I expert width.
"""

from torch import Tensor, nn

from emulator.model.config import ModelConfig
from emulator.model.layers import Linear, ops, parameter
from emulator.ops.moe import GROUPED_QUANTISED


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Gate(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = parameter(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = parameter(config.n_routed_experts)

    def forward(self, x: Tensor) -> Tensor:
        return ops.moe_gate(x, self.weight)


class TopK(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def forward(self, logits: Tensor, bias: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        weights, ids = ops.moe_topk(
            logits, bias, token_mask, c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob,
            c.routed_scaling_factor,
        )  # fmt: skip
        return weights, ids


class Dispatch(nn.Module):
    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, counts, order = ops.moe_dispatch(x, ids, self.num_experts)
        return rows, counts, order


class GroupedLinear(nn.Module):
    quantisable = True

    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = parameter(num_experts, out_features, in_features)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        quantised = [getattr(self, name) for name in GROUPED_QUANTISED if name in self._parameters]
        return ops.grouped_matmul(rows, self.weight, counts, *quantised)


class Combine(nn.Module):
    def forward(self, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_combine(rows, order, weights)


class Experts(nn.Module):
    """Routed experts: gate_up_proj.weight [E, 2I, D] holds gate rows then up rows, down_proj.weight [E, D, I]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.dispatch = Dispatch(experts)
        self.gate_up_proj = GroupedLinear(experts, hidden, 2 * width)
        self.down_proj = GroupedLinear(experts, width, hidden)
        self.combine = Combine()

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rows, counts, order = self.dispatch(x, ids)
        rows = ops.swiglu(self.gate_up_proj(rows, counts))
        return self.combine(self.down_proj(rows, counts), order, weights)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate, self.topk, self.experts = Gate(config), TopK(config), Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor, token_mask: Tensor) -> Tensor:
        weights, ids = self.topk(self.gate(x), self.gate.e_score_correction_bias, token_mask)
        return ops.add(self.experts(x, weights, ids), self.shared_experts(x))
