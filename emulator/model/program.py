"""The Program: one single-device torch.fx graph of a DSA model. No ranks, no collectives, named modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, fx, nn

from emulator.errors import UsageError
from emulator.model.config import ModelConfig
from emulator.model.decoder import DecoderLayer
from emulator.model.layers import Batch, Embedding, FinalNorm, LMHead, ProgramOptions, parameter
from emulator.model.mtp import MTPLayer
from emulator.model.quantised import QuantisedModule, quantise_modules
from emulator.model.structure import has_dsa_structure

BATCH_INPUTS = tuple(f.name for f in fields(Batch))


class RotaryEmbedding(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.inv_freq = parameter(config.qk_rope_head_dim // 2)


class Backbone(nn.Module):
    """`model.*` of the checkpoint: embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, options: ProgramOptions):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, i, options) for i in range(config.num_hidden_layers))
        self.num_layers = config.num_hidden_layers
        if options.mtp:
            self.layers.append(MTPLayer(config.with_mtp_layers(1), config.num_hidden_layers, options))
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        x, residual, ids = self.embed_tokens(batch.input_ids), None, None
        for layer in self.layers[: self.num_layers]:
            x, residual, ids = layer(x, residual, ids, self.rotary_emb.inv_freq, batch)
        return self.norm(x, residual)


class CausalLM(nn.Module):
    """Token ids and a batch description -> logits [T, vocab] of every row."""

    def __init__(self, config: ModelConfig, options: ProgramOptions):
        super().__init__()
        self.model = Backbone(config, options)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)

    def forward(
        self, input_ids, positions, slots, token_mask, query_lens, kv_lens, block_table, latent_caches, index_caches
    ):
        batch = Batch(
            input_ids, positions, slots, token_mask, query_lens, kv_lens, block_table, latent_caches, index_caches
        )
        return self.lm_head(self.model(batch))


class CausalLMWithMTP(CausalLM):
    """The same, and the multi-token-prediction layer behind it: (logits of the next token, of the one after it).

    The layer's inputs are the hidden states that lm_head gets, behind the final norm, and next_ids [T], each token's
    successor in its request."""

    def forward(  # type: ignore[override]
        self, input_ids, positions, slots, token_mask, query_lens, kv_lens, block_table, latent_caches, index_caches,
        next_ids,
    ):  # fmt: skip
        batch = Batch(
            input_ids, positions, slots, token_mask, query_lens, kv_lens, block_table, latent_caches, index_caches,
            next_ids,
        )  # fmt: skip
        hidden = self.model(batch)
        logits = self.lm_head(hidden)
        return logits, self.model.layers[-1](hidden, self.model.rotary_emb.inv_freq, batch)


@dataclass(frozen=True)
class Program:
    """graph: nodes carry meta["module"], the qualified module name; parameters: name -> shape (meta tensors).
    modules: every module name, containers included. quantised: modules whose weights are codes."""

    config: ModelConfig
    options: ProgramOptions
    graph: fx.Graph
    parameters: dict[str, Tensor]
    modules: tuple[str, ...]
    quantised: Mapping[str, QuantisedModule] = field(default_factory=dict)

    @property
    def whole_config(self) -> ModelConfig:
        """The config with the MTP layer, if there is one, among its layers: each has caches."""
        return self.config.with_mtp_layers(int(self.options.mtp))


class _ModuleTracer(fx.Tracer):
    """Enters every module and notes on each node the module whose forward made it."""

    def __init__(self, root: nn.Module):
        super().__init__()
        self._names = {id(module): name for name, module in root.named_modules()}
        self._parameters = {id(p): name for name, p in root.named_parameters()}
        self._proxies: dict[str, fx.Proxy] = {}
        self._stack = [""]

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        return False

    def path_of_module(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def call_module(self, module: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        self._stack.append(self._names[id(module)])
        try:
            return forward(*args, **kwargs)
        finally:
            self._stack.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, nn.Parameter):
            return attr_val
        name = self._parameters[id(attr_val)]
        if name not in self._proxies:
            self._proxies[name] = self.create_proxy("get_attr", name, (), {})
            self._proxies[name].node.meta["module"] = name.rpartition(".")[0]
        return self._proxies[name]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["module"] = self._stack[-1]
        return node


def build_program(config: ModelConfig, options: ProgramOptions | None = None) -> Program:
    """Traces the model into its single-device graph. Costs no weight memory: parameters are meta tensors.

    Raises UsageError for an unknown quantisation scheme, one that quantises what only runs in float, and int8 attention
    of a model that attends sparsely.
    """
    options = options or ProgramOptions()
    if options.attention != "float" and has_dsa_structure(config):
        raise UsageError(
            f"attention {options.attention}: sparse attention takes float inputs, only dense MLA has int8 ones"
        )
    root = CausalLMWithMTP(config, options) if options.mtp else CausalLM(config, options)
    quantised = quantise_modules(root, options.quant)
    graph = _ModuleTracer(root).trace(root)
    names = tuple(name for name, _ in root.named_modules() if name)
    return Program(config, options, graph, dict(root.named_parameters()), names, quantised)
