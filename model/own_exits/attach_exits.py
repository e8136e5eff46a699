"""``attach_exits``: makes an :class:`EarlyExitNetwork` of a model that returns the logits of several exits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_batch, check_module
from ..early_exit_network import EarlyExitNetwork
from ..exit_rule import ExitRule
from ..fused_aux_head import FusedAuxHead
from ..head_modules import module_of_activation
from ..reading import Extract
from ..rounding import double_copy, in_double, relative_error, truth_of
from ..shallow_copy import shallow_copy
from .find_exits import ExitCalls, FoundExits, find_exits, shortest
from .silenced_model import FoundExit, SilencedModel, SilentHead
from .unhooked_exits import UnhookedExits, unhooked


def attach_exits(
    model: nn.Module, example: Tensor, *, rules: ExitRule | float | Mapping[str, ExitRule | float] | None = None
) -> EarlyExitNetwork:
    """Make a network of a model that has exits of its own; the model stays as it is, and shares its parameters.

    The model is run a few times to find its heads, whatever they are called and however they are written: each returned
    tensor is the output of an ``nn.Linear``, or the softmax of one. Where a layer's output, pooled as fused heads pool,
    is the input of that linear layer, or of a hidden one with its activation and a LayerNorm before it that fused heads
    know, all of the head is fused, and else the linear layer alone: other layers, norms and convolutions before it then
    run as a part of the backbone. The exit that runs last stays the backbone's own
    classifier; in what order the exits are returned does not matter.

    A network of earlyon is known by its wrapper, and keeps its rules: thresholds, temperatures, which exits there are.
    Its heads are fused whole where all of them can be, and else as those of any model.

    Args:
        model: returns a list, tuple, dict or dataclass of logits [N, K], or of their softmax; or an earlyon wrapper. In
            eval mode.
        example: a batch that it takes, of which two samples are used. What is found holds for samples of this shape.
        rules: as for :class:`EarlyExitNetwork`, by tap; None are those of an earlyon wrapper, and else never exits.

    Returns:
        EarlyExitNetwork: its ``backbone.exits`` says what was found, in the order of the exits. Its backbone holds a
        copy of the model, called ``model``, without the heads. Of an earlyon network whose heads are fused whole, it is
        a copy of that one's backbone, with its taps.

    Raises:
        ValueError: an exit that cannot be found or fused, with the module and what is wanted; or a model that computes
            something else without its heads, because it uses their logits further on.
        TypeError: an argument of another type.
    """
    check_module("model", model)
    check_batch("example", example)
    if isinstance(model, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
        raise ValueError(f"model: is a {type(model).__name__}, whose layers cannot be seen; wants the module behind it")
    if any(layer.training for layer in model.modules()):
        raise ValueError("model: in training mode, wants model.eval()")
    two = torch.cat([example[:2]] * 2)[:2]  # two samples, to tell a batch from a constant
    own = unhooked(model)
    if isinstance(own, UnhookedExits):
        network = _fused_whole(own, two) or _attach(own, two, None)
        network.set_rules(_own_rules(own, network) if rules is None else rules)
    else:
        network = _attach(model, two, rules)
    network.own_exits = {"input": list(two.shape[1:]), "dtype": str(two.dtype).removeprefix("torch.")}
    return network


def _attach(
    model: nn.Module, two: Tensor, rules: ExitRule | float | Mapping[str, ExitRule | float] | None
) -> EarlyExitNetwork:
    """Make a network of a model that returns its exits, found by what they compute on two samples."""
    duplicate = shallow_copy(model, {})
    with torch.inference_mode(False):
        found = find_exits(duplicate, two)
        backbone, heads = _silence(duplicate, found)
        with torch.no_grad():
            truth = _Truth(model, backbone, two)
            truth.check_silence()
        extract = {tap: Extract(layout=layout) for tap, layout in _layouts(found, list(heads)).items()}
        network = EarlyExitNetwork(backbone, heads, rules, example_input=two, extract=extract)
        with torch.no_grad():
            truth.check_logits(network)
    return network


def _fused_whole(own: UnhookedExits, two: Tensor) -> EarlyExitNetwork | None:
    """Make a network of an earlyon network's backbone and its heads, if all of them can be fused whole."""
    with torch.inference_mode(False):
        network = own.fused(two)
        if network is None:
            return None
        with torch.no_grad():
            exact, allowed = truth_of(own(two), lambda: double_copy(own)(in_double(two)))
            error = relative_error(network.logits(two.clone()), exact)
    if not error <= allowed:
        raise ValueError(
            f"model: with fused heads its exits are off by {error:.2g} of the largest value, {allowed:.2g} being "
            "allowed; wants heads that compute the same each time"
        )
    return network


def _own_rules(own: UnhookedExits, network: EarlyExitNetwork) -> dict[str, ExitRule]:
    """Return an earlyon network's rules by the taps of the network that was made of it."""
    places: Sequence[int | str] = range(len(own.rules))
    if isinstance(network.backbone, SilencedModel):
        places = [one.place for one in network.backbone.exits[:-1]]
    return {tap: own.rules[int(place)] for tap, place in zip(network.taps, places, strict=True)}


def _silence(model: nn.Module, found: FoundExits) -> tuple[SilencedModel, dict[str, FusedAuxHead]]:
    """Take the heads out of a copy of a model; returns it as a backbone, and fused heads by its taps."""
    heads: dict[str, FusedAuxHead] = {}
    exits: list[FoundExit] = []
    replaced: dict[nn.Module, nn.Module] = {}
    *early, last = found.exits
    for one in early:
        assert one.linear is not None and one.silenced is not None and one.whole is not None
        silent = SilentHead(one.classes, tapped=one.source is None)
        tapped = one.silenced.module if one.source is None else one.source.call.module
        tap = f"model.{shortest(found.names[tapped])}{'.input' if one.source is None else ''}"
        heads[tap] = head = _fused(one, found)
        replaced[one.silenced.module] = silent
        pool = head.pool if head.pool_size == (1, 1) else f"{head.pool} {head.pool_size[0]}x{head.pool_size[1]}"
        in_line = one.source is None or one.silenced is not one.whole
        name = shortest(found.names[one.whole.module])
        exits.append(FoundExit(one.place, name, tap, pool, one.classes, one.probabilities, in_line))
    name = "" if last.whole is None else shortest(found.names[last.whole.module])
    exits.append(FoundExit(last.place, name, "", "", last.classes, last.probabilities, False))
    if found.softmax is not None:
        replaced[found.softmax.module] = nn.Identity()
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    softmax = last.probabilities and found.softmax is None
    backbone = SilencedModel(model, tuple(exits), by_attribute=found.by_attribute, softmax=softmax)
    return backbone.eval(), heads


def _layouts(found: FoundExits, taps: Sequence[str]) -> dict[str, str]:
    """Return the layouts in which heads read their taps: pools were found for the dimensions in just this order."""
    by_rank = {3: "NTD", 4: "NCHW"}
    sources = (one.source for one in found.exits[:-1])
    ranks = (0 if source is None else source.call.y.ndim for source in sources)
    return {tap: by_rank[rank] for tap, rank in zip(taps, ranks, strict=True) if rank in by_rank}


def _fused(one: ExitCalls, found: FoundExits) -> FusedAuxHead:
    """Return an exit as a fused head that shares the parameters of its linear layer."""
    assert one.linear is not None and one.silenced is not None
    try:
        head = FusedAuxHead.from_module(nn.Sequential(*_layers(one), one.linear.module).eval())
    except ValueError as error:
        name = shortest(found.names[one.linear.module])
        reason = str(error).removeprefix("module: ")
        raise ValueError(f"model: its exit {one.place!r} ends in {name!r}, which cannot be fused: {reason}") from None
    if one.source is not None:
        head.pool, head.pool_size = one.source.pool, one.source.pool_size
    whole = one.silenced if one.hidden is None else one.whole
    for part in () if whole is None else whole.module.modules():  # which no longer drops anything itself
        if type(part) is nn.Dropout:
            its = head.hidden if one.hidden is not None and part in one.hidden.dropouts else head
            assert its is not None
            its.dropout = 1.0 - (1.0 - its.dropout) * (1.0 - part.p)
    return head


def _layers(one: ExitCalls) -> list[nn.Module]:
    """Return the layers of a head before its last linear one."""
    if one.hidden is None:
        return []
    norm, linear, activation, _ = one.hidden
    return [*([] if norm is None else [norm.module]), linear.module, module_of_activation(activation)]


class _Truth:
    """The answers of the model as it was, to compare what was made of it with."""

    def __init__(self, model: nn.Module, backbone: SilencedModel, example: Tensor) -> None:
        self._backbone, self._example = backbone, example
        self._exact, self._allowed = truth_of(
            self._said(model, example), lambda: self._said(double_copy(model), in_double(example))
        )

    def _said(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        """Return the softmax of exits of which the model returns that, and the logarithm of it of all others."""
        found = zip(answers_of(model, self._backbone, x), self._backbone.exits, strict=True)
        return [y if one.softmax else y.log_softmax(1) for y, one in found]

    def _error(self, logits: Tensor, place: int) -> float:
        softmax = self._backbone.exits[place].softmax
        return relative_error([logits.softmax(1) if softmax else logits.log_softmax(1)], [self._exact[place]])

    def check_silence(self) -> None:
        """Raise ``ValueError`` unless the last exit is what it was, whatever silent heads return."""
        heads = [part for part in self._backbone.modules() if isinstance(part, SilentHead)]
        for saying in (_nothing, _surely_the_first):
            hooks = [part.register_forward_hook(saying) for part in heads]
            try:
                error = self._error(self._backbone(self._example.clone()), -1)
            except Exception as raised:
                raise ValueError(f"model: does not run on without its heads: {raised!r}") from raised
            finally:
                for hook in hooks:
                    hook.remove()
            if not error <= self._allowed:
                raise ValueError(
                    "model: its last exit uses what earlier exits say; wants one that does without their logits"
                )

    def check_logits(self, network: EarlyExitNetwork) -> None:
        """Raise ``ValueError`` unless all exits of the network say what the model's do."""
        for place, logits in enumerate(network.logits(self._example.clone())):
            error = self._error(logits, place)
            if not error <= self._allowed:
                raise ValueError(
                    f"model: with fused heads its exit {self._backbone.exits[place].place!r} is off by {error:.2g} of "
                    f"the largest value, {self._allowed:.2g} being allowed; wants heads that compute the same each time"
                )


def answers_of(model: nn.Module, backbone: SilencedModel, x: Tensor) -> list[Tensor]:
    """Return what a model says at each of its exits, in the order of the network that was made of it."""
    answers = model(x.clone(memory_format=torch.preserve_format))  # which it may change in place
    return [backbone.pick(answers, one) for one in backbone.exits]


def _nothing(_module: nn.Module, _inputs: Any, y: Tensor) -> None:
    y.fill_(torch.nan)


def _surely_the_first(_module: nn.Module, _inputs: Any, y: Tensor) -> None:
    y.zero_()
    y[:, 0] = 1e4
