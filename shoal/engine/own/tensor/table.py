"""Application of a table of tensor parallelism to a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import nn

from shoal.base.boxes import Box, flat_range
from shoal.base.errors import UsageError
from shoal.engine.own.tensor.experts import MODULE, PARAMETER, split_experts
from shoal.engine.own.tensor.layers import InputSplitLinear, OutputSplitLinear, SplitEmbedding, SplitRanks
from shoal.engine.own.tensor.sequence import SEQUENCE_PARALLEL, split_sequence
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.tensor import matches

Table = Mapping[str, str]


class PackedPlacement(ParamPlacement):
    """Placement of a parameter that packs two in its last dim but one: a rank holds a part of each.

    `box` is the part of the first; the second is half a dim further.
    """

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Yield (offset from ``start``, global box) for elements ``start:stop`` of the flat local tensor."""
        *leading, rows, columns = self.box.shape
        block, half = rows * columns, self.global_shape[-2] // 2
        for number in range(start // block, -(-stop // block)):
            first, packed = divmod(number, 2)
            index: list[int] = []
            for size in reversed(leading):
                first, place = divmod(first, size)
                index.insert(0, place)
            outer = Box((*index, packed * half + self.box.offset[-2], 0), (*(1 for _ in leading), rows, columns))
            begin = number * block
            for offset, box in flat_range(outer.shape, max(start - begin, 0), min(stop - begin, block)):
                yield max(begin - start, 0) + offset, box.to_global(outer)


LINEAR = {"colwise": (-2, False), "colwise_gather_output": (-2, True), "rowwise": (-1, False),
          "rowwise_split_input": (-1, True)}  # fmt: skip
"""Styles of linear layers: the dim of the weight that they split, and whether input and output are full."""

KV_HEADS = "colwise_kv"
"""Style of a linear layer of keys or values, followed by a colon and the number of its heads."""

QUERIES_PER_HEAD = "num_key_value_groups"
"""Attribute of an attention of transformers: how many heads of queries share one of keys and values."""

COMPLETE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise")
"""Styles of layers with an unsplit input and output."""

STYLES = (
    *LINEAR, f"{KV_HEADS}:n", "packed_colwise", "embedding_rowwise", "replicated_with_grad_allreduce",
    "moe_tp_experts", SEQUENCE_PARALLEL,
)  # fmt: skip


KINDS = {
    "tensor_parallel": ("tp", STYLES, "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"),
    "expert_parallel": ("ep", (MODULE, PARAMETER), f"{{'layers.*.experts': '{MODULE}', "
                        f"'layers.*.experts.{{up,down}}': '{PARAMETER}'}}"),
}  # fmt: skip
"""Field of a layout that a table is for, its styles, and an example."""


def choose_table(module: nn.Module, given: Table | object | None, kind: str = "tensor_parallel") -> dict[str, str]:
    """Return the rule of each module and parameter by name, from a table or the module's own plan.

    Args:
        kind: "tensor_parallel", whose plan is ``tp_plan``, or "expert_parallel", whose plan is ``ep_plan``.

    Raises:
        UsageError: there is no table, or it has a pattern that fits nothing or an unknown style.
    """
    if not isinstance(given, Mapping | None):
        raise UsageError("tensor_parallel = 'auto': no split of the operators has been planned for these ranks.\n  "
                         "Give a table, or lower parallel.tp to 1.")
    short, styles, example = KINDS[kind]
    table = given if given is not None else getattr(module, f"{short}_plan", None)
    if not table:
        raise UsageError(f"parallel.{short} with model.module, which has no plan of its own.\n  Give {kind}, a "
                         f"table of its layers such as {example}.")
    names = [name for each in (module.named_modules(), module.named_parameters()) for name, _ in each if name]
    rules: dict[str, str] = {}
    for pattern, style in table.items():
        found = [name for name in names if matches(pattern, name)]
        if style not in styles and not _read_heads(style) and (found or given is not None):
            raise UsageError(f"model.module: {kind} has {style!r} for {pattern!r}.\n  Styles are "
                             f"{', '.join(styles)}.")
        if not found and given is not None:
            raise UsageError(f"model.module: {kind} has {pattern!r}, which no layer or parameter of its model "
                             f"fits.\n  Its parameters are {', '.join(names[-8:])}, ...")
        rules |= dict.fromkeys(found, style)
    if not rules:
        raise UsageError(f"model.module: no pattern of its plan fits a layer.\n  Give {kind}.")
    return rules


def _read_heads(style: str) -> int:
    """Return the number of heads that a style says; 0 if it says none."""
    kind, _, heads = style.partition(":")
    return int(heads) if kind == KV_HEADS and heads.isdecimal() else 0


def _count_kv_heads(module: nn.Module, name: str) -> int:
    """Return the number of heads of keys or values of an attention of transformers; 0 for other layers."""
    owner, _, part = name.rpartition(".")
    attention, layer = module.get_submodule(owner), module.get_submodule(name)
    if part not in ("k_proj", "v_proj") or not hasattr(attention, QUERIES_PER_HEAD) or type(layer) is not nn.Linear:
        return 0
    return layer.out_features // getattr(attention, "head_dim", layer.out_features)


def apply_table(
    module: nn.Module, given: Table | object | None, ranks: SplitRanks, edges: Collection[str] = (), *,
    experts: Table | None = None,
) -> dict[str, ParamPlacement]:
    """Split a module in place over ranks; its split parameters have no values then.

    Args:
        edges: names of modules that start a stage of a pipeline, which gets all tokens.
        experts: the table of expert parallelism, whose modules take no part in tensor parallelism then.

    Returns:
        The placement of each split parameter, and of those whose gradients are summed, by name.

    Raises:
        UsageError: the table cannot be applied.
    """
    routed = choose_table(module, experts, "expert_parallel") if ranks.expert_ranks > 1 else {}
    rules = choose_table(module, given) if ranks.size > 1 else {}
    rules = {name: style for name, style in rules.items()
             if not any(name == each or name.startswith(f"{each}.") for each in routed)}
    table = _Application(module, ranks)
    for name, style in rules.items():
        table.apply(name, style, rules)
    table.check_ties()
    table.placements |= split_experts(module, routed, ranks)
    if ranks.sequence:
        for name in split_sequence(module, rules | routed, ranks, edges):
            table.sum_gradients(name, module.get_parameter(name))
    return table.placements


class _Application:
    """A table while it is applied.

    Attributes:
        names: name of each parameter of the full module.
        owners: modules of each parameter, with the names that they have for it.
        split: what replaces each parameter that is split.
        shared: modules whose heads of keys and values several ranks hold.
    """

    def __init__(self, module: nn.Module, ranks: SplitRanks):
        self.module, self.ranks = module, ranks
        self.names = {p: name for name, p in module.named_parameters()}
        self.owners: dict[nn.Parameter, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            self.owners.setdefault(p, []).append(name)
        self.split: dict[nn.Parameter, nn.Parameter] = {}
        self.shared: set[nn.Module] = set()
        self.placements: dict[str, ParamPlacement] = {}

    def apply(self, name: str, style: str, rules: dict[str, str]) -> None:
        """Apply one rule to a module or a parameter."""
        found = dict(self.module.named_parameters(remove_duplicate=False)).get(name)
        if found is not None:
            owner, _, part = name.rpartition(".")
            self._split_parameter(self.module.get_submodule(owner), name, part, style)
            return
        layer = self.module.get_submodule(name)
        tied = [other for p in layer.parameters(recurse=False) for other in self.owners.get(p, ())]
        if style in COMPLETE and any(rules.get(other.rpartition(".")[0]) not in COMPLETE for other in tied):
            return  # an embedding that is not split is tied to it; unsplit it computes the same
        if heads := _count_kv_heads(self.module, name) if style == "colwise" else _read_heads(style):
            self._split_linear(layer, name, -2, False, self._divide_heads(name, heads))
        elif style in LINEAR:
            self._split_linear(layer, name, *LINEAR[style], self.ranks.size)
        elif style == "embedding_rowwise":
            self._split_embedding(layer, name)
        elif style == "replicated_with_grad_allreduce":
            for p in layer.parameters(recurse=False):
                self.sum_gradients(self.names[p], p)
        elif style == "moe_tp_experts":
            layer.register_forward_pre_hook(lambda _, args: tuple(map(self.ranks.enter_each, args)))
            layer.register_forward_hook(lambda _, args, y: self.ranks.leave(y))
        elif style == SEQUENCE_PARALLEL:
            pass  # `split_sequence` follows
        else:
            raise UsageError(f"model.module: tensor_parallel has {style!r} for {name!r}, which is a module.\n  Name "
                             f"its parameters: {', '.join(f'{name}.{part}' for part in layer._parameters)}.")

    def sum_gradients(self, name: str, parameter: nn.Parameter) -> None:
        """Place a parameter that all ranks hold, each with a part of its gradient, if it has no place yet."""
        shape = tuple(parameter.shape)
        self.placements.setdefault(name, ParamPlacement(
            name, shape, Box.full(shape), shape, ("tp",), self.ranks.size, primary=self.ranks.rank == 0))

    def check_ties(self) -> None:
        """Raise `UsageError` if a parameter is split in one module and not in another."""
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if p in self.split:
                other = next(each for each in self.owners[p] if each != name)
                raise UsageError(f"model.module: {name} and {other} are one parameter, and tensor_parallel splits "
                                 f"only {other}.\n  Split both (embedding_rowwise, colwise_gather_output) or neither.")

    def _divide_heads(self, name: str, heads: int) -> int:
        """Return the number of parts of a layer of keys or values, at most one for each head."""
        tp = self.ranks.size
        if heads % tp and tp % heads:
            raise UsageError(f"parallel.tp = {tp} splits {heads} heads of keys or values of {name}.\n  Choose a number "
                             "of ranks that divides it, or a multiple of it.")
        parts = min(heads, tp)
        attention = self.module.get_submodule(name.rpartition(".")[0])
        if parts < tp and attention not in self.shared and hasattr(attention, QUERIES_PER_HEAD):
            setattr(attention, QUERIES_PER_HEAD, getattr(attention, QUERIES_PER_HEAD) * parts // tp)
            self.shared.add(attention)
        return parts

    def _split_linear(self, layer: nn.Module, name: str, dim: int, full: bool, parts: int) -> None:
        if type(layer) is not nn.Linear:
            raise UsageError(f"model.module: tensor_parallel splits {name!r}, a {type(layer).__name__}.\n  Only a "
                             "torch.nn.Linear is split by its name; name the parameters of other layers.")
        kind = OutputSplitLinear if dim == -2 else InputSplitLinear
        replacement = kind(layer, self.ranks, full)
        self._replace(layer, replacement)
        padded = dim == -2 and full
        self._keep(replacement, f"{name}.weight", "weight", dim, parts, padded=padded)
        if layer.bias is not None and dim == -2:
            self._keep(replacement, f"{name}.bias", "bias", -1, parts, padded=padded)

    def _split_embedding(self, layer: nn.Module, name: str) -> None:
        if type(layer) is not nn.Embedding or layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            raise UsageError(f"model.module: tensor_parallel splits {name!r}, a {layer}.\n  Only a torch.nn.Embedding "
                             "is split, without max_norm, sparse and scale_grad_by_freq.")
        replacement = SplitEmbedding(layer, self.ranks)
        self._replace(layer, replacement)
        self._keep(replacement, f"{name}.weight", "weight", -2, self.ranks.size, padded=True)

    def _replace(self, layer: nn.Module, replacement: nn.Module) -> None:
        for name, each in list(self.module.named_modules(remove_duplicate=False)):
            if each is layer:
                self.module.set_submodule(name, replacement)

    def _split_parameter(self, owner: nn.Module, name: str, part: str, style: str) -> None:
        dims = getattr(owner, part).dim()
        if style == "packed_colwise" and dims > 1:
            self._keep(owner, name, part, -2, self.ranks.size, packed=True)
        elif style in ("colwise", "rowwise"):
            self._keep(owner, name, part, -1 if style == "rowwise" or dims == 1 else -2, self.ranks.size)
        else:
            raise UsageError(f"model.module: tensor_parallel has {style!r} for the parameter {name}.\n  A parameter is "
                             "split by colwise, packed_colwise or rowwise.")

    def _keep(
        self, owner: nn.Module, name: str, part: str, dim: int, parts: int, *, padded: bool = False,
        packed: bool = False,
    ) -> None:  # fmt: skip
        """Replace a parameter by this rank's part along a dim, without values; neighbours share one of fewer parts."""
        full = getattr(owner, part)
        if not full.requires_grad:
            raise UsageError(f"model.module: tensor_parallel splits {name}, which is not trained.\n  Leave it out.")
        if full in self.split:  # of another module that holds it
            setattr(owner, part, self.split[full])
            return
        size, copies = full.shape[dim] // (2 if packed else 1), self.ranks.size // parts
        if size % parts and not padded:
            raise UsageError(f"parallel.tp = {self.ranks.size} splits {size} {'rows' if dim == -2 else 'columns'} of "
                             f"{name}.\n  Choose a number of ranks that divides it.")
        share = -(-size // parts)
        first = min(self.ranks.rank // copies * share, size)
        offset, shape, local = [0] * full.dim(), list(full.shape), list(full.shape)
        offset[dim], shape[dim], local[dim] = first, min(share, size - first), share * (2 if packed else 1)
        self.split[full] = kept = nn.Parameter(full.new_empty(local), full.requires_grad)
        setattr(owner, part, kept)
        kind: Callable[..., ParamPlacement] = PackedPlacement if packed else ParamPlacement
        box = Box(tuple(offset), tuple(shape))
        self.placements[self.names[full]] = kind(
            self.names[full], tuple(full.shape), box, tuple(local), (f"tp/{copies}",) if copies > 1 else (), copies,
            primary=self.ranks.rank % copies == 0,
        )
