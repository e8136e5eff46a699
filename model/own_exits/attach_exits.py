"""``attach_exits``: makes an :class:`EarlyExitNetwork` of a model that returns the logits of several exits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..answers.exit_rule import ExitRule
from ..basics.arguments import check_batch, check_mode
from ..basics.bad_input import BadInput
from ..listening.batches import two_samples
from ..listening.hooks import is_earlyon
from ..listening.kept import kept, shallow_copy
from ..listening.reading import AnyExtract
from ..listening.recorder import may_nest, record
from ..listening.recording import Operation, RecordedPair, Recording, shortest
from ..listening.rounding import double_copy, in_double, truth_of
from ..network.early_exit_network import EarlyExitNetwork, check_model
from .choose_heads import ChosenHead, HeadChooser
from .find_exits import BY_HAND, FoundExit, Mode, refuse_if_off
from .head_chain import HeadChain
from .silenced_model import Answers, SilencedModel, SilentLayer, TakenExit, as_in_training


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
    two = two_samples(example)
    if is_earlyon(model):
        from .unhooked_exits import attach_unhooked  # which nobody else needs

        network = attach_unhooked(model, two, rules, lambda own, last: _attach(own, two, example[:9], None, last))
    else:
        network = _attach(model, two, example[:9], rules, final)
    sizes, dtype = list(two.shape[1:]), str(two.dtype).removeprefix("torch.")
    network.own_exits = {"input": sizes, "dtype": dtype, "final": list(final) if isinstance(final, tuple) else final}
    return network


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
    run = partial(record, duplicate, originals=frozenset(copies.values()) - frozenset(copies), lines=True)
    three = torch.cat([two, two[:1]]).flip(0)
    three = 2.0 * three if three.is_floating_point() else three
    with torch.inference_mode(False), kept(duplicate, two.device):
        firsts = _first_runs(duplicate, run, two)
        recorded = partial(_pair, run, two, three, nests=may_nest(duplicate))
        training = _training(duplicate, partial(recorded, firsts.get(True)))
        answering, choosing = _answering(duplicate, recorded, firsts.get(False), training)
        ordered = _ordered(answering, final)
        backbone, chosen = _silence(duplicate, answering, ordered, _matched(training, ordered), choosing)
        heads = {one.tap: chosen[index].head for index, one in enumerate(backbone.exits[:-1])}
        extract: dict[str, AnyExtract] = {
            one.tap: its.extract for one, its in zip(backbone.exits, chosen, strict=False) if its.extract is not None
        }
        network = EarlyExitNetwork(backbone, heads, rules, example_input=two, extract=extract)
        _check_logits(shallow_copy(model, {}), network, backbone, (three, two[:1], more))
    return network


def _first_runs(model: nn.Module, run: Callable[..., Recording], two: Tensor) -> dict[bool, Recording]:
    """Record each mode once, by whether it is training; ``ValueError`` at once if both return one tensor [N, K]."""
    found: dict[bool, Recording] = {}
    for in_training in (False, True):
        with suppress(Exception):  # whatever a user's module may raise, which is told where modes are looked at
            model.train(in_training)
            found[in_training] = run(two, with_gradients=in_training)
        model.eval()
    shapes = [[len(value.shape) for value in one.returned.values()] for one in found.values()]
    if shapes == [[2], [2]] and not any(one.draws or one.replaced or one.host_reads for one in found.values()):
        Mode(model, RecordedPair(found[False], found[False]), "").check()
    return found


def _pair(
    run: Callable[..., Recording],
    two: Tensor,
    three: Tensor,
    first: Recording | None,
    *,
    nests: bool,
    with_gradients: bool = False,
) -> RecordedPair:
    """Record a model for two samples and for three; ``ValueError`` if other operations run."""
    alike = partial(run, with_gradients=with_gradients, watch_host=not nests)
    if first is None or nests:
        first = alike(two)
    second = alike(three)
    for mine, its in zip(first.operations, second.operations, strict=False):
        if (mine.function, [each.number for each in mine.reads]) != (its.function, [each.number for each in its.reads]):
            raise BadInput(
                f"model: for three samples it runs {its} where it runs {mine} for two; wants a forward that does the "
                f"same for every batch{BY_HAND}"
            )
    if len(first.operations) != len(second.operations) or list(first.returned) != list(second.returned):
        raise BadInput("model: returns, or does, something else for three samples than for two" + BY_HAND)
    if nests:
        first.host_reads += run(two, with_gradients=with_gradients).host_reads
    with suppress(Exception):  # it may take no batches of one; of one alone it may ask what its own rule says
        first.host_reads += run(two[:1]).host_reads
    return RecordedPair(first, second)


def _answering(
    model: nn.Module, recorded: Callable[..., RecordedPair], first: Recording | None, training: Mode | str
) -> tuple[Mode, tuple[str, ...]]:
    """Return the mode in which a network of the model answers, and the layers that go as in training mode then."""
    own: Mode | None = None
    try:
        own = Mode(model, recorded(first), "")
        own.check()
        return own, ()
    except Exception as error:  # whatever a user's module may raise, as one that reads a number of a batch of one
        if isinstance(error, BadInput) and own is not None and len(own.exits) > 1 and not own.recording.host_reads:
            raise
        refused = error
    choosing = ("",) if isinstance(training, str) else training.choosing()
    try:
        with as_in_training(model, choosing):
            mode = Mode(model, recorded(None), " as in training mode")
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


def _training(model: nn.Module, recorded: Callable[..., RecordedPair]) -> Mode | str:
    """Return the training mode, or why nothing is known of it."""
    try:
        model.train()
        return Mode(model, recorded(with_gradients=True), " in training mode")
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


def _ordered(mode: Mode, final: Any) -> list[FoundExit]:
    """Return the exits by how deep in the backbone their branches leave it, the classifier last.

    What two exits share at most ends where two branches at least leave it: a head, and the rest of the backbone with
    its classifier. Which of them is the classifier is told where all others are heads that can be fused, and it has
    layers of maps or tokens. Else the order in which exits are returned decides, if that agrees with the work that
    the branches do on those. Where none of them has any, and an exit returned behind them does more of that work, they
    are heads that share layers of their own.

    Args:
        mode: the model in eval mode.
        final: the place of the classifier, if its owner has said it.

    Raises:
        ValueError: nothing decides; names the exits that it may be.
    """
    exits = mode.exits
    pairs = [(one, one.needs & other.needs) for one in exits for other in exits if other is not one]
    deepest = max((both for _, both in pairs), key=_work)
    last = _final(
        mode, deepest, [one for one in exits if any(each is one and both == deepest for each, both in pairs)], final
    )
    return [*sorted((one for one in exits if one is not last), key=lambda one: _depth(one, last, mode)), last]


def _final(mode: Mode, deepest: set[Operation], tied: list[FoundExit], final: Any) -> FoundExit:
    exits = mode.exits
    if final is not None:
        named = [one for one in exits if one.place.name == final]
        if not named:
            raise ValueError(f"final: got {final!r}, wants one of {[one.place.name for one in exits]}")
        return named[0]
    rest = [one for one in tied if not _is_head_of_shared(one)]
    work = [_flops_on_maps(one.branch, mode) for one in tied]
    costliest = [one for one, its in zip(tied, work, strict=True) if its == max(work)]
    returned = _at_an_end(exits, deepest)
    in_all = [_flops_on_maps(one.needs, mode) for one in exits]
    beside = [one for one, its in zip(exits, in_all, strict=True) if its == max(in_all) and one not in tied]
    goes_on = any(_flops_on_maps(one.branch, mode) for one in exits if one not in tied)
    if not max(work) and beside == [exits[-1]]:  # the others are heads that share layers of their own
        return exits[-1]
    if exits[-1] not in beside and (max(work) or not goes_on or exits[-1] in tied and not beside):
        if len(rest) == 1 and rest == costliest and max(work) and (rest[0] in returned or not returned):
            return rest[0]
        alone = [one for one in tied if len(one.place.path) < max(len(other.place.path) for other in exits)]
        for likeliest in (*returned[:1], *(alone if len(alone) == 1 else [])):
            if likeliest in costliest:
                return likeliest
    likely = (returned if len(returned) == 1 else costliest)[0].place.name
    named = [*tied, *beside, *([exits[-1]] if goes_on else [])]
    names = [one.place.name for one in exits if one in named]
    raise ValueError(
        f"model: any of its exits {', '.join(map(repr, names))} may be its classifier, the one that answers last: "
        f"where their branches leave the backbone, and the order in which they are returned, do not agree with the "
        f"work that they do; wants final={likely!r}, or another of them"
    )


def _at_an_end(exits: list[FoundExit], deepest: set[Operation]) -> list[FoundExit]:
    """Return the exits that the order of return allows as the classifier: last behind all, or first before others."""
    depths = [_work(one.needs & deepest) for one in exits]
    found = [exits[-1]] if depths == sorted(depths) else []
    if depths[0] == max(depths) and depths[1:] in (sorted(depths[1:]), sorted(depths[1:], reverse=True)):
        found.append(exits[0])
    return found


def _is_head_of_shared(one: FoundExit) -> bool:
    """Return whether all between the last shared value and an exit is a head that can be fused."""
    return isinstance(one.chain, HeadChain) and all(value.made_by not in one.branch for value in one.chain.reads)


def _flops_on_maps(operations: Iterable[Operation], mode: Mode) -> int:
    """Return the work on maps or tokens: in a branch, of more of the backbone or of a head that works as one."""
    rows = mode.recording.samples
    on_maps = (
        each
        for each in operations
        if any(read.from_input and (len(read.shape) > 2 or read.shape[:1] != (rows,)) for read in each.reads)
    )
    return _work(on_maps)[0]


def _depth(one: FoundExit, last: FoundExit, mode: Mode) -> tuple[int, ...]:
    made = [value.made_by.number for value in one.frontier if value.made_by is not None]
    return (*_work(one.needs & last.needs), *_work(one.shared), max(made, default=-1), mode.exits.index(one))


def _work(operations: Iterable[Operation]) -> tuple[int, int]:
    """Return the FLOPs of some operations, and how many there are."""
    flops = [each.flops for each in operations]
    return sum(flops), len(flops)


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
        chosen.append(chooser.choose(one, its, after=latest))
        latest = None if chosen[-1].tap is None else chosen[-1].tap.order
    taps = [f"late.{index}" if one.tap is None else f"model.{one.tap.layer}" for index, one in enumerate(chosen)]
    exits = [_taken(answering, *each) for each in zip(ordered, [*taps, ""], [*chosen, None], strict=True)]
    calls = {call.name: call for call in answering.recording.calls}
    silent: dict[nn.Module | None, nn.Module] = {}
    for call in (calls[name] for one in chosen for name in one.silenced):
        silent[call.layer] = SilentLayer(call.layer, call.returned[()].shape[1:], call.returned[()].dtype)
    softmax = _softmax_layer(answering, last)
    if softmax is not None:
        silent[softmax] = nn.Identity()
    for part in list(model.modules()):
        part._modules.update({key: silent[its] for key, its in part._modules.items() if its in silent})
    backbone = SilencedModel(
        model,
        tuple(exits),
        _answers(ordered, softmax),
        training if isinstance(training, str) else _answers(training[1], softmax),
        late=tuple(index for index, one in enumerate(chosen) if one.tap is None),
        as_in_training=choosing,
    )
    return backbone.eval(), chosen


def _taken(mode: Mode, one: FoundExit, tap: str, chosen: ChosenHead | None) -> TakenExit:
    pool = ""
    if chosen is not None and (head := chosen.head).in_features is not None:  # it pools by itself
        pool = head.pool if head.pool_size == (1, 1) else f"{head.pool} {head.pool_size[0]}x{head.pool_size[1]}"
    made = {one.value} if isinstance(one.chain, str) else {one.value, one.chain.logits}
    calls = (call for call in mode.recording.calls if call.name and len(call.returned) == 1)
    whole = [call.name for call in calls if not made.isdisjoint(call.returned.values())]
    name, how = shortest(whole) if whole else "", "" if chosen is None else chosen.how
    skips = chosen is not None and chosen.skips
    return TakenExit(one.place.name, name, tap, pool, one.value.shape[1], one.is_softmax, how, skips)


def _answers(exits: Sequence[FoundExit], softmax: nn.Module | None) -> Answers:
    *early, last = (one.is_softmax for one in exits)
    return Answers(tuple(one.place for one in exits), (*early, last and softmax is None))


def _softmax_layer(mode: Mode, last: FoundExit) -> nn.Module | None:
    """Return the layer that makes probabilities of the last exit's logits, if one does that and nothing else."""
    makers = (call.layer for call in mode.recording.calls if call.returned.get(()) is last.value)
    found = [layer for layer in makers if type(layer) is nn.Softmax and mode.runs_once(layer)]
    return found[0] if found and last.is_softmax else None


@torch.no_grad()
def _check_logits(
    model: nn.Module, network: EarlyExitNetwork, backbone: SilencedModel, batches: Iterable[Tensor]
) -> None:
    """Raise ``ValueError`` unless all exits of a network say what the model's do: a net below what was proved."""

    def compared(one: nn.Module, x: Tensor) -> list[Tensor]:
        answers = zip(backbone.answers_of(one, x), backbone.exits, strict=True)
        return [y if one.softmax else y.log_softmax(1) for y, one in answers]

    for x in batches:
        try:
            own = compared(model, x)
        except Exception:  # the model takes no batches of so many samples; those that were recorded it does
            continue
        exact, allowed = truth_of(own, lambda x=x: compared(double_copy(model), in_double(x)))  # type: ignore[misc]
        for y, truth, one in zip(network.logits(x.clone()), exact, backbone.exits, strict=True):
            y = y.softmax(1) if one.softmax else y.log_softmax(1)
            refuse_if_off([y], [truth], allowed, f"taken over, its exit {one.place!r} is")
