"""Expert parallelism of any module: each rank holds some of a module's experts, and tokens travel to them and back.

The module of experts gets hidden states [n, h], the experts of each token [n, k] and their weights [n, k], and returns
the weighted sums [n, h]. Its parameters have the experts as their first dim. The ranks that split layers have the same
tokens, so each takes a part of them; then the ranks of "ep" exchange the tokens, each with one expert, so that the
module runs with weights of 1, and the weights are applied to what comes back.

Source: Lepikhin et al. 2020, "GShard"; the styles and the module's signature are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.base.errors import UsageError
from shoal.engine.collectives.ops import all_gather, to_host
from shoal.engine.collectives.uneven import all_gather_uneven, exchange_rows, part_lengths, take_shard
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.parallel.placement import ParamPlacement, keep_box

MODULE, PARAMETER = "ep_dispatch_experts", "grouped_gemm"
"""Styles of a module of experts, and of its parameters that are split."""


def split_experts(module: nn.Module, rules: Mapping[str, str], ranks: SplitRanks) -> dict[str, ParamPlacement]:
    """Split experts over ranks, in place; split parameters have no values then.

    Args:
        rules: style of each module of experts and of its parameters.

    Returns:
        The placement of each split parameter, by name.

    Raises:
        UsageError: a module is named without its parameters, or the reverse; or the ranks do not divide the experts.
    """
    placements: dict[str, ParamPlacement] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    local: dict[str, int] = {}
    for name, style in rules.items():
        owner, _, part = name.rpartition(".")
        if (style == PARAMETER) != (name in parameters) or (style == PARAMETER and rules.get(owner) != MODULE):
            raise UsageError(f"model.module: expert_parallel has {style!r} for {name!r}.\n  A module of experts is "
                             f"{MODULE!r}, and its parameters are {PARAMETER!r}.")
        if style == MODULE:
            continue
        experts, *rest = full = tuple(parameters[name].shape)
        if experts % ranks.expert_ranks:
            raise UsageError(f"parallel.ep = {ranks.expert_ranks} splits {experts} experts of {name}.\n  Choose a "
                             "number of ranks that divides it.")
        local[owner] = share = experts // ranks.expert_ranks
        box = Box((ranks.expert_rank * share, *(0 for _ in rest)), (share, *rest))
        placements[name] = keep_box(module.get_submodule(owner), owner, part, box, replicas="edp")
        assert placements[name].global_shape == full, "it is the parameter of that name"
    for name in (name for name, style in rules.items() if style == MODULE):
        if name not in local:
            raise UsageError(f"model.module: expert_parallel has {MODULE!r} for {name!r} and names none of its "
                             f"parameters.\n  Its parameters of all experts are {PARAMETER!r}.")
        layer = module.get_submodule(name)
        if hasattr(layer, "num_experts"):
            layer.num_experts = local[name]  # type: ignore[assignment]
        layer.forward = _Dispatch(layer, local[name], ranks)
    return placements


class _Dispatch:
    """Forward of a module of experts, of which a rank holds some."""

    def __init__(self, experts: nn.Module, local: int, ranks: SplitRanks):
        self.forward, self.local, self.ranks = experts.forward, local, ranks

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sums: [n, h], [n, k], [n, k] -> [n, h]."""
        ranks = self.ranks
        lengths = part_lengths(len(hidden_states), ranks.size)
        if ranks.experts is None:  # without the other ranks: as many rows as on average
            share = slice(lengths[0])
            y = self.forward(hidden_states[share], top_k_index[share] % self.local, top_k_weights[share])
            return torch.cat([y] * ranks.size)[: len(hidden_states)]
        x, chosen, weights = (take_shard(each, ranks.group, 0, lengths)
                              for each in (hidden_states, top_k_index, top_k_weights))
        y = (self._apply(x, chosen) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        return all_gather_uneven(y, ranks.group, 0, lengths)

    def _apply(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Apply its experts to each token: [n, h], [n, k] -> [n, k, h]."""
        ranks, n, ids = self.ranks, self.ranks.expert_ranks, chosen.flatten()
        order = ids.argsort(stable=True)  # by rank and expert
        counts = torch.bincount(ids, minlength=n * self.local)
        coming = all_gather(counts.view(1, -1), ranks.experts).view(n, n, -1)[:, ranks.expert_rank]  # [from, expert]
        send, receive = to_host(torch.stack((counts.view(n, -1).sum(1), coming.sum(1))))
        rows = exchange_rows(x[order // chosen.shape[1]], send, receive, ranks.experts)
        local = torch.arange(self.local, device=x.device).repeat(n).repeat_interleave(coming.flatten())
        if len(rows):
            y = self.forward(rows, local.unsqueeze(1), rows.new_ones(len(rows), 1))
        else:  # a row of zeros, so that the backward of the exchange runs on all ranks
            zero = rows.sum(0, keepdim=True)
            y = self.forward(zero, local.new_zeros(1, 1), zero.new_ones(1, 1))[:0]
        back = exchange_rows(y, receive, send, ranks.experts)
        return back[order.argsort()].view(*chosen.shape, -1)
