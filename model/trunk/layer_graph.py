"""``LayerGraph``: a traced graph with the layers that it calls, while it is rewritten."""

import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..basics.streams import OwnedLock
from ..listening.hooks import hooks_of, why_not_plain
from ..listening.recording import OperatorMode, has_memory, written_tensors
from ..listening.taps import ForwardLeft

#: For whoever traces or compiles: two traces at once would each put back what it found of ``nn.Module``: the other's
#: changes, for good.
TRACES = OwnedLock()


def tap_mark(value: Any, tap: str) -> Any:
    """Mark in a graph the moment at which the layer ``tap`` returns ``value``, which is returned."""
    return value


class _UntraceableLayerError(Exception):
    """Carries the innermost layer whose forward could not be traced, by name, and why."""


class Unwritten(OperatorMode):
    """Lets what changes some tensors in place fail, and says why."""

    def __init__(self, tensors: Iterable[Tensor], why: str) -> None:
        super().__init__()
        self._memory = {each.untyped_storage()._cdata for each in tensors if has_memory(each)}
        self._why = why

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = (each for each in written_tensors(func, args, kwargs or {}) if has_memory(each))
        if any(each.untyped_storage()._cdata in self._memory for each in written):
            raise RuntimeError(self._why)
        return func(*args, **(kwargs or {}))


class _NothingFrozen(Unwritten):
    """Lets a forward fail that does while it is traced what no graph would do again: changes its state, or draws."""

    def __init__(self, module: nn.Module) -> None:
        state = (*module.parameters(), *module.buffers())
        super().__init__(state, "it changes a parameter or buffer in its forward")

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise RuntimeError("it draws random numbers in its forward")
        return super().__torch_dispatch__(func, _types, args, kwargs)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return a function of ``operator`` as one of ours.

    Of one of its own fx writes ``n += 1``, by which a number, or a shape, is another one for all who read it later.
    """
    change = getattr(operator, name)

    def changed(value: Any, other: Any) -> Any:
        return change(value, other)

    changed.__name__ = changed.__qualname__ = name
    return changed


#: What a traced forward computes by ``+=`` and its like, by name.
IN_PLACE = {name: _in_place(name) for name in fx.graph.inplace_methods.keys() - {"setitem"}}


class _Changed(fx.Proxy):
    """What a traced forward may change in place by ``+=`` and its like, which fx would take for a new value."""

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _ChangedAttribute(self, name)


class _ChangedAttribute(fx.proxy.Attribute, _Changed):
    """An attribute of such a value: of a tensor ``data`` and ``mT`` are in its memory."""


def _recorded(change: Callable[[Any, Any], Any]) -> Callable[[_Changed, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", change, (self, other), {})


for _name, _change in IN_PLACE.items():
    setattr(_Changed, f"__{_name}__", _recorded(_change))


class _TapTracer(fx.Tracer):
    """Marks the outputs of tapped layers, and calls in the graph the layers of ``kept`` as they are.

    Modules of other threads come here, too, since a trace changes ``nn.Module`` itself; they run as ever.
    """

    #: What is computed from a buffer is computed at each call, and not once for all: weights may be loaded meanwhile.
    proxy_buffer_attributes = True

    def __init__(self, taps: Mapping[nn.Module, str], kept: Mapping[str, str]) -> None:
        super().__init__()
        self._taps = taps
        self._kept = kept
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._kept or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # One argument, as a trunk is called; all others keep their defaults.
        return root_fn, [self.root, self.create_proxy("placeholder", "x", (), {})]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if path not in self._kept and (reason := why_not_plain(m)) is not None:
            raise _UntraceableLayerError(path, reason)
        try:
            output = super().call_module(m, forward, args, kwargs)
        except _UntraceableLayerError:
            raise
        except Exception as error:  # whatever a forward may raise that was not written for proxies
            raise _UntraceableLayerError(path, first_line(error)) from error
        if m in self._taps and path not in self._kept:
            return self.create_proxy("call_function", tap_mark, (output, self._taps[m]), {})
        return output

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Changed(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def trace(module: nn.Module, taps: Mapping[nn.Module, str]) -> tuple[fx.Graph, dict[str, str]] | str:
    """Trace ``module(x)``; returns the graph, and why layers are called as they are, by name; or why it cannot be.

    Layers of torch.nn are called in the graph, other layers are traced through. A layer that cannot be traced, the
    innermost that shows it, is called as it is. The output of a tapped layer goes through :func:`tap_mark` with its
    name in ``taps``, unless the layer itself is called as it is.
    """
    if (reason := why_not_plain(module)) is not None:
        return reason
    kept: dict[str, str] = {}
    while True:
        try:
            with TRACES, _NothingFrozen(module):
                return _TapTracer(taps, kept).trace(module), kept
        except _UntraceableLayerError as error:
            path, kept[path] = error.args
        except ForwardLeft:
            return "it leaves the forward"
        except Exception as error:  # as above, in the forward of the module itself
            return first_line(error)


def constants_of(graph: fx.Graph, module: nn.Module) -> list[Tensor]:
    """Return the tensors that the forward of ``module`` made while it was traced, of nothing that it was given."""
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return [getattr(module, name) for name in names if name.startswith("_tensor_constant")]


def runs_on_one_tensor(backbone: nn.Module, x: Tensor) -> set[nn.Module]:
    """Run the backbone and return the layers that were called, with one tensor each time and nothing else."""
    called: dict[nn.Module, bool] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        called[module] = alone and called.get(module, True)

    with ExitStack() as stack:
        for module in backbone.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks; nor could its layers be rewritten
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        backbone(x.clone(memory_format=torch.preserve_format))  # which it may change in place
    return {module for module, alone in called.items() if alone}


#: Where layers and functions are from that depend on nothing but their input and parameters.
_KNOWN = ("torch", "torchvision", "_operator", "builtins", "math", __package__.partition(".")[0])


def is_known(kind: Any) -> bool:
    """Return whether a function or a class is PyTorch's or ours."""
    return (getattr(kind, "__module__", None) or "torch").partition(".")[0] in _KNOWN


def runs_users_code(layer: nn.Module) -> bool:
    """Return whether a layer, its hooks or a forward of its own are the user's."""
    hooks = [hook for hooks in hooks_of(layer) for hook in hooks.values()]
    return "forward" in vars(layer) or not all(map(is_known, [type(layer), *hooks]))


def is_users(layers: "LayerGraph", node: Node) -> bool:
    """Return whether a node calls a function of the user's, or a layer in which code of the user's runs."""
    if node.op == "call_module":
        return any(map(runs_users_code, layers.called(node).modules()))
    return node.op == "call_function" and not is_known(node.target)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class LayerGraph:
    """A graph together with the layers that its nodes call."""

    def __init__(self, graph: fx.Graph, root: nn.Module, source_of: Mapping[nn.Module, nn.Module]) -> None:
        """Take a graph of ``root``; ``source_of`` holds the user's own layer for each of its layers."""
        self.graph = graph
        self.root = root
        self.new: dict[str, nn.Module] = {}
        self._source_of = source_of

    def layer(self, node: Any) -> nn.Module | None:
        """Return the layer that a node calls with one or two arguments, unless it has hooks or a forward of its own."""
        if not isinstance(node, Node) or node.op != "call_module" or node.kwargs or len(node.args) not in (1, 2):
            return None
        return self.plain(node)

    def plain(self, node: Node) -> nn.Module | None:
        """Return the layer that a ``call_module`` node calls, unless it has hooks or a forward of its own."""
        layer = self.called(node)
        return layer if why_not_plain(layer) is None else None

    def called(self, node: Node) -> nn.Module:
        """Return the layer that a ``call_module`` node calls, hooks or not."""
        return self.new.get(str(node.target)) or self.root.get_submodule(str(node.target))

    def source(self, layer: nn.Module) -> nn.Module:
        """Return the user's own layer that a layer of ours is a copy of."""
        return self._source_of[layer]

    def parameter(self, node: Node) -> Any:
        """Return the parameter, or what else, that a ``get_attr`` node reads."""
        owner, _, name = str(node.target).rpartition(".")
        return getattr(self.root.get_submodule(owner), name)

    def add(self, name: str, layer: nn.Module) -> str:
        """Give a new layer a name that no other has."""
        base = name.replace(".", "_")
        names = (f"{base}_{index}" if index > 1 else base for index in count(1))
        name = next(each for each in names if each not in self.new and not hasattr(self.root, each))
        self.new[name] = layer
        return name

    def insert(self, before: Node, name: str, *args: Node) -> Node:
        """Call a new layer before a node."""
        with self.graph.inserting_before(before):
            return self.graph.call_module(name, args)

    def replace(self, last: Node, by: Node, *others: Node) -> None:
        """Let ``by`` take the place of ``last``, and drop it and others, each a user of the next."""
        last.replace_all_uses_with(by)
        for node in (last, *others):
            self.graph.erase_node(node)

    def assemble(self) -> fx.GraphModule:
        """Make a module of the graph; at each tap it calls an Identity of the tap's name, for hooks to listen at."""
        layers: dict[str, Any] = {}
        taps = {str(node.args[1]) for node in self.graph.nodes if node.target is tap_mark}
        for node in list(self.graph.nodes):
            if node.target is tap_mark:
                value, tap = node.args
                with self.graph.inserting_before(node):
                    self.replace(node, self.graph.call_module(tap, (value,)))
                layers[tap] = nn.Identity()
            elif node.op == "call_module":
                layer = self.called(node)
                if node.target in taps:
                    node.target = self.add(f"{node.target}_tapped", layer)
                layers[node.target] = layer
            elif node.op == "get_attr":
                layers[node.target] = self.parameter(node)
        return fx.GraphModule(layers, self.graph, type(self.root).__name__)


def only_user(node: Any) -> Node | None:
    """Return the one node that uses another, if it does so once: ``x + x`` uses x twice."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    (user,) = node.users
    return user if sum(each is node for each in tree_leaves((user.args, user.kwargs))) == 1 else None
