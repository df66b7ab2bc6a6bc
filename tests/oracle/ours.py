"""The Program of a checkpoint that HF wrote: whole, through the traced graph, or one eager layer at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulator.model.batch import Request
from emulator.model.config import ModelConfig, parse_config
from emulator.model.layers import Batch, ProgramOptions
from emulator.model.program import CausalLM, build_program
from emulator.model.weights import Checkpoint, weight_groups
from emulator.model.workload import build_workload
from emulator.ops.registry import op_name
from emulator.verify.reference import run_reference

_program = cache(build_program)  # tracing costs more than a run at these sizes


@dataclass(frozen=True)
class LayerValues:
    """hidden: the layer's output [T, D]; ids: the top-k that it used, int32 [T, K], -1 for none."""

    hidden: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Ours:
    """Our model with a checkpoint's weights. config, options and weights can be replaced to make it wrong."""

    config: ModelConfig
    dtype: torch.dtype
    weights: dict[str, Tensor]
    options: ProgramOptions = field(default_factory=ProgramOptions)

    @classmethod
    def load(cls, config: dict[str, Any], folder: Path, dtype: torch.dtype) -> "Ours":
        parsed = parse_config(config, "test")
        groups = weight_groups(build_program(parsed), Checkpoint(folder), dtype)
        return cls(parsed, dtype, {name: tensor for group in groups for name, tensor in group.items()})

    def changed(self, **config: Any) -> "Ours":
        """The same weights under another config."""
        return replace(self, config=self.config.model_copy(update=config))

    def batch(self, input_ids: Tensor, *lengths: int) -> Batch:
        """Prefill requests of these lengths (default: one) over empty caches, in blocks dealt out in random order."""
        requests = [Request(n) for n in lengths or (len(input_ids),)]
        made = build_workload(
            self.config, [requests], seed=7, dp_index=0, dtype=self.dtype, block_size=self.options.block_size
        )
        return replace(made.steps[0], input_ids=input_ids)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits [T, vocab] of the traced graph."""
        return self.run(self.batch(input_ids))[0]

    def run(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The traced graph: (logits [T, vocab], top-k ids of every layer that has an indexer). Writes the caches."""
        program = _program(self.config, self.options)
        [output] = program.graph.output_node().all_input_nodes
        topk = [node.name for node in program.graph.nodes if op_name(node.target) == "dsa_indexer_topk"]
        inputs = {f.name: getattr(batch, f.name) for f in fields(batch)}
        values = run_reference(program, self.weights, inputs, keep={output.name, *topk})
        return values[output.name], [values[name] for name in topk]

    def layers(self, input_ids: Tensor, hidden: list[Tensor] | None = None) -> Iterator[LayerValues]:
        """Each decoder layer, run eagerly. hidden: the input of each layer; without it, a layer's output is the next
        one's input. The top-k of a layer without indexer is always our own."""
        root = CausalLM(self.config, self.options)
        root.load_state_dict(self.weights, assign=True)
        batch, ids, residual = self.batch(input_ids), None, None
        with torch.no_grad():
            x = root.model.embed_tokens(input_ids)
            for i, layer in enumerate(root.model.layers):
                if hidden is not None:
                    x, residual = hidden[i], None
                x, residual, ids = layer(x, residual, ids, root.model.rotary_emb.inv_freq, batch)
                yield LayerValues(x + residual, ids)
