"""Quantised weights against float ones: ranges of activations for static scales, which linears ranks run in shards, and
how far every quantised product may be, and is, from that of the dequantised weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Shard

from emulator.layout.rank_graph import RankGraph
from emulator.model.program import Program, build_program
from emulator.model.quantised import Range
from emulator.ops.linear import QUANTISED, any_linear
from emulator.ops.quantised import dequantised, row_codes, unpack_int4
from emulator.ops.registry import OPS, compute_dtype, op_name
from emulator.verify.choices import choices_of
from emulator.verify.reference import run_reference

_TOPK_QUANTISED = OPS["dsa_indexer_topk"].argument_names.index(QUANTISED[0])


def float_program(program: Program) -> Program:
    """The same Program with float weights; its computed nodes have the same names."""
    return build_program(program.config, replace(program.options, quant="none"))


def dequantised_weights(program: Program, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float Program's weights: what the codes stand for, in the run's dtype."""
    dtype = weights["model.norm.weight"].dtype
    made = {n: w for n, w in weights.items() if n.rpartition(".")[0] not in program.quantised or n.endswith(".bias")}
    for module in program.quantised:
        parts = (weights[f"{module}.{leaf}"] for leaf in ("weight", *QUANTISED[:2]))
        made[f"{module}.weight"] = _meant(*parts).to(dtype)
    return made


def _meant(weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The float weight [..., O, I]."""
    return dequantised(unpack_int4(weight) if weight.shape[-2] != scale.shape[-2] else weight, scale, offset)


def input_ranges(
    program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Any], modules: list[str]
) -> dict[str, Range]:
    """Smallest and largest value of the inputs of these modules in a run of a float Program."""
    wanted, found = set(modules), {}

    def observe(node: fx.Node, args: tuple, value: Any) -> None:
        for operand in node.all_input_nodes:
            module = str(operand.target).removesuffix(".weight") if operand.op == "get_attr" else ""
            if module in wanted and operand.target == f"{module}.weight":
                found[module] = float(args[0].min()), float(args[0].max())

    run_reference(program, weights, inputs, keep=set(), observe=observe)
    return found


def row_parallel(rank_graph: RankGraph) -> dict[str, int]:
    """Program nodes of the dynamically quantised linears whose in-features the ranks cut -> number of shards. There
    every rank scales its own part of a row, so the codes are not those of the whole row."""
    found = {}
    for node in rank_graph.graph.nodes:
        if op_name(node.target) != "linear" or node.meta["origin"] is None or not _is_dynamic(node):
            continue
        cut = [axis for axis, p in node.args[1].meta["layout"].placements if p == Shard(1)]
        if cut:
            found[node.meta["origin"]] = rank_graph.sizes[cut[0]]
    return found


def _is_dynamic(node: fx.Node) -> bool:
    return 4 < len(node.args) <= 5  # x, weight, bias, weight_scale, weight_offset


@dataclass
class QuantisationError:
    """products: quantised products compared; worst: the largest error in bounds, and where it is; logits: the largest
    difference of the logits to a run with dequantised weights and float activations, in parts of the largest one."""

    products: int = 0
    worst: float = 0.0
    module: str = ""
    logits: float = 0.0

    def meet(self, module: str, ratio: float) -> None:
        self.products += 1
        if not ratio <= self.worst:
            self.worst, self.module = ratio, module


def quantisation_error(
    program: Program, weights: Mapping[str, Tensor], inputs: tuple[Mapping[str, Any], Mapping[str, Any]],
    in_shards: Mapping[str, int],
) -> QuantisationError:  # fmt: skip
    """Runs the reference with a look at every quantised product, and the float Program with dequantised weights on the
    same discrete choices. inputs: of the two runs; their caches are written."""
    error = QuantisationError()

    def observe(node: fx.Node, args: tuple, value: Any) -> None:
        name = op_name(node.target)
        if name == "dsa_indexer_topk":  # its query projection is a linear inside the op
            q_resid, _, wq_b = args[:3]
            name, args = "linear", (q_resid, wq_b, None, *args[_TOPK_QUANTISED:])
            value = any_linear(*args)
        if name in ("linear", "grouped_matmul"):
            ratio = product_error(name, args, value, in_shards.get(node.name, 1))
            if ratio is not None:
                error.meet(node.meta["module"], ratio)

    last = program.graph.output_node().all_input_nodes[0].name
    keep = {last} | choices_of(program.graph)
    found = run_reference(program, weights, inputs[0], keep=keep, in_shards=in_shards, observe=observe)
    other = run_reference(
        float_program(program), dequantised_weights(program, weights), inputs[1], keep={last}, force=found
    )
    scale = float(other[last].abs().max()) if other[last].numel() else 0.0
    error.logits = float((found[last] - other[last]).abs().max()) / scale if scale else 0.0
    return error


def product_error(name: str, args: tuple, value: Tensor, num_shards: int = 1) -> float | None:
    """The largest error of a quantised product in units of its bound, against the product of its float input and the
    dequantised weight; None of a float one, or of no rows. name: linear or grouped_matmul, args: its operands."""
    given = dict(zip(OPS[name].argument_names, args))
    if given.get("weight_scale") is None:
        return None
    x, weight = args[0].double(), _meant(args[1], args[3], args[4]).double()
    bias = given.get("bias")
    if name == "linear":
        ratios = [_ratio(x, weight, value if bias is None else value - bias, given, num_shards, args[0].dtype)]
    else:
        experts = torch.arange(weight.shape[0]).repeat(args[2].shape[0]).repeat_interleave(args[2].flatten())
        chosen = [(e, experts == e) for e in experts.unique().tolist()]
        ratios = [_ratio(x[rows], weight[e], value[rows], given, 1, args[0].dtype) for e, rows in chosen]
    return max((r for r in ratios if r is not None), default=None)


def _ratio(
    x: Tensor, weight: Tensor, value: Tensor, given: Mapping[str, Any], num_shards: int, dtype: torch.dtype
) -> float | None:
    """Every in-feature's code is off by e_i: half a scale, or what clipping takes away. So the product is off by at
    most sum_i e_i |W_oi|, and by the rounding of its sums and scales: eps (I + 8) sum_i |x_i W_oi|."""
    if not value.numel():
        return None
    eps = torch.finfo(compute_dtype(torch.empty(0, dtype=dtype))).eps
    if given.get("deq_scale") is not None or given.get("scale_bias") is not None:
        eps = max(eps, torch.finfo(torch.float32).eps)  # these are held in float32, whatever the run's dtype
    off = _off(x, given, num_shards)
    reach = (x.abs() + off) @ weight.abs().t()
    bound = off @ weight.abs().t() + eps * (x.shape[1] + 8) * reach + torch.finfo(dtype).eps * value.double().abs()
    error = (value.double() - x @ weight.t()).abs()
    return float((error / bound.clamp(min=torch.finfo(torch.float64).tiny)).max())


def _off(x: Tensor, given: Mapping[str, Any], num_shards: int) -> Tensor:
    """e [T, I]: how far an input may be from what its code stands for."""
    if given.get("input_scale") is None:
        scales = [(row_codes(part)[1] / 2).expand_as(part) for part in x.chunk(num_shards, 1)]
        return torch.cat(scales, 1)
    scale, offset = given["input_scale"].double(), given["input_offset"].double()
    low, high = (-128 - offset) * scale, (127 - offset) * scale
    return torch.maximum((x - x.clamp(low, high)).abs(), scale / 2)
