"""``attach``: makes an :class:`EarlyExitNetwork` of a model by placing heads behind some of its layers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kernels.cuda.runtime import beside_captures
from ..kernels.launch.check_arguments import check_classes
from .basics.arguments import of_one_layer
from .heads.fused_aux_head import FusedAuxHead
from .listening.batches import (
    Batch,
    argument_names,
    arguments_in,
    call_with,
    check_input_batch,
    first_taken,
    first_tensor,
    map_tensors,
    two_samples,
)
from .listening.dry_run import Flow, layers_in_words
from .listening.hooks import ThreadHook, is_earlyon
from .listening.kept import modes_kept
from .listening.reading import AnyExtract, has_logits, logits_of, masks_in, parts_in_words
from .listening.recorder import may_nest
from .network.early_exit_network import EarlyExitNetwork, check_model
from .own_exits.attach_exits import attach_exits


def attach(
    model: nn.Module,
    taps: str | Sequence[str] = "auto",
    *,
    example_input: Batch,
    num_classes: int | None = None,
    extract: Mapping[str, AnyExtract] | None = None,
    logits: int | str | None = None,
) -> EarlyExitNetwork:
    """Make a network of a model, with new heads behind some of its layers; the model is shared, and not changed.

    A head pools what its layer returns to one vector and multiplies it: a map is averaged, and so are tokens, unless
    the model itself reads the first of them alone (a class token), which the head then does as well.

    Args:
        model: returns logits [N, K], or a tuple, dict or object that has them. If it returns the logits of several
            exits, or is a network of earlyon, and ``taps`` is "auto", its own heads are taken over with their weights:
            :func:`attach_exits`.
        taps: names of layers, in the order in which they run; or "auto": up to three layers, behind about 25, 50 and
            75 % of the model's work, and through each of which all that comes later gets what it knows of the input. A
            layer inside of a residual branch is none of these.
        example_input: a batch like those to come: a tensor, or a tuple or dict of the model's arguments. On a CUDA
            device work is time, measured with this batch; elsewhere it is counted in FLOPs.
        num_classes: K of the heads; None is the model's own. Another one is refused.
        extract: by tap, as for :class:`EarlyExitNetwork`.
        logits: likewise.

    Returns:
        EarlyExitNetwork: its ``describe()`` says where the heads are, and behind which share of the work.

    Raises:
        ValueError: there is no layer for a head, or one cannot be read; the message names layers that would work. Or
            the model cannot take the batch; the cause is what it raised.
        TypeError: an argument of another type.

    Example:
        >>> blocks = [nn.Sequential(nn.Conv2d(width, 8, 3), nn.ReLU()) for width in (3, 8, 8)]
        >>> backbone = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        >>> network = attach(backbone, ["0", "1"], example_input=torch.randn(2, 3, 16, 16))
        >>> network.taps, len(network.logits(torch.randn(4, 3, 16, 16)))
        (('0', '1'), 3)
    """
    check_model(model)
    check_input_batch("example_input", example_input)
    wants = "wants 'auto' or a list of names of layers"
    if not taps or isinstance(taps, str) and taps != "auto":
        raise ValueError(f"taps: got {taps!r}, {wants}" if taps else f"taps: got none, {wants}")
    if not isinstance(taps, (str, Sequence)) or not all(isinstance(tap, str) for tap in taps):
        several = next(filter(None, map(of_one_layer, taps)), "")
        raise TypeError(f"taps: got {taps!r:.100}, {wants}{several}")
    if taps != "auto" and (twice := [tap for tap in taps if list(taps).count(tap) > 1]):
        raise ValueError(f"taps: got {twice[0]!r} twice, wants each layer once")
    if taps == "auto" and is_earlyon(model) and isinstance(example_input, Tensor):
        return attach_exits(model, example_input)
    two = two_samples(example_input)
    with first_taken("example_input", two):
        flow = Flow(model, two)
    if taps == "auto" and _has_own_exits(flow.recording.output, logits):
        return attach_exits(model, example_input)  # type: ignore[arg-type]  # which refuses several arguments by name
    classes = _classes(flow.recording.output, logits)
    check_classes("model", classes)
    if num_classes is not None and num_classes != classes:
        raise ValueError(f"num_classes: got {num_classes}, wants {classes}, as the model has")
    pools = flow.pools()
    waiting = [name for name, pool in pools.items() if pool == "first" and flow.first_token_is_constant(name)]
    if taps != "auto" and (named := [name for name in taps if name in waiting]):
        raise ValueError(
            f"taps: the first token behind {named[0]!r}, which heads of this model read, is the same for all samples; "
            "wants layers behind which it has seen the others"
        )
    cuts = [name for name in flow.cuts() if name not in waiting] if taps == "auto" else list(taps)
    known = [name for name in cuts if name in pools]
    on_gpu = first_tensor(example_input).device.type == "cuda"
    shares = measured_work(model, known, example_input) if on_gpu else flow.work_at(known)
    work = dict(zip(known, shares, strict=True))
    names = place_taps(cuts, work) if taps == "auto" else cuts
    if on_gpu and not names:  # others' work on the GPU was measured
        names = place_taps(cuts, work := dict(zip(known, flow.work_at(known), strict=True)))
    if not names:
        why = _why(flow, arguments_in(example_input, argument_names(model)))
        raise ValueError(
            f"taps: 'auto' finds no layer of the model through which all goes that comes later{why}; wants names of "
            f"layers; layers that would work, or that return several things: {layers_in_words(flow.listened())}"
        )
    heads = {name: FusedAuxHead(None, classes, pool=pools.get(name, "avg")) for name in names}
    network = EarlyExitNetwork(model, heads, extract=extract, logits=logits)
    network.check_taps(example_input, None if may_nest(model) else flow.recording)
    network.shares = {name: work[name] for name in names if name in work}
    if taps == "auto" and (missed := missed_targets([work[name] for name in names])):
        wanted = ", ".join(f"{share:.0%}" for share in missed)
        network.placement_note = f"no layer that may carry a head is near {wanted} of the work"
    return network


def _why(flow: Flow, arguments: Mapping[Any, Any]) -> str:
    """Say what goes past all layers, and what to write, if it may be a mask or labels."""
    past = " and ".join(flow.past())
    if not past:
        return ""
    if masks_in(arguments):
        return f": {past} is read behind them"
    return (
        f": {past} is read behind them. If that says where padding is, make it an argument that is called padding_mask "
        "(True at padding) or attention_mask (1 at tokens); if it is labels, leave them out"
    )


def _has_own_exits(output: Any, part: int | str | None) -> bool:
    """Return whether a model returns several tensors [N, K], of which none is named as its logits."""
    if part is not None or isinstance(output, Tensor) or has_logits(output):
        return False
    parts = vars(output) if is_dataclass(output) else output
    tensors = [each for each in tree_leaves(parts) if isinstance(each, Tensor)]
    return len(tensors) > 1 and tensors[0].ndim == 2 and len({each.shape for each in tensors}) == 1


def _classes(output: Any, part: int | str | None) -> int:
    """Return the number of classes of what a model returned; as the dry run of a network, which says what is wrong."""
    picked = logits_of(output, part)
    if isinstance(picked, Tensor) and picked.ndim == 1 and picked.is_floating_point():
        return 1
    if not (isinstance(picked, Tensor) and picked.ndim == 2):
        raise ValueError(f"model: returned {parts_in_words(picked)}, wants logits [N, num_classes]")
    return picked.shape[1]


#: Shares of the model's work behind which heads are placed.
TARGETS = (0.25, 0.5, 0.75)
#: A block or stage this near to a target is taken before a layer inside of one that is nearer.
_NEAR = 0.1
#: Nothing further from a target is taken for it.
_FAR = 0.2
#: Less work than this between two heads is not worth the second.
_APART = 0.1
#: A head that comes later saves next to nothing.
_LATEST = 0.95


def place_taps(cuts: Sequence[str], work: Mapping[str, float]) -> list[str]:
    """Return a layer for each target, in order; fewer where there is none, or those of two are next to each other.

    Args:
        cuts: layers that may carry a head.
        work: done when each of them returns, as it was counted or measured: 0 to 1.
    """
    usable = [name for name in cuts if 0.0 < work[name] <= _LATEST]
    chosen: list[str] = []
    for target in TARGETS if usable else ():
        off = {name: abs(work[name] - target) for name in usable}
        within = max(_NEAR, min(off.values()) + _NEAR / 4)
        # of layers behind the same work the last: an activation or a pool behind a convolution
        near = [(name.count("."), off[name], -place) for place, name in enumerate(usable) if off[name] <= within]
        best = usable[-min(near)[2]]
        if off[best] < _FAR and all(work[best] - work[other] > _APART for other in chosen):
            chosen.append(best)
    return chosen


def missed_targets(shares: Sequence[float]) -> list[float]:
    """Return the shares of the work behind which there should be a head, and none is near."""
    return [target for target in TARGETS if all(abs(share - target) > _NEAR for share in shares)]


_WARM_UP, _TIMED = 3, 5
#: Cycles for which the device is kept busy first, about 50 ms, so that it does not wait for Python in between.
_HELD_UP = 100_000_000


def measured_work(model: nn.Module, layers: Sequence[str], x: Batch) -> list[float]:
    """Run a model a few times in eval mode, and return how far it is, from 0 to 1, when each layer returns.

    Args:
        model: on a CUDA device.
        layers: names of layers that run once.
        x: a batch of the size that will be run.
    """
    shares: list[list[float]] = []
    with ExitStack() as stack, torch.cuda.device(first_tensor(x).device):
        stack.enter_context(beside_captures())  # which the host must not wait beside otherwise
        stack.enter_context(modes_kept(model))
        model.eval()
        stack.enter_context(torch.no_grad())
        marks = [torch.cuda.Event(enable_timing=True) for _ in layers]
        for name, mark in zip(layers, marks, strict=True):
            hook = ThreadHook(lambda *_of_the_layer, mark=mark: mark.record())
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(_WARM_UP + _TIMED):
            batch = map_tensors(x, torch.clone)  # which the model may change in place
            torch.cuda._sleep(_HELD_UP if turn >= _WARM_UP else 0)
            began.record()
            call_with(model, batch)
            ended.record()
            ended.synchronize()
            if turn >= _WARM_UP:
                total = began.elapsed_time(ended)
                shares.append([began.elapsed_time(mark) / total for mark in marks])
    return [median(each) for each in zip(*shares, strict=True)]
