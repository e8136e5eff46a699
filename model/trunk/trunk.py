"""``Trunk`` and ``make_trunk``: the ways to run a backbone under its heads, from as it is to compiled."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...kernels.cuda.runtime import beside_captures
from ..answers.rule_order import ordered_write
from ..basics.arguments import check_batch, check_module, close_names, kind_of
from ..basics.streams import each_once
from ..heads.fused_aux_head import FusedAuxHead
from ..listening.reading import Reading
from ..listening.rounding import double_copy, in_double, relative_error, truth_of
from ..listening.taps import listening
from .backbone_rewriter import BackboneRewriter
from .branches import Step, run_side_by_side
from .compiled_part import HandOver, handing_over
from .fused_convolution import PADDED_CHANNELS, FusedConvolution
from .fused_linear import FusedLinear
from .inductor import keep_triton_cache
from .joined_maps import join_maps
from .layer_graph import Unwritten, first_line
from .timed_convolutions import asked_once, fastest_convolutions, takes_no_longer, times_nothing

#: "as_is" is the backbone itself; "cudnn" folds batch norms and uses cuDNN's fused convolutions; "branched" runs its
#: branches side by side, too; "inductor" compiles it.
TRUNKS = ("as_is", "cudnn", "branched", "inductor")


@dataclass(frozen=True)
class Trunk:
    """A backbone, made ready to be run under its heads."""

    module: nn.Module
    """x -> logits [N, K], or what ``reading`` takes them from; where there is a ``classifier``, x -> the classifier's
    input. Its taps have the backbone's names, and their forward hooks fire in the same order with the same values."""
    classifier: FusedAuxHead | None
    """The backbone's own classifier as a fused head that holds the same parameters; it never exits."""
    memory_format: torch.memory_format
    """Memory layout that the input should have."""
    notes: tuple[str, ...]
    """Sentences on what was done to the backbone, and on what was not and why."""
    reading: Reading | None = None
    """How outputs of the taps and of the module are read, for whoever listens; None as they are."""
    channels: int | None = None
    """As many channels the module reads sooner than the backbone's, if the further ones are zeros; None: no others."""
    branches: Sequence[Step] = ()
    """The plan to run branches of the module, a graph, side by side, if it has some."""
    side_by_side: bool = False
    """True if graphs of one GPU are to run them so."""
    parts: Sequence["Trunk"] = ()
    """Those of its parts, if it is in parts, which may be on other devices than its input."""

    @property
    def written(self) -> list[nn.Module]:
        """Whatever :meth:`refresh` writes to."""
        return [each for part in self.parts for each in part.written] if self.parts else [self.module]

    def run(self, x: Tensor, beside: Sequence[torch.cuda.Stream]) -> Any:
        """Run the module; with streams beside the current one its branches on them, joined when it returns."""
        if not beside:
            return self.module(x)
        assert isinstance(self.module, fx.GraphModule)
        return run_side_by_side(self.module, self.branches, x, beside)

    def memory_for(self, example: Tensor) -> Tensor:
        """Return a copy of a batch in the memory that the module reads soonest, with ``channels``, zeros behind it."""
        if self.channels is None:
            return example.clone(memory_format=self.memory_format)
        padded = example.new_zeros(len(example), self.channels, *example.shape[2:])
        padded = padded.contiguous(memory_format=self.memory_format)
        padded[:, : example.shape[1]] = example
        return padded

    def choosing(self, samples: int) -> AbstractContextManager[None]:
        """Let a trunk that runs for the first time with a batch of that size take the fastest algorithms.

        See :func:`fastest_convolutions`.
        """
        return fastest_convolutions(samples) if _fused(self.module) else nullcontext()

    def refresh(self) -> None:
        """Fold the backbone's weights again, in place, so that captured graphs see what they are now.

        Needed after a change of a weight or running statistic that a batch norm was folded into, of a bias that is
        added with another's, of the weight that reads further ``channels``, and of those that convolutions in Triton
        read in an order of their own; all other parameters are the backbone's own. It comes after all uses by runners
        that were asked for before it, and before all others, on whatever streams they are.
        """
        for part in self.parts:
            part.refresh()
        fused = [] if self.parts else _fused(self.module)
        if copies := _copies(fused):
            with beside_captures() if copies[0].is_cuda else nullcontext(), ordered_write(self.module, copies):
                for module in fused:
                    module.refresh()


def make_trunk(
    backbone: nn.Module,
    taps: Sequence[str],
    example_input: Tensor,
    kind: str = "as_is",
    reading: Reading | None = None,
) -> Trunk:
    """Make a trunk of a backbone, to be run without gradients; the backbone is not changed.

    Whatever a trunk does to the backbone is checked on the example: tap outputs and logits may be at most three times
    as far from the float64 truth as the backbone's own. A trunk that cannot be made, or fails that, is the backbone as
    it is, and a note says why.

    Args:
        backbone: turns a batch into logits [N, K]; in eval mode.
        taps: the names of its tapped layers, in the order in which they run.
        example_input: a batch that the backbone takes, of the size, dtype and device that will be run.
        kind: one of ``TRUNKS``. "as_is": the backbone itself. "cudnn": batch norms folded into convolutions; these
            with sum and activation in one launch of cuDNN or Triton, whichever is sooner; concatenations that these
            write into; channels_last max-pools in Triton; the classifier as a fused head. "branched": the same, and
            layers that do not need each other run side by side in graphs of one GPU. "inductor": as "cudnn", but for
            concatenations and max-pools, compiled by Inductor between the taps, without CUDA graphs; what is written
            for that begins while the launch before it ends, on GPUs that can (compute capability 9.0 and later).
        reading: of the network, how outputs of the taps and of the backbone are read.

    Returns:
        Trunk: with a module that shares all parameters it need not change.

    Raises:
        ValueError: a kind or a tap that there is not, or an example without samples.
        TypeError: an argument of another type.
        RuntimeError: a tap that does not run once and in its place.
    """
    return begin_trunk(backbone, taps, example_input, kind, reading)()


def begin_trunk(
    backbone: nn.Module,
    taps: Sequence[str],
    example_input: Tensor,
    kind: str,
    reading: Reading | None = None,
    hand_over: HandOver | None = None,
) -> Callable[[], Trunk]:
    """Do as :func:`make_trunk` until a trunk is rewritten; returns what compiles it, checks it and returns it.

    Meanwhile others, whom ``hand_over`` gives the graphs that "inductor" compiles, may compile them.
    """
    check_module("backbone", backbone)
    check_batch("example_input", example_input)
    check_kind("kind", kind)
    if isinstance(taps, str) or not isinstance(taps, Sequence):
        raise TypeError(f"taps: got {taps!r}, wants a sequence of names of layers")
    layers = dict(backbone.named_modules(remove_duplicate=False))
    for tap in taps:
        if not tap or tap not in layers:
            raise ValueError(f"taps: the backbone has no layer {tap!r}{close_names(tap, layers)}")
    as_is = partial(_as_is, backbone, example_input, reading)
    if kind == "as_is":
        return partial(as_is, "The backbone runs as it is.")
    if backbone.training:
        return partial(as_is, f"Not {kind}: the backbone is in training mode; call its eval().")
    if kind == "inductor":
        keep_triton_cache()  # asked for before Inductor sets another one
    with _making(backbone, example_input):
        example_input = example_input.clone(memory_format=torch.preserve_format)  # made in inference mode, it may be
        # The backbone itself chooses here, too, since what is chosen for a convolution stays chosen.
        as_it_is = _run(backbone, taps, example_input, reading)
        try:
            made = _rewritten(backbone, taps, example_input, kind)
            if isinstance(made, str):
                return partial(as_is, f"Not {kind}: {made}.")
            trunk = replace(made, reading=reading)
            if hand_over is not None:
                example = _read(trunk, example_input, kind)[0].clone(memory_format=torch.preserve_format)
                with handing_over(hand_over):
                    trunk.module(example)  # which it may change in place
        except Exception as error:  # of the user's code in an unusual place
            return partial(as_is, f"Not {kind}: it failed with {first_line(error)}")
    return partial(_finished, backbone, taps, example_input, as_it_is, trunk, kind)


def _finished(
    backbone: nn.Module, taps: Sequence[str], example_input: Tensor, as_it_is: list[Tensor], trunk: Trunk, kind: str
) -> Trunk:
    """Compile a trunk, if that is its kind, and return it; or else the backbone as it is, with a note why."""
    as_is = partial(_as_is, backbone, example_input, trunk.reading)
    with _making(backbone, example_input):
        try:
            read = _read(trunk, example_input, kind)
            outputs = [_run(trunk.module, taps, each, trunk.reading, trunk.classifier) for each in read]
        except Exception as error:  # of the user's code, or of a compiler
            return as_is(f"Not {kind}: it failed with {first_line(error)}")
        wrong = _too_far_off(backbone, taps, example_input, as_it_is, outputs, trunk.reading)
    return trunk if wrong is None else as_is(f"Not {kind}: {wrong}")


@contextmanager
def _making(backbone: nn.Module, example_input: Tensor) -> Iterator[None]:
    """Run what makes a trunk: without gradients, by the fastest algorithms, with buffers kept as they are."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _buffers_kept(backbone),
        fastest_convolutions(len(example_input)),
    ):
        yield


def _read(trunk: Trunk, example_input: Tensor, kind: str) -> list[Tensor]:
    """Return the example as a trunk may read it: as it lies, and in more channels where it takes them."""
    x = example_input.contiguous(memory_format=trunk.memory_format)
    read = [x] if trunk.channels is None else [x, trunk.memory_for(x)]
    return read[-1:] if kind == "inductor" else read  # each would be compiled for itself


def check_kind(name: str, kind: object, more: Sequence[str] = ()) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless an argument is one of ``TRUNKS`` or of what ``more`` there is."""
    kinds = (*TRUNKS, *more)
    if kind not in kinds:
        got, error = (repr(kind), ValueError) if isinstance(kind, str) else (kind_of(kind), TypeError)
        raise error(f"{name}: got {got}, wants one of {', '.join(map(repr, kinds))}")


def _as_is(backbone: nn.Module, example_input: Tensor, reading: Reading | None, note: str) -> Trunk:
    return Trunk(backbone, None, format_of(example_input), (note,), reading)


def format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last for a map that lies so and in no other way, else contiguous."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _rewritten(backbone: nn.Module, taps: Sequence[str], example_input: Tensor, kind: str) -> Trunk | str:
    rewriter = BackboneRewriter(backbone, taps, example_input, compiles=kind == "inductor")
    module, classifier, notes = rewriter.rewritten()
    memory_format = torch.channels_last if example_input.ndim == 4 else format_of(example_input)
    if rewriter.depends_on_layout is not None and memory_format != format_of(example_input):
        return f"of maps in channels_last {rewriter.depends_on_layout} may change others in place"
    x = example_input.contiguous(memory_format=memory_format)
    why = "it changes in place a tensor that its forward makes anew each time"
    with Unwritten(rewriter.constants, why) if rewriter.constants else nullcontext():
        notes += _choose(module, x)
        if kind != "inductor" and isinstance(module, fx.GraphModule) and (count := join_maps(module, x)):
            notes.append(f"Concatenations whose parts are written where they belong: {count}.")
    trunk = Trunk(module, classifier, memory_format, tuple(notes))
    if rewriter.stems:
        padded = replace(trunk, channels=PADDED_CHANNELS)
        wide = padded.memory_for(x)
        if all(_is_as_fused(stem, wide) and _is_no_slower(stem, wide, x) for stem in rewriter.stems):
            note = f"Graphs read batches in {PADDED_CHANNELS} channels, which the first convolution takes sooner."
            trunk = replace(padded, notes=(*trunk.notes, note))
    if copies := _copies(_fused(module)):
        with ordered_write(module, copies):  # which is done
            pass
    if kind == "inductor":
        rewriter.compile()
        return trunk
    branches = rewriter.branches(module)
    if isinstance(branches, str):
        return branches if kind == "branched" else trunk
    return replace(trunk, branches=branches, side_by_side=kind == "branched")


def _fused(module: nn.Module) -> list[FusedConvolution]:
    return [each for each in module.modules() if isinstance(each, FusedConvolution)]


def _copies(fused: Sequence[FusedConvolution]) -> list[Tensor]:
    """Return the tensors that a trunk has of its own."""
    return [copy for each in fused for copy in each.buffers()]


def _choose(module: nn.Module, x: Tensor) -> list[str]:
    """Run the module, letting each layer that can be Triton's choose how it runs; returns why some run unfused."""
    refused: dict[str, int] = {}
    to_compile: dict[Hashable, Callable[[], Tensor]] = {}

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        if (found := layer.in_triton_by(*inputs)) is not None:
            to_compile.setdefault(*found)

    def choose(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        reason = layer.choose(*inputs)
        if reason is not None:
            refused[reason] = refused.get(reason, 0) + 1

    convolutions = _fused(module)
    linears = [each for each in module.modules() if isinstance(each, FusedLinear)]
    if x.device.type == "cuda":
        _run_with(note, module, [*convolutions, *linears], x)
        tried = [partial(_try, call) for call in to_compile.values()]
        each_once(tried, torch.cuda.current_stream(x.device))
    _run_with(choose, module, [*convolutions, *linears], x)
    in_triton = sum(conv.in_triton for conv in convolutions)
    fused = sum(conv.fused and not conv.in_triton for conv in convolutions)
    notes = [f"Convolutions that run with their ReLU as one launch of cuDNN: {fused}."] if fused else []
    if in_triton:
        notes.append(f"Convolutions and norms that run with what follows as one launch of Triton: {in_triton}.")
    if in_triton := sum(linear.in_triton for linear in linears):
        notes.append(f"Linear layers that run with what follows as one launch of Triton: {in_triton}.")
    return notes + [f"Convolutions whose ReLU runs by itself: {count}, since {why}." for why, count in refused.items()]


def _try(call: Callable[[], object]) -> None:
    with suppress(Exception):  # of a compiler: who chooses sees it
        call()


def _run_with(
    hook: Callable[[Any, tuple[Tensor, ...]], None],
    module: nn.Module,
    layers: Sequence[nn.Module],
    x: Tensor,
) -> None:
    """Run the module once, with a hook before each of some layers."""
    hooks = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        module(x.clone(memory_format=torch.preserve_format))  # which it may change in place
    finally:
        for each in hooks:
            each.remove()


def _is_as_fused(conv: FusedConvolution, x: Tensor) -> bool:
    """Return whether a convolution that runs with its ReLU as one launch does so of another input, too."""
    fused = conv.fused
    conv.choose(x)
    of_this, conv.fused = conv.fused, fused
    return of_this or not fused


def _is_no_slower(conv: FusedConvolution, x: Tensor, other: Tensor) -> bool:
    """Return whether a convolution takes not much longer for an input than for another one.

    cuDNN's rules choose badly for some: 4 channels to 16 take MobileNetV3's 8 images 80 us longer than 3, and one image
    16.6 us for 5.5 (H200).
    """
    this, that = partial(conv.forward, x), partial(conv.forward, other)  # not __call__: a tap may listen
    runs = repr(conv), conv.padding, conv.dilation, conv.bias is None, conv.compiled
    weight = conv.weight.shape, conv.weight.stride()
    decides = runs, weight, x.dtype, x.shape, x.stride(), other.shape, other.stride()
    return times_nothing() or asked_once(decides, lambda: takes_no_longer(this, that, x, 1.1), x.device)


@contextmanager
def _buffers_kept(backbone: nn.Module) -> Iterator[None]:
    """Undo what a layer in training mode does to its statistics while the trunk is made and checked."""
    trains = any(module.training for module in backbone.modules())
    kept = [(buffer, buffer.clone()) for buffer in backbone.buffers()] if trains else []
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _run(
    module: nn.Module,
    taps: Sequence[str],
    x: Tensor,
    reading: Reading | None,
    classifier: FusedAuxHead | None = None,
) -> list[Tensor]:
    """Return the outputs of the taps, in order, and the logits."""
    outputs: list[Tensor] = []
    with listening(module, taps, lambda _index, features: outputs.append(features.clone()), reading):
        y = module(x.clone(memory_format=torch.preserve_format))
    return [*outputs, y if classifier is None else classifier.logits(y)]


def _too_far_off(
    backbone: nn.Module,
    taps: Sequence[str],
    x: Tensor,
    as_it_is: list[Tensor],
    runs: Sequence[list[Tensor]],
    reading: Reading | None = None,
) -> str | None:
    """Say in words how the outputs of runs of a trunk differ too much from the backbone's, or return None."""
    for mine, own in ((mine, own) for outputs in runs for mine, own in zip(outputs, as_it_is, strict=True)):
        if mine.shape != own.shape or mine.dtype != own.dtype:
            return f"an output is {list(mine.shape)} of {mine.dtype}, not {list(own.shape)} of {own.dtype}."
    exact, allowed = truth_of(as_it_is, lambda: _run(double_copy(backbone), taps, in_double(x), reading))
    for outputs in runs:
        error = relative_error(outputs, exact)
        if not error <= allowed:  # NaN is not
            return f"on the example it is off by {error:.2g} of the largest value, {allowed:.2g} being allowed."
    return None
