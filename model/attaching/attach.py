"""``attach``: makes an :class:`EarlyExitNetwork` of a model by placing heads behind some of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arguments import check_module, kind_of
from ..batches import Batch, check_input_batch, first_tensor, two_samples
from ..early_exit_network import EarlyExitNetwork
from ..fused_aux_head import FusedAuxHead
from ..listening.flow import Flow
from ..own_exits.attach_exits import attach_exits
from ..own_exits.unhooked_exits import is_earlyon
from ..reading import LOGITS, AnyExtract, part_of, parts_in_words
from .device_work import measured_work
from .placement import missed_targets, place_taps


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
        ValueError: there is no layer for a head, or one cannot be read; the message names layers that would work.
        TypeError: an argument of another type.
    """
    check_module("model", model)
    check_input_batch("example_input", example_input)
    if isinstance(taps, str) and taps != "auto":
        raise ValueError(f"taps: got {taps!r}, wants 'auto' or a list of names of layers")
    if not taps:
        raise ValueError("taps: got none, wants 'auto' or a list of names of layers")
    if not isinstance(taps, (str, Sequence)) or not all(isinstance(tap, str) for tap in taps):
        raise TypeError(f"taps: got {kind_of(taps)}, wants 'auto' or a list of names of layers")
    if taps == "auto" and is_earlyon(model) and isinstance(example_input, Tensor):
        return attach_exits(model, example_input)
    flow = Flow(model, two_samples(example_input))
    if taps == "auto" and _has_own_exits(flow.output, logits):
        assert isinstance(example_input, Tensor)
        return attach_exits(model, example_input)
    classes = _classes(flow.output, logits)
    if num_classes is not None and num_classes != classes:
        raise ValueError(f"num_classes: got {num_classes}, wants {classes}, as the model has")
    waiting = [name for name in flow.shapes if _pool(flow, name) == "first" and flow.first_token_is_constant(name)]
    if taps != "auto" and (named := [name for name in taps if name in waiting]):
        raise ValueError(
            f"taps: the first token behind {named[0]!r}, which heads of this model read, is the same for all samples; "
            "wants layers behind which it has seen the others"
        )
    cuts = [name for name in flow.cuts() if name not in waiting] if taps == "auto" else list(taps)
    work = _work(model, flow, cuts, example_input)
    names = place_taps(cuts, work) if taps == "auto" else cuts
    if not names:
        raise ValueError(
            "taps: 'auto' finds no layer of the model through which all goes that comes later; wants names of layers"
        )
    heads = {name: FusedAuxHead(None, classes, pool=_pool(flow, name)) for name in names}
    network = EarlyExitNetwork(model, heads, example_input=example_input, extract=extract, logits=logits)
    network.shares = {name: work[name] for name in names if name in work}
    if taps == "auto" and (missed := missed_targets([work[name] for name in names])):
        wanted = ", ".join(f"{share:.0%}" for share in missed)
        network.placement_note = f"no layer that may carry a head is near {wanted} of the work"
    return network


def _has_own_exits(output: Any, part: int | str | None) -> bool:
    """Return whether a model returns several tensors [N, K], of which none is named as its logits."""
    if part is not None or isinstance(output, Tensor):
        return False
    try:
        return not isinstance(part_of(output, LOGITS), Tensor)
    except ValueError:
        parts = vars(output) if is_dataclass(output) else output
        tensors = [each for each in tree_leaves(parts) if isinstance(each, Tensor)]
        return len(tensors) > 1 and tensors[0].ndim == 2 and len({each.shape for each in tensors}) == 1


def _classes(output: Any, part: int | str | None) -> int:
    """Return the number of classes of what a model returned; as the dry run of a network, which says what is wrong."""
    picked = output if isinstance(output, Tensor) else part_of(output, LOGITS if part is None else part)
    if not (isinstance(picked, Tensor) and picked.ndim == 2):
        raise ValueError(f"model: returned {parts_in_words(picked)}, wants logits [N, num_classes]")
    return picked.shape[1]


def _work(model: nn.Module, flow: Flow, layers: Sequence[str], x: Batch) -> Mapping[str, float]:
    """Return the share of the model's work that is done when each layer returns, where that is known."""
    known = [name for name in layers if name in flow.shapes]
    if first_tensor(x).device.type != "cuda":
        return dict(zip(known, flow.work_at(known), strict=True))
    return dict(zip(known, measured_work(model, known, x), strict=True))


def _pool(flow: Flow, layer: str) -> str:
    """Return how a head pools what a layer returns."""
    shape = flow.shapes.get(layer, ())
    return "first" if len(shape) == 3 and shape[1] in flow.first_token_of else "avg"
