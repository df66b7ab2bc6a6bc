"""Linear layers whose weight lies over a tensor-parallel group, for hand-written rank code (public as emulator.nn).

Legend: T tokens (dim 0 of every value), I in_features, O out_features, tp the number of ranks a weight is split over.

Both layers compute x W^T + b, forward only (results carry no gradient), and read their flags alike:

disable_tp=True: the weight is not split over `group`. The layer holds it whole and makes no collective, as if it had no
group: rows [T, I] in, rows [T, O] out, full-token or local-token alike. What other flags ask for then holds by itself
(gather_output, reduce="all_reduce", slice_input_by_last_dim: a whole weight takes and gives all features) or is off
(gather_slice_data). One cannot hold and is refused: reduce="reduce_scatter", which is what would cut the tokens.

gather_slice_data (read only): on when the weight is split over other ranks than those of `global_group`, which hold the
same tokens around the layer, say tp 1 in attention and tp 4 in the MLP. Each rank then takes its share of the tokens in
global_group (zero rows at the end where it does not divide), `group` gathers the shares of its ranks, and results go
back the same way. All ranks of both groups bring equally many rows. Off for a whole weight.

Sources: RFC section 3.4; disable_tp and slice_input_by_last_dim mean what they do in vLLM (there: not
input_is_parallel) and TensorCast. A group of None is no group, not all ranks.
"""

from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from emulator.errors import UsageError
from emulator.layout.placement import Tokens

Reduce = Literal["all_reduce", "reduce_scatter", "none"]


class _ParallelLinear(nn.Module):
    """What both layers share.

    weight, bias: this rank's part, NaN until loaded. tp_size, tp_rank: over how many ranks the weight is split, and
    this rank's place among them; 1 and 0 for a whole weight (no group, a group of one, disable_tp).
    """

    split_dim: int  # of the weight [O, I]

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: Any, global_group: Any, disable_tp: bool
    ):
        super().__init__()
        self.in_features, self.out_features, self.disable_tp = in_features, out_features, disable_tp
        self.group = self._member_of(group, "group")
        self.global_group = self.group if global_group is None else self._member_of(global_group, "global_group")
        split = self.group is not None and not disable_tp
        self.tp_size: int = self.group.size() if split else 1
        self.tp_rank: int = self.group.rank() if split else 0
        self.gather_slice_data = self.tp_size > 1 and _members(self.group) != _members(self.global_group)
        shape = [out_features, in_features]
        self._divide(shape[self.split_dim], "in_features" if self.split_dim else "out_features", self.tp_size)
        shape[self.split_dim] //= self.tp_size
        self.weight = _unloaded(*shape)
        self.bias = _unloaded(shape[0]) if bias else None

    @classmethod
    def from_full(cls, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Self:
        """A layer with this rank's part of a whole weight [O, I] and bias [O], in the weight's dtype and on its device.

        options: group, disable_tp and the other keyword arguments of the class, but bias. Errors as load_full.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise UsageError(
                f"{cls.__name__}: the weight is {weight.dtype} {list(weight.shape)}; expected floating point "
                "[out_features, in_features]"
            )
        layer = cls(weight.shape[1], weight.shape[0], bias=bias is not None, **options)
        layer.to(weight.device, weight.dtype)
        layer.load_full(weight, bias)
        return layer

    @torch.no_grad()
    def load_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copies this rank's part of a whole weight [O, I] and bias [O] (as in an HF checkpoint) into the layer.

        Raises UsageError for other shapes, for integers (a quantised weight needs its scales), and for a bias where the
        layer has none or the reverse.
        """
        if (bias is None) != (self.bias is None):
            raise UsageError(
                f"{self._name}: made with bias={self.bias is not None}, loaded with bias {bias is not None}"
            )
        for name, full, shape in (
            ("weight", weight, [self.out_features, self.in_features]),
            ("bias", bias, [self.out_features]),
        ):
            if full is not None and (list(full.shape) != shape or not full.is_floating_point()):
                raise UsageError(
                    f"{self._name}: the {name} is {full.dtype} {list(full.shape)}; expected the whole one, floating "
                    f"point {shape}"
                )
        self.weight.copy_(self._own(weight, self.split_dim))
        if self.bias is not None and bias is not None:
            self.bias.copy_(self._own(bias, 0) if self.split_dim == 0 else bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"tp_size={self.tp_size}, disable_tp={self.disable_tp}"
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _member_of(self, group: Any, name: str) -> Any:
        if group is None or isinstance(group, dist.ProcessGroup):
            return group
        given = "a group without this rank" if group == dist.GroupMember.NON_GROUP_MEMBER else repr(group)
        raise UsageError(f"{self._name}: {name} is {given}; expected a process group of this rank, or None for none")

    def _divide(self, features: int, name: str, ranks: int) -> None:
        if features % ranks:
            raise UsageError(
                f"{self._name}: {name} {features} cannot be split evenly over {ranks} ranks; choose a multiple, or "
                "disable_tp=True for a whole weight"
            )

    def _check_input(self, x: Tensor, features: int, meaning: str) -> None:
        if x.dim() < 2 or x.shape[-1] != features:
            raise UsageError(f"{self._name}: the input is {list(x.shape)}; expected [tokens, {features}], {meaning}")

    def _own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of a dim that all ranks of the layer share."""
        size = x.shape[dim] // self.tp_size
        return x.narrow(dim, self.tp_rank * size, size)

    def _group_tokens(self, x: Tensor) -> Tensor:
        """Tokens of global_group -> those that `group` works on (gather_slice_data)."""
        size, index = self.global_group.size(), self.global_group.rank()
        tokens = Tokens(x.shape[0], size)
        return _gather_tokens(_padded(x, tokens).narrow(0, index * tokens.per, tokens.per), self.group)

    def _global_tokens(self, x: Tensor, real: int) -> Tensor:
        """The reverse of _group_tokens."""
        return _gather_tokens(self._own(x, 0), self.global_group)[:real]


class ColumnParallelLinear(_ParallelLinear):
    """Holds O/tp rows of the weight: [T, I] on every rank -> [T, O/tp] (shard(1)), no collective.

    gather_output: all_gather of the features -> [T, O]. disable_tp: whole weight, [T, O], no collective.
    global_group: see gather_slice_data above; its output has all features.
    Raises UsageError when tp does not divide out_features, and for an input of another width.
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group: Any = None,
        disable_tp: bool = False,
        gather_output: bool = False,
        global_group: Any = None,
    ):
        super().__init__(
            in_features, out_features, bias=bias, group=group, global_group=global_group, disable_tp=disable_tp
        )
        self.gather_output = gather_output

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, self.in_features, "all features")
        real = x.shape[0]
        if self.gather_slice_data:
            x = self._group_tokens(x)
        y = F.linear(x, self.weight, self.bias)
        if self.tp_size > 1 and (self.gather_output or self.gather_slice_data):
            y = _gather_features(y, self.group)
        return self._global_tokens(y, real) if self.gather_slice_data else y


class RowParallelLinear(_ParallelLinear):
    """Holds I/tp columns of the weight: shard(1) input [T, I/tp] -> sum over the ranks [T, O].

    slice_input_by_last_dim: the input is [T, I] on every rank and the layer cuts the features that its part of the
    weight takes: all of them when the weight is whole. It never changes what is held.
    reduce: "all_reduce" -> [T, O] on every rank; "reduce_scatter" -> local-token [n, O], n = ceil(T/tp), rows past the
    last token zero; "none" -> this rank's part of the sum.
    disable_tp: whole weight, [T, I] -> [T, O], no collective.
    The bias is whole on every rank and added on tp_rank 0, so that it is in each of these sums once.
    global_group: see gather_slice_data above. Without slice_input_by_last_dim the input's features are split over
    global_group; "reduce_scatter" gives local-token rows of global_group.
    Raises UsageError when tp does not divide in_features, for an unknown reduce, for "reduce_scatter" with disable_tp,
    for "none" with gather_slice_data (rows of an open sum cannot go back), and for an input of another width.
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group: Any = None,
        disable_tp: bool = False,
        slice_input_by_last_dim: bool = False,
        reduce: Reduce = "all_reduce",
        global_group: Any = None,
    ):
        super().__init__(
            in_features, out_features, bias=bias, group=group, global_group=global_group, disable_tp=disable_tp
        )
        self.slice_input_by_last_dim, self.reduce = slice_input_by_last_dim, reduce
        if reduce not in get_args(Reduce):
            raise UsageError(f"{self._name}: reduce {reduce!r} unknown (allowed: {', '.join(get_args(Reduce))})")
        if reduce == "reduce_scatter" and disable_tp and self.group is not None and self.group.size() > 1:
            raise UsageError(
                f"{self._name}: reduce='reduce_scatter' with disable_tp=True: a whole weight gives no partial sums to "
                "scatter; cut the tokens before the layer and take reduce='none'"
            )
        if reduce == "none" and self.gather_slice_data:
            raise UsageError(
                f"{self._name}: reduce='none' with a global_group of other ranks: parts of a sum cannot go back to the "
                "tokens around the layer; reduce here"
            )
        if self.gather_slice_data and not slice_input_by_last_dim:
            self._divide(in_features, "in_features", self.global_group.size())

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        real = x.shape[0]
        x = self._own_features(x)
        y = F.linear(x, self.weight, self.bias if self.tp_rank == 0 else None)
        if self.tp_size == 1 or self.reduce == "none":
            return y
        if self.reduce == "reduce_scatter":
            return _reduce_scatter_tokens(y, self.group)
        dist.all_reduce(y, group=self.group)
        return self._global_tokens(y, real) if self.gather_slice_data else y

    def _own_features(self, x: Tensor) -> Tensor:
        """The input's features that this rank's part of the weight takes, of the tokens that `group` works on."""
        if self.slice_input_by_last_dim or self.tp_size == 1:
            self._check_input(x, self.in_features, "all features")
        else:
            source = self.global_group if self.gather_slice_data else self.group
            self._check_input(
                x,
                self.in_features // source.size(),
                f"this rank's share of {self.in_features} features over {source.size()} ranks "
                "(slice_input_by_last_dim=True takes all)",
            )
        if not self.gather_slice_data:
            return self._own(x, -1) if self.slice_input_by_last_dim else x
        if not self.slice_input_by_last_dim:
            x = _gather_features(x, self.global_group)
        return self._own(self._group_tokens(x), -1)


def _unloaded(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)


def _members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _padded(x: Tensor, tokens: Tokens) -> Tensor:
    """Zero rows at the end, up to tokens.padded."""
    return torch.cat([x, x.new_zeros((tokens.padded - tokens.real, *x.shape[1:]))])


def _gather_tokens(x: Tensor, group: Any) -> Tensor:
    """[n, ...] -> [n * size, ...], ranks in order."""
    if group.size() == 1:
        return x
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_single(whole, x.contiguous(), group=group)
    return whole


def _gather_features(x: Tensor, group: Any) -> Tensor:
    """[T, ..., f] -> [T, ..., f * size]: gathered as rows, then joined along the last dim."""
    whole = _gather_tokens(x, group).unflatten(0, (group.size(), x.shape[0]))
    return whole.movedim(0, -2).flatten(-2)


def _reduce_scatter_tokens(x: Tensor, group: Any) -> Tensor:
    """[T, ...] parts of a sum -> local-token rows of it, [ceil(T / size), ...]."""
    tokens = Tokens(x.shape[0], group.size())
    rows = x.new_empty((tokens.per, *x.shape[1:]))
    dist.reduce_scatter_single(rows, _padded(x, tokens), group=group)
    return rows
