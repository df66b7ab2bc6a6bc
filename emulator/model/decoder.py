"""One decoder layer: attention and MLP between fused add + norm steps."""

from torch import Tensor, nn

from emulator.model.attention import Attention
from emulator.model.config import ModelConfig
from emulator.model.layers import Batch, ProgramOptions, RMSNorm
from emulator.model.mlp import MLP, MoE


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, options: ProgramOptions):
        super().__init__()
        self.is_moe = config.is_moe(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if self.is_moe else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, residual: Tensor | None, ids: Tensor | None, inv_freq: Tensor, batch: Batch):
        """(x, residual) with hidden state = x + residual -> (MLP output, residual, top-k ids or None)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, ids = self.self_attn(x, ids, inv_freq, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x, batch.token_mask) if self.is_moe else self.mlp(x), residual, ids
