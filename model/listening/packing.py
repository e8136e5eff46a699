"""``Packing``: a batch of several tensors as one tensor of bytes, a row a sample, for whatever takes one input."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from ..basics.arguments import check_dense, kind_of, tensor_in_words
from .batches import Batch, as_dicts, call_with, check_input_batch, first_tensor
from .hooks import hooks_of, users_hooks

#: Each tensor's numbers begin at a multiple of so many bytes of a row, as kernels like to read them.
_ALIGNED = 16


class _Part(NamedTuple):
    """Where a row has a sample of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int
    channels_last: bool
    fill: bool | int | float | None
    """What is in its padding; None of what has no tokens."""


class Padding(NamedTuple):
    """A number of tokens, the tensor [N, T] that tells how many a batch has, and what is in tensors' padding."""

    length: int
    mask: str
    fills: Mapping[str, bool | int | float]
    """By the place in a batch of each tensor that has tokens."""


class Packing:
    """Packs batches like an example into rows of bytes, [N, B] uint8, and finds the tensors in them again."""

    def __init__(self, name: str, example: Batch, padding: Padding | None = None) -> None:
        """Take a batch of tensors [N, ...] and of constants; ``name`` is the argument's, for errors.

        With ``padding`` rows have so many tokens: batches have at most as many, and more are left out of the example.

        Raises:
            ValueError, TypeError: a tensor without N samples or numbers, or no batch at all.
        """
        check_input_batch(name, example)
        samples, self._parts, self._fixed = len(first_tensor(example)), {}, {}
        flat = isinstance(example, Mapping) and not any(isinstance(y, (Mapping, tuple, list)) for y in example.values())
        self._keys = sorted(example, key=str) if flat else None
        leaves, self._tree = tree_flatten_with_path(as_dicts(example, in_order=True))
        self._padding, self._tokens, end = padding, 0, 0
        for index, (path, each) in enumerate(leaves):
            own = keystr(path)
            if not isinstance(each, Tensor):
                self._fixed[index] = own, each
                continue
            check_dense(name + own, each)
            if not each.ndim or len(each) != samples or not each.numel():
                wants = f"a row of numbers for each of the {samples} samples, as the first tensor has"
                raise ValueError(f"{name}{own}: got {tensor_in_words(each)}, wants {wants}")
            shape, fill = list(each.shape[1:]), None if padding is None else padding.fills.get(own)
            if padding is not None and own == padding.mask:
                self._tokens = index
            if padding is not None and fill is not None:
                shape[0] = padding.length
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + math.prod(shape) * each.element_size()
            last = each.ndim == 4 and each.is_contiguous(memory_format=torch.channels_last)
            last = last and not each.is_contiguous()
            self._parts[index] = _Part(own, tuple(shape), each.dtype, begin, end, last, fill)
        self._bytes = -(-end // _ALIGNED) * _ALIGNED

    def leaves(self, x: Batch) -> list[Any]:
        """Return what a batch holds, in the order of the example; ``TypeError`` if that holds something else."""
        if self._keys is not None and isinstance(x, Mapping) and len(x) == len(self._keys):
            with suppress(KeyError):  # PyTorch's way takes five times as long
                return [x[key] for key in self._keys]
        leaves, tree = tree_flatten_with_path(as_dicts(x, in_order=True))
        if tree != self._tree:
            named = "".join(f" {keystr(path)}" for path, _ in leaves if path)
            wants = ", ".join([part.name for part in self._parts.values()] + [name for name, _ in self._fixed.values()])
            raise TypeError(f"x: got {kind_of(x)}{named}, wants {wants}, as the example input has")
        return [each for _, each in leaves]

    def tokens_of(self, leaves: Sequence[Any]) -> int:
        """Return how many tokens a batch has, given what it holds; 0 if its mask is no tensor [N, T]."""
        mask = leaves[self._tokens]
        return mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else 0

    def pack(self, leaves: Sequence[Any], device: torch.device) -> Tensor:
        """Return the rows of what a batch holds on a device, to which what is all on the CPU crosses in one piece.

        Raises:
            ValueError, TypeError: tensors or constants that are not like the example's.
        """
        for index, (name, value) in self._fixed.items():
            if (given := leaves[index]) is not value and (type(given) is not type(value) or given != value):
                raise ValueError(f"x{name}: got {given!r:.50}, wants {value!r:.50}, as the example input has")
        tokens = 0 if self._padding is None else self.tokens_of(leaves)
        samples, on_host = 0, True
        for index, part in self._parts.items():
            each = leaves[index]
            if not isinstance(each, Tensor):
                raise TypeError(f"x{part.name}: got {kind_of(each)}, wants a torch.Tensor")
            check_dense(f"x{part.name}", each)
            if each.dtype != part.dtype:
                raise TypeError(f"x{part.name}: got {each.dtype}, wants {part.dtype}, as the example input has")
            samples = samples or (len(each) if each.ndim else 0)
            shape = part.shape if part.fill is None else (tokens, *part.shape[1:])
            if each.shape != (samples, *shape) or not samples:
                wants = f"[N, {', '.join(map(str, shape))}] and N >= 1" if shape else "[N] and N >= 1"
                raise ValueError(
                    f"x{part.name}: got shape {list(each.shape)}, wants {wants}, one N for all; lengths= takes others"
                )
            if each.device != device and not each.is_cpu:
                raise ValueError(f"x{part.name}: got device {each.device}, wants {device} or the CPU")
            on_host &= each.is_cpu
        rows = torch.empty(
            samples, self._bytes, dtype=torch.uint8, device="cpu" if on_host else device,
            pin_memory=on_host and device.type == "cuda",
        )  # fmt: skip
        for index, part in self._parts.items():
            into, each = _view(rows, part), leaves[index].detach()
            if part.fill is not None and tokens != part.shape[0]:
                each = each[:, : part.shape[0]]
                into[:, tokens:] = part.fill
                into = into[:, :tokens]
            into.copy_(each)
        return rows.to(device, non_blocking=True)

    def unpack(self, rows: Tensor) -> Any:
        """Return the batch that rows are of, its tensors as views of them."""
        return self._batch({index: _view(rows, part) for index, part in self._parts.items()})

    def call(self, backbone: nn.Module, forward: Any, rows: Tensor) -> Any:
        """Return what a backbone's forward returns for the batch in rows, given dense tensors.

        A backbone in float64, by which trunks are checked, gets all floats in that.
        """
        kinds = {each.dtype for each in backbone.parameters() if each.is_floating_point()}
        tensors = {}
        for index, part in self._parts.items():
            layout = torch.channels_last if part.channels_last else torch.contiguous_format
            if part.dtype == torch.bool:  # which Inductor cannot view as such
                each = _view(rows, part._replace(dtype=torch.uint8)) != 0
            else:
                each = _view(rows, part).contiguous(memory_format=layout)
            exact = kinds == {torch.float64} and part.dtype.is_floating_point
            tensors[index] = each.double() if exact else each
        return call_with(forward, self._batch(tensors))

    def _batch(self, tensors: Mapping[int, Tensor]) -> Any:
        fixed = {index: value for index, (_, value) in self._fixed.items()}
        return tree_unflatten([{**fixed, **tensors}[index] for index in range(len(fixed) + len(tensors))], self._tree)


def _view(rows: Tensor, part: _Part) -> Tensor:
    numbers = rows[:, part.begin : part.end].view(part.dtype)
    if not part.channels_last:
        return numbers.view(-1, *part.shape)
    channels, height, width = part.shape
    return numbers.view(-1, height, width, channels).permute(0, 3, 1, 2)


def check_takes_rows(backbone: nn.Module) -> None:
    """Raise ``TypeError`` for a backbone of which another forward cannot take rows in place of batches."""
    own = vars(backbone)
    why = {
        "TorchScript": isinstance(backbone, torch.jit.ScriptModule),
        "a forward set on the instance": "forward" in own,
        "hooks, which would be given rows": any(map(users_hooks, hooks_of(backbone)[:2])),
        "a compiled call": own.get("_compiled_call_impl") is not None,
    }
    if found := [what for what, is_so in why.items() if is_so]:
        wants = "a plain module whose class has the forward; or the backbone in a module that calls it"
        raise TypeError(f"backbone: is a {type(backbone).__name__} with {found[0]}, wants {wants}")


def taking_rows(backbone: nn.Module, packing: Packing) -> nn.Module:
    """Return a backbone that takes rows, [N, B] uint8, in place of the batches in them.

    It is the given one under another class: layers, parameters, names and modes are the same objects. Raises as
    :func:`check_takes_rows` does.
    """
    check_takes_rows(backbone)
    kind = type(backbone)

    def forward(self: nn.Module, rows: Tensor) -> Any:
        return packing.call(self, lambda *arguments, **named: kind.forward(self, *arguments, **named), rows)

    its = {"forward": forward, "__module__": kind.__module__}
    taking: nn.Module = object.__new__(type(kind.__name__, (kind,), its))
    taking.__dict__ = backbone.__dict__
    return taking
