"""Multi-token prediction (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2): one decoder layer that predicts
the token after the next. Module names are those of the checkpoint's model.layers.{num_hidden_layers}.

Legend: T tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn

from emulator.model.config import ModelConfig
from emulator.model.decoder import DecoderLayer
from emulator.model.layers import Batch, Embedding, FinalNorm, Linear, LMHead, ProgramOptions, RMSNorm


class SharedHead(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.head(self.norm(x, residual))


class MTPLayer(DecoderLayer):
    """A decoder layer behind its own embedding, two norms and the projection that joins token and hidden state."""

    def __init__(self, config: ModelConfig, layer: int, options: ProgramOptions):
        super().__init__(config, layer, options)
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.enorm, self.hnorm = RMSNorm(hidden, config.rms_norm_eps), RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = SharedHead(config)

    def forward(self, hidden: Tensor, inv_freq: Tensor, batch: Batch) -> Tensor:  # type: ignore[override]
        """hidden [T, D], as the model hands it to lm_head behind its final norm -> logits [T, V]. Row t joins the
        hidden state of token t with the embedding of its successor, embedding first, and keeps the position, slot and
        lengths of token t in a KV cache of the layer's own."""
        joined = torch.cat((self.enorm(self.embed_tokens(batch.next_ids)), self.hnorm(hidden)), -1)
        x, residual, _ = super().forward(self.eh_proj(joined), None, None, inv_freq, batch)
        return self.shared_head(x, residual)
