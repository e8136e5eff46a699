"""``dry_run``: one recorded forward of a backbone, which checks its taps before anything depends on them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.launch.head_arguments import head_dtypes, head_dtypes_in_words
from ..basics.arguments import close_names, is_plain
from .batches import Batch
from .reading import BY_CHANNELS, LOGITS, AnyExtract, logits_of, part_of, parts_in_words, parts_to_name
from .recorder import record
from .recording import Call, Operation, Value

#: Dimension of the channels in the first argument, and in the first output, of an operator with this name.
_CHANNELS_SECOND = {
    *("convolution", "cudnn_convolution", "mkldnn_convolution", "native_group_norm"),
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update"),
    *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"),
    # which inference mode does not take apart
    *("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "batch_norm", "group_norm", "instance_norm"),
    *("max_pool1d", "max_pool2d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
}
_CHANNELS_LAST = {
    *("native_layer_norm", "_fused_rms_norm", "mm", "_transformer_encoder_layer_fwd"),
    *("layer_norm", "rms_norm", "linear"),
}
#: Operators that copy: to another dtype under autocast, in other strides, or what a lazy view stands for.
_COPIES = ("clone", "_to_copy")


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


def dry_run(
    backbone: nn.Module,
    taps: Sequence[str],
    example_input: Batch,
    *,
    extract: Mapping[str, AnyExtract] | None = None,
    logits: int | str | None = None,
) -> DryRun:
    """Record ``backbone`` once in eval mode and check that every tap can feed a head.

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
    tapped: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for tap in taps:
        if tap in layers:
            tapped[layers[tap]].append(tap)
    read: dict[str, Any] = {}

    def extracted(layer: nn.Module, output: Any) -> dict[str, Any]:
        for tap in tapped.get(layer, ()):
            read[tap] = output
            if extract and tap in extract:
                try:
                    read[tap] = extract[tap](output)
                except Exception as error:  # whatever a user's function may raise
                    raise ValueError(f"extract[{tap!r}]: of what the layer returns: {error}") from error
        return {tap: read[tap] for tap in tapped.get(layer, ())}

    recording = record(backbone, example_input, evaluating=True, on_return=extracted)
    channels = _Channels(recording.operations)
    _check_taps(taps, layers, recording.calls, read, extract or {}, channels, recording.samples)
    output = recording.output
    if logits is None and not isinstance(output, Tensor) and _has_logits(output):
        logits = LOGITS
    picked = output if logits is None else logits_of(output, logits)
    batch = recording.samples
    if is_plain(picked) and picked.shape == (batch,) and picked.is_floating_point():
        picked = picked[:, None]  # one logit, which is refused as such
    if not (is_plain(picked) and picked.ndim == 2 and picked.shape[0] == batch):
        name = "" if isinstance(output, Tensor) else f"; if they are a part of that, name it: {parts_to_name(output)}"
        raise ValueError(f"backbone: returned {parts_in_words(picked)}, wants logits [{batch}, num_classes]{name}")
    heard = {tap: value for call in recording.calls for tap, value in (call.heard or {}).items()}
    return DryRun([read[tap] for tap in taps], [channels.dims_of(heard[tap]) for tap in taps], picked, logits)


def _has_logits(output: Any) -> bool:
    try:
        return isinstance(part_of(output, LOGITS), Tensor)
    except ValueError:
        return False


def _check_taps(
    taps: Sequence[str],
    layers: Mapping[str, nn.Module],
    calls: Sequence[Call],
    read: Mapping[str, Any],
    extract: Mapping[str, AnyExtract],
    channels: "_Channels",
    batch: int,
) -> None:
    runs = Counter(call.layer for call in calls)
    of_layer = {call.layer: call for call in calls}
    values = {call.layer: [*(call.heard or {"": call.returned.get(())}).values()] for call in calls}
    readable = {
        layer for layer, its in values.items() if all(isinstance(y, Value) and y.feeds_head(batch) for y in its)
    }
    changed = {
        layer for layer, its in values.items() if any(isinstance(y, Value) and y.written is not None for y in its)
    }
    good = [
        name
        for name, layer in layers.items()
        if name and runs[layer] == 1 and layer in readable and layer not in changed
    ]
    would_work = f"; layers that would work: {layers_in_words(good)}" if good else ""
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
        if layer not in readable:
            part = "" if tap in extract else _part_to_read(tap, of_layer[layer], channels, batch)
            raise ValueError(
                f"heads: layer {tap!r} returns {parts_in_words(read[tap])}, which a head cannot read: "
                f"wants {_wanted(read[tap])}{part}{would_work}"
            )
        if layer in changed:
            raise ValueError(
                f"heads: the output of layer {tap!r} is changed in place later (by an in-place ReLU, say), "
                f"while its head may still be reading it; tap the layer that changes it{would_work}"
            )
    by_run = sorted(taps, key=lambda tap: of_layer[layers[tap]].order)
    if list(taps) != by_run:
        raise ValueError(f"heads: the taps {list(taps)} are out of order; they run in the order {by_run}")


def _part_to_read(tap: str, call: Call, channels: "_Channels", batch: int) -> str:
    """Return what to write for the first part of a tuple or dict that a head can read."""
    parts = ((place[0], part) for place, part in call.returned.items() if len(place) == 1 and part.feeds_head(batch))
    name, part = next(parts, (None, None))
    if part is None:
        return ""
    layouts, dims = BY_CHANNELS.get(len(part.shape), {}), channels.dims_of(part)
    if not layouts or len(dims) == 1 and dims <= layouts.keys():
        return f", or extract={{{tap!r}: Extract(item={name!r})}}"
    first, second = layouts.values()
    return f", or extract={{{tap!r}: Extract(item={name!r}, layout={first!r})}}, or {second!r}"


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


class _Channels:
    """Tells which dimensions operators take for the channels of the values that they read and make.

    A convolution's and a batch norm's is the second, a layer norm's and a linear layer's the last. Views of a tensor
    lie in the same memory, so that a dimension of theirs is told by its size and stride in whatever order a view has
    them. Operators on single elements leave the order as it is, which counts where nothing else tells: of a sum's two
    terms one may come from a layer that mixes tokens, and took those for its channels.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        # Sizes and strides, by memory: of what is read and made, and of what follows from that.
        self._seen: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        self._followed: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        self._copied: dict[int, Value] = {}  # by memory of a copy, of which readers tell the same
        for operation in operations:
            if isinstance(operation.function, torch._ops.OpOverload) and operation.makes:
                self._take(operation)

    def dims_of(self, value: Value) -> set[int]:
        """Return the dimensions of a value that operators have taken for its channels: one, none or several."""
        if value.memory is None:
            return set()
        noted = self._seen.get(value.memory) or self._followed.get(value.memory) or set()
        dims = list(zip(value.shape, value.stride, strict=True))
        exact = {dims.index(one, 1) for one in noted if one in dims[1:]}
        if exact:
            return exact
        # A part of the channels has their stride: ShuffleNet's blocks read one half of theirs.
        by_stride = {stride: dim for dim, (size, stride) in enumerate(dims) if dim and size > 1}
        return {
            by_stride[stride] for size, stride in noted if stride in by_stride and size < dims[by_stride[stride]][0]
        }

    def _take(self, operation: Operation) -> None:
        name, args, made = operation.name, operation.args, operation.makes[0]
        if name == "addmm":
            self._note(args[1], -1)
            self._note(made, -1)
        elif name in _CHANNELS_LAST or name in _CHANNELS_SECOND and len(made.shape) > 2:
            dim = -1 if name in _CHANNELS_LAST else 1
            self._note(args[0], dim)
            self._note(made, dim)
        elif name == "mean" and len(args) > 1 and isinstance(args[1], (list, tuple)):
            # over all positions it leaves samples and channels; one that keeps them may belong to a norm
            rank, keeps = len(args[0].shape), len(args) > 2 and args[2]
            left = set(range(rank)) - {dim % rank for dim in args[1]} - {0}
            if len(left) == 1 and (rank == 4 or rank == 3 and not keeps):
                self._note(args[0], left.pop())
        elif torch.Tag.pointwise in operation.function.tags or name in _COPIES:
            same = [each for each in args if isinstance(each, Value) and each.shape == made.shape]
            for each in same:
                for dim in self.dims_of(each):
                    self._note(made, dim, follows=True)
            if name in _COPIES and args[0] in same and made.memory is not None:
                self._copied[made.memory] = args[0]

    def _note(self, value: Any, dim: int, *, follows: bool = False) -> None:
        if isinstance(value, Value) and value.memory is not None and len(value.shape) > 1 and value.shape[dim] > 1:
            known = self._followed if follows else self._seen
            known[value.memory].add((value.shape[dim], value.stride[dim]))
            original = None if follows else self._copied.get(value.memory)
            if original is not None and original.shape == value.shape:
                self._note(original, dim)
