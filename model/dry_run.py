"""One run of a backbone that checks its taps before anything depends on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels import check_input
from ..kernels.head_arguments import FLOAT_DTYPES, check_countable
from .arguments import HEAD_DTYPES, close_names, is_plain, tensor_in_words
from .hooks import ThreadHook


class DryRun(NamedTuple):
    """Outputs of one forward of the backbone."""

    features: list[Tensor]
    """The output of each tapped layer."""
    logits: Tensor
    """[N, K], the output of the backbone."""


class _Watch(TorchDispatchMode):
    """Notes how often each layer runs, and whether a head could read its output: a forward hook, and a dispatch mode.

    What is written in place is told by the version counters of tensors, which compiled layers count up, too; and by
    operators as they run, since tensors of inference mode, and those reached by ``.data``, count no versions.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run compiled."""
        return True

    def __init__(self, batch: int, tapped: set[nn.Module]) -> None:
        super().__init__()
        self.order: list[nn.Module] = []
        self.outputs: dict[nn.Module, Any] = {}  # of the tapped layers
        self.unreadable: set[nn.Module] = set()
        self.changed_in_place: set[nn.Module] = set()
        self._batch = batch
        self._tapped = tapped
        self._alive: list[tuple[Tensor, int | None, nn.Module]] = []

    def __call__(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        """The forward hook."""
        self.order.append(layer)
        self.look_for_changes()
        if layer in self._tapped:
            self.outputs[layer] = output
        if not is_readable(output, self._batch):
            self.unreadable.add(layer)
        else:
            self._alive.append((output, None if output.is_inference() else output._version, layer))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note outputs of layers that it writes to."""
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._note_write(tensor)
        return func(*args, **kwargs)

    def _note_write(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()._cdata
        self.changed_in_place |= {
            layer for output, _, layer in self._alive if output.untyped_storage()._cdata == memory
        }

    def look_for_changes(self) -> None:
        """Compare the version counters of the outputs that are still there with what they were."""
        alive = []
        for output, version, layer in self._alive:
            if version is not None and output._version != version:
                self.changed_in_place.add(layer)
            else:
                alive.append((output, version, layer))
        self._alive = alive


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to, but for those without memory of their own to compare."""
    if not (isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable):
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [tensor for name in written for tensor in tree_leaves(given.get(name)) if is_plain(tensor)]


def dry_run(backbone: nn.Module, taps: Sequence[str], example_input: Tensor) -> DryRun:
    """Run ``backbone`` once in eval mode and check that every tap can feed a head.

    Args:
        backbone: returns logits [N, K].
        taps: names of its layers, in the order in which they run.
        example_input: a batch that the backbone takes; its values do not matter.

    Raises:
        ValueError: a tap that does not exist, runs never, more than once or out of order, is not a tensor [N, ...] of
            rank 2 to 4, or is changed in place later in the forward; the message names layers that would have worked.
            Or a backbone whose output is not [N, K].
    """
    layers = dict(backbone.named_modules(remove_duplicate=False))
    batch = example_input.shape[0]
    watch = _Watch(batch, {layers[tap] for tap in taps if tap in layers})
    with ExitStack() as stack:
        for module in backbone.modules():
            stack.callback(module.register_forward_hook(ThreadHook(watch)).remove)
            stack.callback(setattr, module, "training", module.training)
        backbone.eval()
        stack.enter_context(torch.inference_mode(False))  # tensors of inference mode do not count their versions
        stack.enter_context(torch.no_grad())
        stack.enter_context(watch)
        logits = backbone(example_input.clone())  # a normal tensor of ours, which the backbone may change in place
        watch.look_for_changes()

    _check_taps(taps, layers, watch)
    if not (is_plain(logits) and logits.ndim == 2 and logits.shape[0] == batch):
        raise ValueError(f"backbone: returned {_described(logits)}, wants logits [{batch}, num_classes]")
    return DryRun([watch.outputs[layers[tap]] for tap in taps], logits)


def _check_taps(taps: Sequence[str], layers: dict[str, nn.Module], watch: _Watch) -> None:
    runs = Counter(watch.order)
    bad = watch.unreadable | watch.changed_in_place | {layers[""]}
    good = [name for name, layer in layers.items() if runs[layer] == 1 and layer not in bad]
    would_work = f"; layers that would work: {_listing(good)}" if any(good) else ""
    for tap in taps:
        if tap not in layers or not tap:
            raise ValueError(f"heads: the backbone has no layer {tap!r}{close_names(tap, good)}{would_work}")
        layer = layers[tap]
        if runs[layer] != 1:
            times = f"runs {runs[layer]} times" if runs[layer] else "never runs"
            if isinstance(layer, torch.jit.ScriptModule):
                would_work = (
                    f": it is TorchScript, which calls no hooks; tap the nn.Module that it was made of{would_work}"
                )
            raise ValueError(f"heads: layer {tap!r} {times} in a forward, wants once{would_work}")
        if layer in watch.unreadable:
            output = watch.outputs[layer]
            raise ValueError(
                f"heads: layer {tap!r} returns {_described(output)}, which a head cannot read: "
                f"wants {_wanted(output)}{would_work}"
            )
        if layer in watch.changed_in_place:
            raise ValueError(
                f"heads: the output of layer {tap!r} is changed in place later (by an in-place ReLU, say), "
                f"while its head may still be reading it; tap the layer that changes it{would_work}"
            )
    by_run = sorted(taps, key=lambda tap: watch.order.index(layers[tap]))
    if list(taps) != by_run:
        raise ValueError(f"heads: the taps {list(taps)} are out of order; they run in the order {by_run}")


def check_head_fits(tap: str, features: Tensor, in_features: int | None, pool: str, pool_size: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless a head with these sizes, of any width if None, can read the output of its tap."""
    try:
        found = check_input(features, pool, pool_size)
        check_countable(features, found)
    except ValueError as error:
        raise ValueError(f"heads[{tap!r}]: {error}") from None
    if in_features is not None and found != in_features:
        raise ValueError(
            f"heads[{tap!r}]: its linear layer takes {in_features} features, but the output "
            f"{list(features.shape)} of the tap has {found} with pool={pool!r} and pool_size={pool_size}"
        )


def is_readable(output: Any, batch: int) -> bool:
    """Return whether a head can read what a layer returned for a batch of that size."""
    return (
        is_plain(output)
        and output.dtype in FLOAT_DTYPES
        and 2 <= output.ndim <= 4
        and output.shape[0] == batch
        and 0 not in output.shape[1:]
    )


def _wanted(output: Any) -> str:
    """Say what a tap should return instead: another dtype, if it is that, else another shape."""
    if isinstance(output, Tensor) and output.dtype not in FLOAT_DTYPES:
        remedy = " (call .float() on the backbone and on its input)" if output.dtype == torch.float64 else ""
        return HEAD_DTYPES + remedy
    return "a floating-point tensor [N, C, H, W], [N, T, D] or [N, D] of as many samples as the input"


def _described(output: Any) -> str:
    return tensor_in_words(output) if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _listing(names: Sequence[str], most: int = 40) -> str:
    """Return the names in a line, the deepest left out first where there are too many to read."""
    names = [name for name in names if name]
    while len(names) > most and (depth := max(name.count(".") for name in names)):
        shallower = [name for name in names if name.count(".") < depth]
        if not shallower:
            break
        names = shallower
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") if names else "none"
