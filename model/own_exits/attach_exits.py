"""``attach_exits``: makes an :class:`EarlyExitNetwork` of a model that returns the logits of several exits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..arguments import check_batch, check_module
from ..bad_input import BadInput
from ..early_exit_network import EarlyExitNetwork
from ..exit_rule import ExitRule
from ..fused_aux_head import FusedAuxHead
from ..listening.recording import RecordedPair, record, shortest
from ..reading import AnyExtract
from ..rounding import double_copy, in_double, relative_error, truth_of
from ..shallow_copy import shallow_copy
from .choose_heads import ChosenHead, HeadChooser
from .find_exits import BY_HAND, FoundExit, Mode
from .order_exits import order_exits
from .silenced_model import Answers, SilencedModel, SilentLayer, TakenExit, as_in_training
from .unhooked_exits import UnhookedExits, unhooked


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

    A model that leaves early by a rule of its own, or returns its exits in training mode alone, is run so that its own
    forward goes as in training mode, and all its layers' as in eval mode: the network's rules replace its own.

    A network of earlyon is known by its wrapper, and keeps its rules: thresholds, temperatures, which exits there are.
    Its heads are fused whole where all of them can be, and else as those of any model.

    Args:
        model: returns a list, tuple, dict or dataclass, nested or not, of logits [N, K], or of their softmax, or a
            stack [E, N, K] or [N, E, K]; or an earlyon wrapper. In eval mode.
        example: a batch that it takes, of which two samples are used. What is found holds for samples of this shape.
        rules: as for :class:`EarlyExitNetwork`, by tap; None are those of an earlyon wrapper, and else never exits.
        final: index, key or field of the classifier's logits in what the model returns (a tuple of them where they lie
            deeper), for models in which nothing tells which of two exits is the deeper one: they are refused without.

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
    for name, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) or not name and isinstance(layer, torch._dynamo.OptimizedModule):
            its = f"its layer {name!r} " if name else ""
            raise ValueError(
                f"model: {its}is a {type(layer).__name__}, whose layers cannot be seen; wants the module behind it"
            )
    if any(layer.training for layer in model.modules()):
        raise ValueError("model: in training mode, wants model.eval()")
    if lazy := [name for name, each in model.named_parameters() if is_lazy(each)]:
        raise ValueError(f"model: {lazy[0]!r} has no shape before a first batch; wants model(example) once, before")
    two = torch.cat([example[:2]] * 2)[:2]  # two samples, to tell a batch from a constant
    own = unhooked(model)
    if isinstance(own, UnhookedExits):
        network = _fused_whole(own, two) or _attach(own, two, None, len(own.rules))
        network.set_rules(_own_rules(own, network) if rules is None else rules)
    else:
        network = _attach(model, two, rules, final)
    sizes, dtype = list(two.shape[1:]), str(two.dtype).removeprefix("torch.")
    network.own_exits = {"input": sizes, "dtype": dtype, "final": list(final) if isinstance(final, tuple) else final}
    return network


def _attach(
    model: nn.Module, two: Tensor, rules: ExitRule | float | Mapping[str, ExitRule | float] | None, final: Any
) -> EarlyExitNetwork:
    """Make a network of a model that returns its exits, by recordings of a copy of it for two samples and for three."""
    copies: dict[nn.Module, nn.Module] = {}
    duplicate = shallow_copy(model, copies)
    originals = frozenset(copies.values()) - frozenset(copies)
    three = torch.cat([two, two[:1]]).flip(0)
    three = 2.0 * three if three.is_floating_point() else three
    with torch.inference_mode(False):
        answering, by_training = _answering(duplicate, two, three, originals)
        ordered = order_exits(answering, final)
        training = _training(duplicate, two, three, originals, ordered)
        backbone, chosen = _silence(duplicate, answering, ordered, training, by_training)
        heads = {one.tap: chosen[index].head for index, one in enumerate(backbone.exits[:-1])}
        extract: dict[str, AnyExtract] = {
            one.tap: its
            for one, its in zip(backbone.exits, (each.extract for each in chosen), strict=False)
            if its is not None
        }
        network = EarlyExitNetwork(backbone, heads, rules, example_input=two, extract=extract)
        with torch.no_grad():
            for x in (two, three):
                _check_logits(model, network, x)
    return network


def _pair(model: nn.Module, two: Tensor, three: Tensor, originals: frozenset[nn.Module]) -> RecordedPair:
    """Record a model for two samples and for three; ``ValueError`` if other operations run."""
    watched = record(model, two, watch_host=True, originals=originals)
    first, second = (record(model, x, originals=originals) for x in (two, three))
    for mine, its in zip(first.operations, second.operations, strict=False):
        if (mine.function, [each.number for each in mine.reads]) != (its.function, [each.number for each in its.reads]):
            raise BadInput(
                f"model: for three samples it runs {its} where it runs {mine} for two; wants a forward that does the "
                f"same for every batch{BY_HAND}"
            )
    if len(first.operations) != len(second.operations) or list(first.returned) != list(second.returned):
        raise BadInput("model: returns, or does, something else for three samples than for two" + BY_HAND)
    first.host_reads += watched.host_reads
    return RecordedPair(first, second)


def _answering(model: nn.Module, two: Tensor, three: Tensor, originals: frozenset[nn.Module]) -> tuple[Mode, bool]:
    """Return the mode in which a network of the model answers, and whether its forward goes as in training then."""
    mode: Mode | None = None
    try:
        mode = Mode(model, _pair(model, two, three, originals), "")
        mode.check()
        mode.check_not_random()
        return mode, False
    except Exception as error:  # whatever a user's module may raise, as one that reads a number of a batch of one
        if isinstance(error, BadInput) and mode is not None and len(mode.exits) > 1 and not mode.recording.host_reads:
            raise
        refused = error
    try:
        with as_in_training(model):
            pair = _pair(model, two, three, originals)
        mode = Mode(model, pair, " as in training mode")
        mode.check()
        mode.check_not_random()
        return mode, True
    except Exception as error:  # in a mode that nobody has asked for
        if isinstance(refused, BadInput) or not isinstance(error, BadInput):
            raise refused from None
        raise BadInput(f"model: for two samples it raises {refused!r}; {error}") from refused


def _training(
    model: nn.Module, two: Tensor, three: Tensor, originals: frozenset[nn.Module], ordered: Sequence[FoundExit]
) -> tuple[Mode, list[FoundExit]] | str:
    """Return the training mode, with the same exits in the same order, or why nothing is known of it."""
    try:
        model.train()
        pair = _pair(model, two, three, originals)
        learning = record(model, two, with_gradients=True, originals=originals)
    except Exception as error:  # whatever a user's module may raise
        return f"{error}" if isinstance(error, BadInput) else f"model: in training mode it raises {error!r}"
    finally:
        model.eval()
    # With gradients autograd's own operators run in between, so that only name and line can be compared.
    cut_off = {(each.name, each.line) for each in learning.operations if each.is_without_gradient}
    for operation in pair.first.operations:
        operation.is_without_gradient = (operation.name, operation.line) in cut_off
    mode = Mode(model, pair, " in training mode")
    try:
        mode.check()
    except BadInput as refused:
        return str(refused)
    by_key = {one.key: one for one in mode.exits}
    twins = [by_key.get(one.key) for one in ordered]
    found = [each for each in twins if each is not None]
    if len({id(each) for each in found}) < len(ordered) or len(by_key) < len(mode.exits):
        missing = [one.place.name for one, its in zip(ordered, twins, strict=True) if its is None]
        return f"model: in training mode it does not return the exits that it returns in eval mode at {missing}"
    return mode, found


def _silence(
    model: nn.Module,
    answering: Mode,
    ordered: Sequence[FoundExit],
    training: tuple[Mode, list[FoundExit]] | str,
    by_training: bool,
) -> tuple[SilencedModel, list[ChosenHead]]:
    """Take the heads out of a copy of a model; returns it as a backbone, and the heads in their order."""
    *early, last = ordered
    twins = [None] * len(ordered) if isinstance(training, str) else training[1]
    chooser = HeadChooser(answering, early, None if isinstance(training, str) else training[0])
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
        parent, _, child = name.rpartition(".")
        output = next(call.returned[()] for call in answering.recording.calls if call.name == name)
        silent = nn.Identity() if name == softmax else SilentLayer(output.shape[1:], output.dtype)
        layer = model.get_submodule(name)
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
        as_in_training=by_training,
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
    return TakenExit(one.place.name, name, tap, pool, one.value.shape[1], one.is_softmax, how)


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

    exact, allowed = truth_of(said(model, x), lambda: said(double_copy(model), in_double(x)))
    for y, truth, one in zip(network.logits(x.clone()), exact, backbone.exits, strict=True):
        error = relative_error([y.softmax(1) if one.softmax else y.log_softmax(1)], [truth])
        if not error <= allowed:
            raise ValueError(
                f"model: taken over, its exit {one.place!r} is off by {error:.2g} of the largest value, {allowed:.2g} "
                f"being allowed; wants heads that compute the same each time{BY_HAND}"
            )


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
