"""``Between``: a backbone's forward from one of its taps to another: entered late, left early, never rewritten.

A forward has one beginning. So the layers before the tap at which it is entered are of a copy on the device ``meta``:
up to there it computes shapes alone, in no memory, and what that tap returns is then what was handed over. At the tap
at which it is left an exception ends it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .hooks import hooks_of
from .kept import shallow_copy
from .taps import ForwardLeft


class Handed:
    """What a tap returns, of which the one tensor is handed over; around it there is nothing but None."""

    def __init__(self, output: Any) -> None:
        """Learn by what a tap has returned.

        Raises:
            ValueError: it is not one tensor, with None beside it at most: other things may depend on the batch.
        """
        leaves, self._spec = tree_flatten(output)
        others = [leaf for leaf in leaves if leaf is not None]
        if len(others) != 1 or not isinstance(others[0], Tensor):
            kinds = ", ".join(type(leaf).__name__ for leaf in others) or "nothing"
            raise ValueError(f"it returns {kinds}, wants one tensor")
        self._place = next(place for place, leaf in enumerate(leaves) if leaf is not None)
        self.dtype = others[0].dtype

    def __deepcopy__(self, _memo: Any) -> "Handed":
        """Return itself, which nothing changes."""
        return self

    def tensor_in(self, output: Any) -> Any:
        """Return what is handed over; an output of another structure raises, as does one that is traced as a whole."""
        leaves, spec = tree_flatten(output)
        if spec != self._spec:
            raise RuntimeError(f"a tap returned {spec}, unlike {self._spec} in the dry run")
        return leaves[self._place]

    def around(self, x: Any) -> Any:
        """Return what the tap would have returned, with the tensor that was handed over in it."""
        leaves = [None] * self._spec.num_leaves
        leaves[self._place] = x
        return tree_unflatten(leaves, self._spec)


class _Left(ForwardLeft):
    """Carries what a tap has returned out of the forward."""


class _Entrance:
    """A tapped layer at which a forward is entered: returns what it would have. It has all that the layer has."""

    auxhead_given: dict[int, list[Any]]
    """By thread: what to return, and a tensor in it; while it is traced then the last node before."""

    def forward(self, *_: Any, **__: Any) -> Any:
        given = self.auxhead_given[get_ident()]
        if isinstance(given[1], fx.Proxy):
            given.append([*given[1].node.graph.nodes][-1])
        return given[0]


class _Exit:
    """A tapped layer that calls the one whose place it has, and leaves the forward. It has all that the layer has."""

    auxhead_layer: list[nn.Module]  # in a list, lest it be a layer of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left(self.auxhead_layer[0](*args, **kwargs))


class _DevicesStay(TorchFunctionMode):
    """Lets no tensor leave a device, or ``meta``: where parts are placed is not up to a forward that names devices.

    What is made elsewhere comes, in place of another device of that kind.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = func in (Tensor.cuda, Tensor.cpu, Tensor.to) and (args[0].is_meta or args[0].device == self._device)
        if there and func is not Tensor.to:
            return args[0]
        if func is not Tensor.to or any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
            return func(*args, **kwargs)
        copy, plain = kwargs.get("copy", False), {key: each for key, each in kwargs.items() if key != "copy"}
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[1:], **plain)
        if there or device is None:
            device = args[0].device
        elif device.type == self._device.type:
            device = self._device
        return args[0].to(
            device,
            args[0].dtype if dtype is None else dtype,
            non_blocking=non_blocking,
            copy=copy,
            memory_format=torch.preserve_format if memory_format is None else memory_format,
        )


def _become(layer: nn.Module, kind: type) -> None:
    """Give a layer another forward, and leave its class to those who ask for it."""
    layer.__class__ = type(type(layer).__name__, (kind, type(layer)), {})


class Between(nn.Module):
    """Takes what one tap hands over, or the batch, and returns what another one hands over, or the backbone's output.

    All in one tensor. It shares the parameters that it reads, and has all others on ``meta``.
    """

    def __init__(
        self,
        backbone: nn.Module,
        taps: Sequence[str],
        own: Mapping[int, Tensor],
        example: Tensor,
        passed: Collection[nn.Module],
        entered: tuple[str, Handed, Callable[..., Tensor] | None] | None,
        left: tuple[str, Handed] | None,
    ) -> None:
        """Copy a backbone without its memory.

        Args:
            backbone: whose tensors may lie anywhere.
            taps: those that run here, in their order; the last is that at which it is left, if it is.
            own: the tensors to use, by the ``id`` of the backbone's, for what it reads here.
            example: a batch of any size, on any device.
            passed: layers whose calls have ended where it is entered; their hooks would be called with tensors on
                ``meta``, once more, and are not.
            entered: the tap at which it is entered, what that hands over, and how a head reads it; None: the batch.
            left: the tap at which it is left, and what that hands over; None: at the end.
        """
        super().__init__()
        copies: dict[nn.Module, nn.Module] = {}
        self.backbone = shallow_copy(backbone, copies)
        for copy, layer in copies.items():
            for hooks in hooks_of(copy) if layer in passed else ():
                hooks.clear()
        elsewhere: dict[int, Tensor] = {}
        held: list[dict[str, Any]] = [tensors for copy in copies for tensors in (copy._parameters, copy._buffers)]
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) in own:
                    tensors[name] = own[id(tensor)]
                elif tensor is not None:
                    tensors[name] = elsewhere.setdefault(id(tensor), _on_meta(tensor))
        layers = [self.backbone.get_submodule(tap) for tap in taps]
        self._like, self._taken, self._read = example[:1].to("meta"), None, None
        self._format = torch.contiguous_format
        if example.ndim == 4 and example.is_contiguous(memory_format=torch.channels_last):
            self._format = torch.channels_last
        self._handed = None if left is None else left[1]
        if left is not None:
            layer, self.left = layers[-1], object.__new__(type(layers[-1]))
            self.left.__dict__ = {**layer.__dict__}
            for hooks in hooks_of(layer):  # which are those of the layer that it calls
                kind = next(name for name, value in vars(layer).items() if value is hooks)
                layer.__dict__[kind] = type(hooks)()
            layer.__dict__["auxhead_layer"] = [self.left]
            layers[-1] = self.left
            _become(layer, _Exit)
        self.auxhead_given: dict[int, list[Any]] = {}
        if entered is not None:
            tap, self._taken, self._read = entered
            entrance = self.backbone.get_submodule(tap)
            entrance.__dict__["auxhead_given"] = self.auxhead_given
            _become(entrance, _Entrance)
        self.training = backbone.training
        names = {module: name for name, module in self.named_modules()}
        self.taps = [names[layer] for layer in layers]
        """Names of the taps that run here."""

    def forward(self, x: Tensor) -> Any:
        """Run from tap to tap; also while it is traced by ``torch.fx``."""
        if self._taken is None:
            return self._run(x, x)
        output = self._taken.around(x)
        samples = (output if self._read is None else self._read(output)).shape[0]
        dtype = self._like.dtype  # unless all is computed in float64, to compare with
        if not isinstance(x, fx.Proxy) and x.dtype != self._taken.dtype and dtype.is_floating_point:
            dtype = x.dtype
        self.auxhead_given[get_ident()] = given = [output, x]
        try:
            batch = x.new_empty((samples, *self._like.shape[1:]), dtype=dtype, device="meta")
            returned = self._run(x, batch.contiguous(memory_format=self._format))
            if isinstance(x, fx.Proxy):
                _, _, last = given  # else a layer around the entrance is not traced
                _erase_unread(last)
            return returned
        finally:
            del self.auxhead_given[get_ident()]

    def _run(self, x: Tensor, batch: Any) -> Any:
        try:
            with nullcontext() if isinstance(x, fx.Proxy) else _DevicesStay(x.device):
                output = self.backbone(batch)
        except _Left as left:
            assert self._handed is not None
            return self._handed.tensor_in(left.args[0])
        if isinstance(x, fx.Proxy) and self._handed is not None:
            raise RuntimeError("a layer around the tap at which it is left cannot be traced")
        return output


def _on_meta(tensor: Tensor) -> Tensor:
    there = torch.empty_like(tensor, device="meta")
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _erase_unread(last: fx.Node) -> None:
    """Take what is computed on ``meta`` out of a graph, up to a node, but for sizes that are read behind it."""
    nodes = [*last.graph.nodes]
    for node in reversed(nodes[: nodes.index(last) + 1]):
        if node.op != "placeholder" and not node.users:
            last.graph.erase_node(node)
