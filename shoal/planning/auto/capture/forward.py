"""A module's forward pass as a graph, by `torch.export`: functional and flat.

In-place writes of a module, through views too, become operators that make new tensors. So data flows along the graph
alone, and the graph can be differentiated and cut into stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from operator import getitem

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from shoal.base.errors import UsageError

aten = torch.ops.aten


def export(module: nn.Module, inputs: tuple, name: str = "") -> ExportedProgram:
    """Export the forward pass of a module in training, on example inputs; no numbers are computed.

    Args:
        name: of the module in messages (default: of its class).

    Raises:
        UsageError: it has no graph (its control flow depends on numbers), or changes tensors from outside.
    """
    name = name or type(module).__name__
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():  # it prints the graph of what fails
            warnings.simplefilter("ignore", UserWarning)  # of recurrent modules, which keep lists of their parameters
            program = torch.export.export(module, inputs)
        _cut_gradients(program)
        program = _functional(program)
    except UsageError:
        raise
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"{name}: torch.export finds no graph: {first.strip()}"
            "\n  Its forward pass must not depend on the values of tensors."
        ) from error
    if read := next((n for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.types.py_sym_types)), None):
        raise UsageError(f"{name}: its forward pass reads the value of a tensor ({read.target}), and a graph has none."
                         "\n  Compute with tensors.")
    if changed := [out.target for out in program.graph_signature.output_specs if out.kind != OutputKind.USER_OUTPUT]:
        raise UsageError(
            f"{name}: its forward pass changes {', '.join(map(str, changed))}, "
            "which each device would do differently.\n  Remove batch norms and counters, or freeze them with .eval()."
        )
    return program


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Remove operators that write in place; decompose few others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about code inside torch
        program = program.run_decompositions({aten.copy.default: _copy})
    for node in program.graph.nodes:
        if node.target is aten.view.default:  # for strides that another attention would give
            node.target = aten.reshape.default
    program.graph_module.recompile()
    return program


def _copy(x: Tensor, y: Tensor, non_blocking: bool = False) -> Tensor:
    """Replace copy_; torch's own decomposition has no derivative."""
    return y.to(x.dtype).expand(x.shape).clone()


def _cut_gradients(program: ExportedProgram) -> None:
    """Detach tensors read under `torch.no_grad`, or passed to `detach_`: a functional program knows neither."""
    graph = program.graph_module.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target is aten.detach_.default]:
        node.target = aten.detach.default
        node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, at=place[node]: place[user] > at)
    learning = _find_differentiable(program)
    for node in list(graph.nodes):
        for views in map(_list_bases, _written(node)):
            if any(view.target is aten.detach.default for view in views) and views[-1] in learning:
                raise _hidden_write(node, views[-1], "through .detach()")
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
            continue
        region = getattr(program.graph_module, node.args[1].target)
        given = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
        outer = {inner: out for inner, out in zip(given, node.args[2:], strict=True) if out in learning}
        for inner in region.graph.nodes:
            for base in (views[-1] for views in map(_list_bases, _written(inner)) if views[-1] in outer):
                raise _hidden_write(inner, outer[base], "under torch.no_grad")
        for inner in outer:
            _detach(region.graph, inner)
        region.recompile()
        for made in list(node.users):
            _detach(graph, made)
    program.graph_module.recompile()


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    """Let all readers of a node read it detached."""
    with graph.inserting_after(node):
        detached = graph.call_function(aten.detach.default, (node,))
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    detached.meta = dict(node.meta)


def _find_differentiable(program: ExportedProgram) -> set[fx.Node]:
    """Find the tensors through which parameters' gradients may flow."""
    found: set[fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        name = schema.name if (schema := get_schema(node)) else ""
        value = node.meta.get("val")
        cut = name == "aten::detach" or name.endswith("_like") or name.startswith("aten::new_")
        if cut or (isinstance(value, Tensor) and not value.is_floating_point()):
            continue
        if node.name in program.graph_signature.inputs_to_parameters or (
            found.intersection(node.all_input_nodes)
            and node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled
        ):
            found.add(node)
        found.update(views[-1] for views in map(_list_bases, _written(node)) if node in found)
    return found


def _hidden_write(node: fx.Node, changed: fx.Node, how: str) -> UsageError:
    return UsageError(
        f"{node.target} {how} changes {changed.name}, which was made outside of it: autograd does not see that."
        "\n  Make a new tensor instead, or write where autograd is enabled."
    )


def get_schema(node: fx.Node) -> torch.FunctionSchema | None:
    """Return the schema of an ATen operator; None for other nodes."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def writes(node: fx.Node) -> bool:
    schema = get_schema(node)
    return schema is not None and schema.is_mutable


def operand(node: fx.Node, place: int) -> Tensor:
    """Return the example of a tensor argument, as the export made it."""
    argument = node.args[place]
    assert isinstance(argument, fx.Node), f"argument {place} of {node} is no tensor"
    return argument.meta["val"]


def _written(node: fx.Node) -> list[fx.Node]:
    schema = get_schema(node)
    if schema is None or not schema.is_mutable:
        return []
    given = {**{a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}, **node.kwargs}
    changed = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in torch.utils._pytree.tree_leaves(changed) if isinstance(value, fx.Node)]


def _list_bases(node: fx.Node) -> list[fx.Node]:
    """List a tensor, the one that it is a view of, and so on to the one that owns the memory, or may own it."""
    chain = [node]
    while node.target is getitem or (
        (schema := get_schema(node)) is not None and schema.returns and schema.returns[0].alias_info is not None
    ):
        node = node.all_input_nodes[0]
        chain.append(node)
    return chain


@dataclass
class Forward:
    """An exported forward pass, flat: one node for each operator and each tensor from outside."""

    module: fx.GraphModule
    # from a placeholder's name to (kind, name in the module); of a boundary, which another stage makes, its name there
    sources: dict[str, tuple[str, str]]
    # parameters and buffers, by these names; parameters without requires_grad are not trained
    values: dict[str, Tensor]

    @property
    def outputs(self) -> list[fx.Node]:
        """The outputs, each once."""
        return list(dict.fromkeys(self.returned))

    def drop_repeated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor for each of the outputs, given all tensors that a call returned."""
        return list(dict(zip(self.returned, tensors, strict=True)).values())

    @property
    def returned(self) -> list[fx.Node]:
        """The tensors that it returns."""
        (out,) = (node for node in self.module.graph.nodes if node.op == "output")
        return [value for value in out.args[0] if isinstance(value, fx.Node)]


def export_forward(module: nn.Module, inputs: tuple, name: str = "") -> Forward:
    """Export a module; a parameter with several names gets the first of these.

    Raises:
        UsageError: it has no graph, or no trained parameter.
    """
    program = export(module, inputs, name)
    signature = program.graph_signature
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    buffers = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    sources: dict[str, tuple[str, str]] = {}
    values: dict[str, Tensor] = dict(module.named_parameters())
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in signature.inputs_to_parameters:
            sources[node.name] = ("parameter", names[signature.inputs_to_parameters[node.name]])
        elif node.name in buffers:
            buffer = buffers[node.name]
            sources[node.name] = ("buffer", buffer)
            values[buffer] = program.state_dict.get(buffer, program.constants.get(buffer))
        else:
            sources[node.name] = ("input", node.name)
    if not any(kind == "parameter" and values[name].requires_grad for kind, name in sources.values()):
        raise UsageError(
            f"{name or type(module).__name__}: nothing in it is trained: it reads no parameter with requires_grad"
        )
    return Forward(program.graph_module, sources, values)
