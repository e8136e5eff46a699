"""``dry_run``: checks taps on one recorded forward of a backbone; ``Flow``: where in that forward heads may stand."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.launch.check_arguments import head_dtypes, head_dtypes_in_words
from ..basics.arguments import close_names, is_plain
from .batches import Batch
from .reading import BY_CHANNELS, LOGITS, AnyExtract, has_logits, logits_of, parts_in_words, parts_to_name
from .recorder import record
from .recording import Call, Operation, Recording, Value, ancestors, at_place, value_like

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
    *("native_layer_norm", "_fused_rms_norm", "mm"),
    *("layer_norm", "rms_norm", "linear"),
}
#: Operators that copy: to another dtype under autocast, in other strides, or what a lazy view stands for.
_COPIES = ("clone", "_to_copy")
#: Operators of a token each, or of the features of one: what they make of the first token depends on that alone.
_PER_TOKEN = frozenset("clone _to_copy native_layer_norm native_dropout alias detach expand".split())


class DryRun(NamedTuple):
    """What a forward of the backbone has shown."""

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
    example_input: Batch | Recording,
    *,
    extract: Mapping[str, AnyExtract] | None = None,
    logits: int | str | None = None,
) -> DryRun:
    """Check that every tap can feed a head, by one forward of ``backbone`` in eval mode.

    Args:
        backbone: returns logits [N, K], or something of which they are a part.
        taps: names of its layers, in the order in which they run.
        example_input: a batch that the backbone takes, whose values do not matter; or such a forward, recorded.
        extract: by tap, what its head reads of its output.
        logits: the part of what the backbone returns that is its logits; None is a tensor, or a field "logits".

    Raises:
        ValueError: a tap that does not exist, runs never, more than once or out of order, is not a tensor [N, ...] of
            rank 2 to 4, or is changed in place later in the forward; the message names layers that would have worked.
            Or a backbone whose output is not [N, K], or no logits but probabilities.
    """
    recording = example_input
    if not isinstance(recording, Recording):
        recording = record(backbone, recording, evaluating=True, watch_host=False)
    channels = _Channels(recording.operations)
    read = _check_taps(taps, dict(backbone.named_modules(remove_duplicate=False)), recording, extract or {}, channels)
    output, batch = recording.output, recording.samples
    if logits is None and not isinstance(output, Tensor) and has_logits(output):
        logits = LOGITS
    picked = output if logits is None else logits_of(output, logits)
    if is_plain(picked) and picked.shape == (batch,) and picked.is_floating_point():
        picked = picked[:, None]  # one logit, which is refused as such
    if not (is_plain(picked) and picked.ndim == 2 and picked.shape[0] == batch):
        name = "" if isinstance(output, Tensor) else f"; if they are a part of that, name it: {parts_to_name(output)}"
        raise ValueError(f"backbone: returned {parts_in_words(picked)}, wants logits [{batch}, num_classes]{name}")
    values = [value for place, value in recording.returned.items() if at_place(output, place) is picked]
    if any(one.made_by is not None and one.made_by.name in ("_softmax", "softmax") for one in values):
        raise ValueError("backbone: returns probabilities, wants logits: leave out its last softmax")
    return DryRun(read, [channels.dims_of(value_like(y)) for y in read], picked, logits)


def _check_taps(
    taps: Sequence[str],
    layers: Mapping[str, nn.Module],
    recording: Recording,
    extract: Mapping[str, AnyExtract],
    channels: "_Channels",
) -> list[Tensor]:
    """Return what heads read of each tap; ``ValueError`` if they cannot."""
    runs = Counter(call.layer for call in recording.calls)
    of_layer = {call.layer: call for call in recording.calls}

    def is_readable(y: Any) -> bool:
        return isinstance(y, Tensor) and value_like(y).feeds_head(recording.samples)

    def is_changed(layer: nn.Module, y: Tensor) -> bool:
        memory = value_like(y).memory
        return any(each.written is not None and each.memory == memory for each in of_layer[layer].returned.values())

    good = [
        name
        for name, layer in layers.items()
        if name and runs[layer] == 1 and is_readable(y := recording.outputs[layer]) and not is_changed(layer, y)
    ]
    read: list[Tensor] = []
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
        y = recording.outputs[layer]
        if tap in extract:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    y = extract[tap](y)
            except Exception as error:  # whatever a user's function may raise
                raise ValueError(f"extract[{tap!r}]: of what the layer returns: {error}") from error
        read.append(y)
        if not is_readable(y):
            part = "" if tap in extract else _part_to_read(tap, of_layer[layer], channels, recording.samples)
            if isinstance(y, Tensor) and y.is_nested:
                part = (
                    "; set use_nested_tensor = False on the nn.TransformerEncoder, which packs padded batches so, or "
                    "make it with enable_nested_tensor=False"
                )
            raise ValueError(
                f"heads: layer {tap!r} returns {parts_in_words(y)}, which a head cannot read: "
                f"wants {_wanted(y)}{part}{would_work}"
            )
        if is_changed(layer, y):
            raise ValueError(
                f"heads: the output of layer {tap!r} is changed in place later (by an in-place ReLU, say), "
                f"while its head may still be reading it; tap the layer that changes it{would_work}"
            )
    by_run = sorted(taps, key=lambda tap: of_layer[layers[tap]].order)
    if list(taps) != by_run:
        raise ValueError(f"heads: the taps {list(taps)} are out of order; they run in the order {by_run}")
    return read


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


class Flow:
    """Where heads may stand in a model: its main path, and its work, by one forward for two samples in eval mode."""

    def __init__(self, model: nn.Module, example: Batch) -> None:
        """Run the model once, without gradients; it is not changed. Tensors on the device ``meta`` do."""
        self.recording = record(model, example, evaluating=True)
        self._model = model
        runs = Counter(call.layer for call in self.recording.calls)
        self._ends = {call.name: call for call in self.recording.calls if call.name and runs[call.layer] == 1}
        self._roots: dict[Value, Value] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what layers return for two samples that run once and return one tensor that heads can read."""
        ends = ((name, self._readable(call)) for name, call in self._ends.items())
        return {name: value.shape for name, value in ends if value is not None}

    def listened(self) -> list[str]:
        """Return the layers that run once and return a tensor that heads can read, or several things."""
        readable = self.shapes
        return [name for name, call in self._ends.items() if name in readable or len(call.returned) > 1]

    def pools(self) -> dict[str, str]:
        """Return how heads would pool what layers return: the first token of as many as the model reads that of."""
        picks = (each for each in self.recording.operations if each.name == "select" and len(each.reads[0].shape) == 3)
        tokens = {each.reads[0].shape[1] for each in picks if tuple(each.args[1:]) in ((1, 0), (-2, 0))}
        shapes = self.shapes.items()
        return {name: "first" if len(shape) == 3 and shape[1] in tokens else "avg" for name, shape in shapes}

    def first_token_is_constant(self, layer: str) -> bool:
        """Return whether nothing of the input has reached the first token of what a layer returns."""
        value = self._readable(self._ends[layer])
        return value is not None and len(value.shape) == 3 and not _first_token_depends(value)

    def work_at(self, layers: Sequence[str]) -> list[float]:
        """Return how far the model is, from 0 to 1, when each of some layers returns that run once.

        FLOPs are those of convolutions, products and attention: the same on every device and in every dtype, whatever
        kernels run there, but for attention of CUDA devices that pads heads whose width is no multiple of 8. Of a model
        without any, operators are counted.
        """
        work = [each.flops for each in self.recording.operations]
        if not any(work):
            work = [not each.is_view for each in self.recording.operations]
        return [sum(work[: self._ends[layer].ended]) / sum(work) for layer in layers]

    @property
    def flops(self) -> float:
        """FLOPs of the whole model for one sample, two for each multiply-add; 0 of one without any, see ``work_at``."""
        return sum(each.flops for each in self.recording.operations) / self.recording.samples

    def cuts(self) -> list[str]:
        """Return the layers through whose output alone all that comes later depends on the input, as they run.

        Such a layer lies on the main path, and runs once; one inside of a residual branch does not: the sum behind it
        reads what went past the branch, too. Of layers that return the very same tensor it is one that lies in the
        fewest others.
        """
        last_read, born = self._lives()
        found: dict[Value, str] = {}
        for name, call in self._ends.items():
            value = self._readable(call)
            if value is None or value.written is not None or not value.from_input or call.layer is self._model:
                continue
            root = self._root(value)
            alive = [each for each, read in last_read.items() if born[each] < call.ended <= read]
            if alive == [root] and prod(root.shape) == prod(value.shape):
                if root not in found or name.count(".") < found[root].count("."):
                    found[root] = name
        return sorted(found.values(), key=list(self._ends).index)

    def past(self) -> list[str]:
        """Return, in words, what goes past the layer that is a cut but for the fewest values, if each is [N] or [N, T].

        That is a mask of padding, or what it was made of, or labels; maps that go past are a model's own way.
        """
        last_read, born = self._lives()
        least: list[Value] = []
        for call in self._ends.values():
            value = self._readable(call)
            root = None if value is None else self._root(value)
            alive = [each for each, read in last_read.items() if born[each] < call.ended <= read]
            if root in alive and len(alive) > 1 and (not least or len(alive) <= len(least)):
                least = [each for each in alive if each is not root]
        if any(len(each.shape) > 2 for each in least):
            return []
        return [_of_the_input(each) for each in least]

    def _readable(self, call: Call) -> Value | None:
        """Return what a layer returned, if that is one tensor that a head can read."""
        value = call.returned.get(())
        return value if value is not None and value.feeds_head(self.recording.samples) else None

    def _lives(self) -> tuple[dict[Value, int], dict[Value, int]]:
        """Return, of values that the output depends on, the last operation to read each, and the one that makes it."""
        returned = [value for value in self.recording.returned.values() if value.from_input]
        needed: set[Operation] = set().union(*map(ancestors, returned))
        last_read = {self._root(value): len(self.recording.operations) for value in returned}
        for operation in sorted(needed, key=lambda each: -each.number):
            for read in operation.reads:
                if read.from_input:
                    last_read.setdefault(self._root(read), operation.number)
        return last_read, {each: -1 if each.made_by is None else each.made_by.number for each in last_read}

    def _root(self, value: Value) -> Value:
        """Return the value that one is a view of."""
        made_by = value.made_by
        if made_by is None or not made_by.is_view:
            return value
        if value not in self._roots:
            self._roots[value] = self._root(made_by.reads[0])
        return self._roots[value]


def _of_the_input(value: Value) -> str:
    """Say which argument of the model a value is, or which it was made of."""
    origin = value
    while origin.made_by is not None:
        origin = next(each for each in origin.made_by.reads if each.from_input)
    name = next(map(repr, filter(None, origin.names)), "the input")
    return name if value.made_by is None else f"what {value.made_by.name} makes of {name}"


def _first_token_depends(value: Value) -> bool:
    made_by = value.made_by
    if made_by is None or not value.from_input:
        return value.from_input
    pieces = made_by.reads
    if made_by.name == "cat" and len(value.shape) == 3 and made_by.args[1:] in ((1,), (-2,)):
        pieces = made_by.reads[:1]
    elif not (torch.Tag.pointwise in getattr(made_by.function, "tags", ()) or made_by.name in _PER_TOKEN):
        return True
    return any(len(each.shape) == 3 and _first_token_depends(each) for each in pieces)
