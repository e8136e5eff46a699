"""``attach_exits``: makes an :class:`EarlyExitNetwork` of a model that returns the logits of several exits."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..answers.exit_rule import ExitRule
from ..basics.arguments import check_batch, check_mode, check_module
from ..basics.bad_input import BadInput
from ..heads.fused_aux_head import FusedAuxHead
from ..listening.reading import AnyExtract
from ..listening.recorder import kept, record
from ..listening.recording import RecordedPair, shortest
from ..listening.rounding import double_copy, in_double, relative_error, truth_of
from ..listening.shallow_copy import shallow_copy
from ..network.early_exit_network import EarlyExitNetwork
from .choose_heads import ChosenHead, HeadChooser
from .find_exits import BY_HAND, FoundExit, Mode
from .order_exits import order_exits
from .silenced_model import Answers, SilencedModel, SilentLayer, TakenExit, as_in_training
from .unhooked_exits import UnhookedExits, unhooked

_RecordPair = Callable[..., RecordedPair]


def attach_exits(
    model: nn.Module,
    example: Tensor,
    *,
    rules: ExitRule | float | Mapping[str, ExitRule | float] | None = None,
    final: Any = None,
) -> EarlyExitNetwork:
    """Make a network of a model that has exits of its own; the model stays as it is, and shares its parameters.

    The operations of the model are recorded, in eval and in training mode, and what follows from them holds whatever
    its parameters become. An exit is fused if all between its logits and a layer of the backbone is a head that fused
    heads know: pool, flatten, LayerNorm, one or two plain linear layers, an activation, dropout. What else there is
    runs as the model's own code: beside the backbone where it reads one value of that, and else in line. The deepest
    exit stays the backbone's own classifier, in whatever order the exits are returned.

    A model that leaves early by a rule of its own, or returns its exits in training mode alone, goes as in training in
    its own forward, and in those of layers that call the heads of several exits: the network's rules replace its own.

    A network of earlyon is known by its wrapper, and keeps its rules: thresholds, temperatures, which exits there are.
    Its heads are fused whole where all of them can be, and else as those of any model.

    Args:
        model: returns a list, tuple, dict or dataclass, nested or not, of logits [N, K], or of their softmax, or a
            stack [E, N, K] or [N, E, K]; or an earlyon wrapper. In eval mode.
        example: a batch that it takes, of which two samples are used. What is found holds for samples of this shape.
        rules: as for :class:`EarlyExitNetwork`, by tap; None are those of an earlyon wrapper, and else never exits.
        final: index, key or field of the classifier's logits in what the model returns (a tuple of them where they lie
            deeper), for models in which nothing tells which of their exits is the deepest: they are refused without.

    Returns:
        EarlyExitNetwork: its ``backbone.exits`` says what was found, in the order of the exits. Its backbone holds a
        copy of the model, called ``model``, without the heads. Of an earlyon network whose heads are fused whole, it is
        a copy of that one's backbone, with its taps.

    Raises:
        ValueError: an exit that cannot be found or fused, with the module and what is wanted; or a model that computes
            something else without its heads, because it uses their logits further on.
        TypeError: an argument of another type.

    Example:
        >>> class TwoExits(nn.Sequential):
        ...     def forward(self, x):
        ...         x = self[0](x)
        ...         return self[1](x.mean((2, 3))), self[2](x.flatten(1))
        >>> model = TwoExits(nn.Conv2d(3, 8, 3), nn.Linear(8, 5), nn.Linear(8 * 36, 5)).eval()
        >>> network = attach_exits(model, torch.randn(2, 3, 8, 8), rules=0.9)
        >>> network.taps, network.exit_heads[0].rule.enabled
        (('model.0',), True)
    """
    check_model(model)
    check_batch("example", example)
    for name, layer in model.named_modules():
        kinds = torch.jit.ScriptModule, torch._dynamo.OptimizedModule
        if isinstance(layer, kinds) or layer._compiled_call_impl is not None:
            its = f"its layer {name!r} " if name else ""
            kind = type(getattr(layer, "_orig_mod", layer)).__name__
            what = kind if isinstance(layer, torch.jit.ScriptModule) else f"compiled {kind}"
            raise ValueError(f"model: {its}is a {what}, whose layers cannot be seen; wants the module behind it")
    check_mode(model, "model")
    if lazy := [name for name, each in model.named_parameters() if is_lazy(each)]:
        raise ValueError(f"model: {lazy[0]!r} has no shape before a first batch; wants model(example) once, before")
    two = torch.cat([example[:2]] * 2)[:2]  # two samples, to tell a batch from a constant
    own = unhooked(model)
    if isinstance(own, UnhookedExits):
        network = _fused_whole(own, two) or _attach(own, two, example[:9], None, len(own.rules))
        network.set_rules(_own_rules(own, network) if rules is None else rules)
    else:
        network = _attach(model, two, example[:9], rules, final)
    sizes, dtype = list(two.shape[1:]), str(two.dtype).removeprefix("torch.")
    network.own_exits = {"input": sizes, "dtype": dtype, "final": list(final) if isinstance(final, tuple) else final}
    return network


def check_model(model: object) -> None:
    """Raise ``TypeError`` unless a model is a module, and one that has no heads of ours yet; or it is compiled."""
    check_module("model", model)
    if isinstance(model, torch._dynamo.OptimizedModule):
        kind = type(model._orig_mod).__name__
        raise ValueError(
            f"model: is a compiled {kind}, whose layers cannot be seen; wants the module behind it, model._orig_mod"
        )
    if isinstance(model, EarlyExitNetwork):
        raise TypeError("model: got an EarlyExitNetwork, wants a model without heads, as its network.backbone")


def _attach(
    model: nn.Module,
    two: Tensor,
    more: Tensor,
    rules: ExitRule | float | Mapping[str, ExitRule | float] | None,
    final: Any,
) -> EarlyExitNetwork:
    """Make a network of a model that returns its exits, by recordings of a copy of it for two samples and for three."""
    copies: dict[nn.Module, nn.Module] = {}
    duplicate = shallow_copy(model, copies)
    originals = frozenset(copies.values()) - frozenset(copies)
    three = torch.cat([two, two[:1]]).flip(0)
    three = 2.0 * three if three.is_floating_point() else three
    with torch.inference_mode(False), kept(duplicate, two.device):
        record_pair = partial(_pair, duplicate, two, three, originals)
        training = _training(duplicate, record_pair)
        answering, choosing = _answering(duplicate, record_pair, training)
        ordered = order_exits(answering, final)
        backbone, chosen = _silence(duplicate, answering, ordered, _matched(training, ordered), choosing)
        heads = {one.tap: chosen[index].head for index, one in enumerate(backbone.exits[:-1])}
        extract: dict[str, AnyExtract] = {
            one.tap: its.extract for one, its in zip(backbone.exits, chosen, strict=False) if its.extract is not None
        }
        network = EarlyExitNetwork(backbone, heads, rules, example_input=two, extract=extract)
        with torch.no_grad():
            for x in (two, three, two[:1], more):
                _check_logits(shallow_copy(model, {}), network, x)
    return network


def _pair(
    model: nn.Module, two: Tensor, three: Tensor, originals: frozenset[nn.Module], *, with_gradients: bool = False
) -> RecordedPair:
    """Record a model for two samples and for three; ``ValueError`` if other operations run."""
    watched = record(model, two, watch_host=True, with_gradients=with_gradients, originals=originals)
    first, second = (record(model, x, with_gradients=with_gradients, originals=originals) for x in (two, three))
    for mine, its in zip(first.operations, second.operations, strict=False):
        if (mine.function, [each.number for each in mine.reads]) != (its.function, [each.number for each in its.reads]):
            raise BadInput(
                f"model: for three samples it runs {its} where it runs {mine} for two; wants a forward that does the "
                f"same for every batch{BY_HAND}"
            )
    if len(first.operations) != len(second.operations) or list(first.returned) != list(second.returned):
        raise BadInput("model: returns, or does, something else for three samples than for two" + BY_HAND)
    first.host_reads += watched.host_reads
    with suppress(Exception):  # it may take no batches of one; of one alone it may ask what its own rule says
        first.host_reads += record(model, two[:1], watch_host=True, originals=originals).host_reads
    return RecordedPair(first, second)


def _answering(model: nn.Module, record_pair: _RecordPair, training: Mode | str) -> tuple[Mode, tuple[str, ...]]:
    """Return the mode in which a network of the model answers, and the layers that go as in training mode then."""
    own: Mode | None = None
    try:
        own = Mode(model, record_pair(), "")
        own.check()
        return own, ()
    except Exception as error:  # whatever a user's module may raise, as one that reads a number of a batch of one
        if isinstance(error, BadInput) and own is not None and len(own.exits) > 1 and not own.recording.host_reads:
            raise
        refused = error
    choosing = ("",) if isinstance(training, str) else training.choosing()
    try:
        with as_in_training(model, choosing):
            mode = Mode(model, record_pair(), " as in training mode")
        mode.check()
    except Exception as error:  # in a mode that nobody has asked for
        if isinstance(error, BadInput) and not isinstance(refused, BadInput):
            raise BadInput(f"model: for two samples it raises {refused!r}; {error}") from refused
        if isinstance(refused, BadInput) and not isinstance(error, BadInput):
            raise BadInput(f"{refused}; as in training mode it raises {error!r}") from error
        raise refused from None
    if own is not None:
        mode.check_says_what(own)
    return mode, choosing


def _training(model: nn.Module, record_pair: _RecordPair) -> Mode | str:
    """Return the training mode, or why nothing is known of it."""
    try:
        model.train()
        return Mode(model, record_pair(with_gradients=True), " in training mode")
    except Exception as error:  # whatever a user's module may raise
        return f"{error}" if isinstance(error, BadInput) else f"model: in training mode it raises {error!r}"
    finally:
        model.eval()


def _matched(mode: Mode | str, ordered: Sequence[FoundExit]) -> tuple[Mode, list[FoundExit]] | str:
    """Return the training mode, with the same exits in the same order, or why it cannot be trained in."""
    if isinstance(mode, str):
        return mode
    try:
        mode.check(may_be_random=True)
    except BadInput as refused:
        return str(refused)
    found = []
    for one in ordered:
        mine, its = _by_depth(ordered, one.key), _by_depth(mode.exits, one.key)
        if one not in mine or len(mine) != len(its):
            return f"model: in training mode it does not return the exit of eval mode at {one.place.name!r}"
        found.append(its[mine.index(one)])
    return mode, found


def _by_depth(exits: Sequence[FoundExit], key: tuple[str, ...]) -> list[FoundExit]:
    """Return the exits that use some parameters; one each where layers run several times, from the shallowest."""
    by_depth = {len(one.needs): one for one in exits if one.key == key}
    return [by_depth[depth] for depth in sorted(by_depth)]


def _silence(
    model: nn.Module,
    answering: Mode,
    ordered: Sequence[FoundExit],
    training: tuple[Mode, list[FoundExit]] | str,
    choosing: tuple[str, ...],
) -> tuple[SilencedModel, list[ChosenHead]]:
    """Take the heads out of a copy of a model; returns it as a backbone, and the heads in their order."""
    *early, last = ordered
    mode, twins = (answering, ordered) if isinstance(training, str) else training
    chooser = HeadChooser(answering, early, mode)
    chosen: list[ChosenHead] = []
    latest: int | None = -1
    for one, its in zip(early, twins, strict=False):
        head = chooser.choose(one, its, after=latest)
        latest = None if head.tap is None else head.tap.order
        chosen.append(head)
    exits, late = [], []
    for index, (one, head) in enumerate(zip(early, chosen, strict=True)):
        late += [index] if head.tap is None else []
        tap = f"late.{index}" if head.tap is None else f"model.{head.tap.layer}"
        exits.append(_taken(answering, one, tap, head))
    exits.append(_taken(answering, last, "", None))
    softmax = _softmax_layer(answering, last)
    for name in {name for each in chosen for name in each.silenced} | {softmax} - {None}:
        assert name is not None
        output = next(call.returned[()] for call in answering.recording.calls if call.name == name)
        layer = model.get_submodule(name)
        silent = nn.Identity() if name == softmax else SilentLayer(layer, output.shape[1:], output.dtype)
        for part in list(model.modules()):
            for key, its_child in part._modules.items():
                if its_child is layer:
                    part._modules[key] = silent
    backbone = SilencedModel(
        model,
        tuple(exits),
        _answers(ordered, softmax),
        training if isinstance(training, str) else _answers(training[1], softmax),
        late=tuple(late),
        as_in_training=choosing,
    )
    return backbone.eval(), chosen


def _taken(mode: Mode, one: FoundExit, tap: str, chosen: ChosenHead | None) -> TakenExit:
    pool = ""
    if chosen is not None and isinstance(head := chosen.head, FusedAuxHead):
        pool = head.pool if head.pool_size == (1, 1) else f"{head.pool} {head.pool_size[0]}x{head.pool_size[1]}"
    made = {one.value} if isinstance(one.chain, str) else {one.value, one.chain.logits}
    calls = (call for call in mode.recording.calls if call.name and len(call.returned) == 1)
    whole = [call.name for call in calls if not made.isdisjoint(call.returned.values())]
    name, how = shortest(whole) if whole else "", "" if chosen is None else chosen.how
    skips = chosen is not None and chosen.skips
    return TakenExit(one.place.name, name, tap, pool, one.value.shape[1], one.is_softmax, how, skips)


def _answers(exits: Sequence[FoundExit], softmax: str | None) -> Answers:
    softmaxes = [one.is_softmax for one in exits]
    if softmax is not None:
        softmaxes[-1] = False
    return Answers(tuple(one.place for one in exits), tuple(softmaxes))


def _softmax_layer(mode: Mode, last: FoundExit) -> str | None:
    """Return the layer that makes probabilities of the last exit's logits, if one does that and nothing else."""
    layers = [
        call for call in mode.recording.calls if type(call.layer) is nn.Softmax and call.returned.get(()) is last.value
    ]
    return layers[0].name if layers and last.is_softmax and mode.runs_once(layers[0].layer) else None


def _check_logits(model: nn.Module, network: EarlyExitNetwork, x: Tensor) -> None:
    """Raise ``ValueError`` unless all exits of a network say what the model's do: a net below what was proved."""
    backbone = network.backbone
    if not isinstance(backbone, SilencedModel):
        return
    logs = [one.softmax for one in backbone.exits]

    def said(one: nn.Module, x: Tensor) -> list[Tensor]:
        answers = backbone.answers_of(one, x)
        return [y if log else y.log_softmax(1) for y, log in zip(answers, logs, strict=True)]

    try:
        own = said(model, x)
    except Exception:  # the model takes no batches of so many samples; those that were recorded it does
        return
    exact, allowed = truth_of(own, lambda: said(double_copy(model), in_double(x)))
    for y, truth, one in zip(network.logits(x.clone()), exact, backbone.exits, strict=True):
        y = y.softmax(1) if one.softmax else y.log_softmax(1)
        _refuse_if_off([y], [truth], allowed, f"taken over, its exit {one.place!r} is")


def _refuse_if_off(said: list[Tensor], exact: list[Tensor], allowed: float, what_is: str) -> None:
    error = relative_error(said, exact)
    if not error <= allowed:
        raise ValueError(
            f"model: {what_is} off by {error:.2g} of the largest value, {allowed:.2g} being allowed, for a batch of "
            f"{len(exact[0])}; wants exits that compute the same each time, for batches of all sizes{BY_HAND}"
        )


def _fused_whole(own: UnhookedExits, two: Tensor) -> EarlyExitNetwork | None:
    """Make a network of an earlyon network's backbone and its heads, if all of them can be fused whole."""
    with torch.inference_mode(False):
        network = own.fused(two)
        if network is None:
            return None
        with torch.no_grad():
            exact, allowed = truth_of(own(two), lambda: double_copy(own)(in_double(two)))
            _refuse_if_off(network.logits(two.clone()), exact, allowed, "with fused heads its exits are")
    return network


def _own_rules(own: UnhookedExits, network: EarlyExitNetwork) -> dict[str, ExitRule]:
    """Return an earlyon network's rules by the taps of the network that was made of it."""
    places: Sequence[int | str] = range(len(own.rules))
    if isinstance(network.backbone, SilencedModel):
        places = [one.place for one in network.backbone.exits[:-1]]
    return {tap: own.rules[int(place)] for tap, place in zip(network.taps, places, strict=True)}
