"""One run of a backbone that checks its taps before anything depends on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.launch.head_arguments import head_dtypes, head_dtypes_in_words
from ..basics.arguments import close_names, is_plain
from .batches import Batch, call_with, first_tensor, map_tensors
from .hooks import ThreadHook, buffers_kept, modes_kept
from .operators import ChannelEvidence, written_tensors
from .reading import BY_CHANNELS, LOGITS, AnyExtract, logits_of, part_of, parts_in_words, parts_to_name


class DryRun(NamedTuple):
    """Outputs of one forward of the backbone."""

    features: list[Tensor]
    """Of each tap what is extracted of its output."""
    channels: list[set[int]]
    """Of each, the dimensions that operators take for its channels: one, none or several."""
    logits: Tensor
    """[N, K], of what the backbone returned."""
    part: int | str | None
    """The part of what the backbone returned that is its logits; None if it returned nothing else."""


class _Watch(ChannelEvidence):
    """Notes how often each layer runs, and whether a head could read its output: a forward hook, and a dispatch mode.

    What is written in place is told by the version counters of tensors, which compiled layers count up, too; and by
    operators as they run, since tensors of inference mode, and those reached by ``.data``, count no versions.
    """

    def __init__(self, batch: int, tapped: Mapping[str, nn.Module], extract: Mapping[str, AnyExtract]) -> None:
        super().__init__()
        self.order: list[nn.Module] = []
        self.outputs: dict[str, Any] = {}  # of the taps
        self.unreadable: set[nn.Module] = set()
        self.changed_in_place: set[nn.Module] = set()
        self._batch = batch
        self._taps: dict[nn.Module, list[str]] = {}
        for tap, layer in tapped.items():
            self._taps.setdefault(layer, []).append(tap)
        self._extract = extract
        self._alive: list[tuple[Tensor, int | None, nn.Module]] = []

    def __call__(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        """The forward hook."""
        self.order.append(layer)
        self.look_for_changes()
        for tap in self._taps.get(layer, ()):
            self.outputs[tap] = output = self._extracted(tap, output)
        if not is_readable(output, self._batch):
            self.unreadable.add(layer)
        else:
            self._alive.append((output, None if output.is_inference() else output._version, layer))

    def part_to_read(self, tap: str) -> str:
        """Return what to write for the first part of a tuple or dict that a head can read."""
        output = () if tap in self._extract else self.outputs[tap]
        items = output if isinstance(output, Sequence) else ()
        parts = output.items() if isinstance(output, Mapping) else enumerate(items)
        name, part = next(((name, part) for name, part in parts if is_readable(part, self._batch)), (None, None))
        if part is None:
            return ""
        layouts, channels = BY_CHANNELS.get(part.ndim, {}), self.dims_of(part)
        if not layouts or len(channels) == 1 and channels <= layouts.keys():
            return f", or extract={{{tap!r}: Extract(item={name!r})}}"
        first, second = layouts.values()
        return f", or extract={{{tap!r}: Extract(item={name!r}, layout={first!r})}}, or {second!r}"

    def _extracted(self, tap: str, output: Any) -> Any:
        if tap not in self._extract:
            return output
        try:
            return self._extract[tap](output)
        except Exception as error:  # whatever a user's function may raise
            raise ValueError(f"extract[{tap!r}]: of what the layer returns: {error}") from error

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note outputs of layers that it writes to."""
        written = {tensor.untyped_storage()._cdata for tensor in written_tensors(func, args, kwargs or {})}
        if written:
            memories = ((output.untyped_storage()._cdata, layer) for output, _, layer in self._alive)
            self.changed_in_place |= {layer for memory, layer in memories if memory in written}
        return super().__torch_dispatch__(func, _types, args, kwargs)

    def look_for_changes(self) -> None:
        """Compare the version counters of the outputs that are still there with what they were."""
        alive = []
        for output, version, layer in self._alive:
            if version is not None and output._version != version:
                self.changed_in_place.add(layer)
            else:
                alive.append((output, version, layer))
        self._alive = alive


def dry_run(
    backbone: nn.Module,
    taps: Sequence[str],
    example_input: Batch,
    *,
    extract: Mapping[str, AnyExtract] | None = None,
    logits: int | str | None = None,
) -> DryRun:
    """Run ``backbone`` once in eval mode and check that every tap can feed a head.

    Args:
        backbone: returns logits [N, K], or something of which they are a part.
        taps: names of its layers, in the order in which they run.
        example_input: a batch that the backbone takes; its values do not matter.
        extract: by tap, what its head reads of its output.
        logits: the part of what the backbone returns that is its logits; None is a tensor, or a field "logits".

    Raises:
        ValueError: a tap that does not exist, runs never, more than once or out of order, is not a tensor [N, ...] of
            rank 2 to 4, or is changed in place later in the forward; the message names layers that would have worked.
            Or a backbone whose output is not [N, K].
    """
    layers = dict(backbone.named_modules(remove_duplicate=False))
    batch = first_tensor(example_input).shape[0]
    watch = _Watch(batch, {tap: layers[tap] for tap in taps if tap in layers}, extract or {})
    with ExitStack() as stack:
        stack.enter_context(modes_kept(backbone))
        stack.enter_context(buffers_kept(backbone))
        backbone.eval()
        for module in backbone.modules():
            if not isinstance(module, torch.jit.RecursiveScriptModule):  # which takes no hooks
                stack.callback(module.register_forward_hook(ThreadHook(watch)).remove)
        stack.enter_context(torch.inference_mode(False))  # tensors of inference mode do not count their versions
        stack.enter_context(torch.no_grad())
        stack.enter_context(watch)
        # Normal tensors of ours, which the backbone may change in place.
        output = call_with(backbone, map_tensors(example_input, torch.clone))
        watch.look_for_changes()

    _check_taps(taps, layers, watch)
    if logits is None and not isinstance(output, Tensor) and _has_logits(output):
        logits = LOGITS
    picked = output if logits is None else logits_of(output, logits)
    if is_plain(picked) and picked.shape == (batch,) and picked.is_floating_point():
        picked = picked[:, None]  # one logit, which is refused as such
    if not (is_plain(picked) and picked.ndim == 2 and picked.shape[0] == batch):
        name = "" if isinstance(output, Tensor) else f"; if they are a part of that, name it: {parts_to_name(output)}"
        raise ValueError(f"backbone: returned {parts_in_words(picked)}, wants logits [{batch}, num_classes]{name}")
    features = [watch.outputs[tap] for tap in taps]
    return DryRun(features, [watch.dims_of(each) for each in features], picked, logits)


def _has_logits(output: Any) -> bool:
    try:
        return isinstance(part_of(output, LOGITS), Tensor)
    except ValueError:
        return False


def _check_taps(taps: Sequence[str], layers: dict[str, nn.Module], watch: _Watch) -> None:
    runs = Counter(watch.order)
    bad = watch.unreadable | watch.changed_in_place | {layers[""]}
    good = [name for name, layer in layers.items() if runs[layer] == 1 and layer not in bad]
    would_work = f"; layers that would work: {layers_in_words(good)}" if any(good) else ""
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
            output = watch.outputs[tap]
            raise ValueError(
                f"heads: layer {tap!r} returns {parts_in_words(output)}, which a head cannot read: "
                f"wants {_wanted(output)}{watch.part_to_read(tap)}{would_work}"
            )
        if layer in watch.changed_in_place:
            raise ValueError(
                f"heads: the output of layer {tap!r} is changed in place later (by an in-place ReLU, say), "
                f"while its head may still be reading it; tap the layer that changes it{would_work}"
            )
    by_run = sorted(taps, key=lambda tap: watch.order.index(layers[tap]))
    if list(taps) != by_run:
        raise ValueError(f"heads: the taps {list(taps)} are out of order; they run in the order {by_run}")


def is_readable(output: Any, batch: int) -> bool:
    """Return whether a head can read what a layer returned for a batch of that size."""
    return (
        is_plain(output)
        and output.dtype in head_dtypes(output.device)
        and 2 <= output.ndim <= 4
        and output.shape[0] == batch
        and 0 not in output.shape[1:]
    )


def _wanted(output: Any) -> str:
    """Say what a tap should return instead: another dtype, if it is that, else another shape."""
    if isinstance(output, Tensor) and output.dtype not in head_dtypes(output.device):
        remedy = " (call .float() on the backbone and on its input)" if output.dtype == torch.float64 else ""
        return head_dtypes_in_words(output.device) + remedy
    return "a floating-point tensor [N, C, H, W], [N, T, D] or [N, D] of as many samples as the input"


def layers_in_words(names: Sequence[str], most: int = 40) -> str:
    """Return the names in a line, the deepest left out first where there are too many to read."""
    names = [name for name in names if name]
    while len(names) > most and (depth := max(name.count(".") for name in names)):
        shallower = [name for name in names if name.count(".") < depth]
        if not shallower:
            break
        names = shallower
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") if names else "none"
