"""``fuse_aux_heads``: swaps the heads of an existing model for fused ones."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ..answers.exit_rule import ExitRule, as_exit_rule
from ..basics.arguments import check_module, close_names, kind_of
from ..basics.tables import wrapped
from .fold_head import match_or_fold
from .fused_aux_head import FusedAuxHead
from .head import AuxHead
from .head_pattern import POOLS, plain_parts


class FuseReport(NamedTuple):
    """The heads that :func:`fuse_aux_heads` replaced, and those that it did not."""

    replaced: dict[str, FusedAuxHead]
    """The new heads by the names of the modules they replaced."""
    left_alone: dict[str, str]
    """For every other candidate that was not left out by name, the reason."""

    def __repr__(self) -> str:
        """Say of each candidate what became of it."""
        lines = [f"{path}: {head.describe()}" for path, head in self.replaced.items()]
        left = [f"{path}: left alone, {reason}" for path, reason in self.left_alone.items()]
        return wrapped([*lines, *left] or ["No head was found."])


class _Found(NamedTuple):
    """A head, or a candidate that is none."""

    path: str
    parent: nn.Module
    name: str
    head: nn.Module
    reason: str | None
    """Why it cannot be replaced; None if it can."""


def fuse_aux_heads(
    model: nn.Module,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    rule: ExitRule | float = 1.0,
    return_probs: bool = True,
) -> FuseReport:
    """Replace in place every head of a known shape by a :class:`FusedAuxHead` that shares its parameters.

    Heads are found at every depth: each ``nn.Sequential`` that :meth:`FusedAuxHead.from_module` knows, if it gives
    class scores or is included by name; others may be features, which other layers of the model read. state_dicts of
    the original model load into the changed one, with a warning that they have no rules. A replaced head returns a
    ``HeadOutput`` where the original returned a tensor. Heads whose steps are folded in eval mode have parameters of
    their own, which no state_dict of the original has.

    The report also names candidates: modules that look like heads and could not be replaced. A candidate has at most
    three convolutions and Linears, and the last of them is a Linear that gives class scores; a Linear by itself is one
    in an ``nn.ModuleList`` or ``nn.ModuleDict``. Class scores are as many as the last Linear of the model gives that no
    layer of the model could take up. A class of one's own is named with what to write instead.

    Args:
        model: is changed in place, unless an error is raised.
        include: names of modules, or patterns for them (``"exits.*"``, as ``fnmatch`` has them): only heads that these
            are or hold are replaced, and candidates among them are an error. None: all heads.
        exclude: names or patterns of modules that are left as they are, with all that they hold.
        rule: every head gets a copy.
        return_probs: as in :class:`FusedAuxHead`.

    Raises:
        ValueError: ``model`` is itself the head, with no parent to be replaced in; a name or pattern that no module
            has; or an included module that is no head of a known shape, with the reason.
        TypeError: an argument of another type.

    Example:
        >>> branch = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))
        >>> model = nn.ModuleDict({"block": nn.Conv2d(3, 64, 3), "exit": branch})
        >>> list(fuse_aux_heads(model).replaced)
        ['exit']
        >>> model["exit"](torch.randn(8, 64, 7, 7)).label.shape
        torch.Size([8])
    """
    check_module("model", model)
    if not isinstance(match_or_fold(model), str):
        raise ValueError("model: is itself a head: use FusedAuxHead.from_module(model)")
    rule = as_exit_rule(rule)
    modules = dict(model.named_modules(remove_duplicate=False))
    included = None if include is None else _names("include", include, modules)
    excluded = set().union(*_names("exclude", exclude, modules).values())
    named = set() if included is None else set().union(*included.values())
    found = list(_find_heads(model, excluded, named, _number_of_classes(model)))
    if included is not None:
        found = _only(found, included, modules)
    report = FuseReport({}, {})
    made: dict[nn.Module, FusedAuxHead] = {}  # a head that occurs twice stays one head
    for path, _, _, head, reason in found:  # all of them before any is replaced
        if reason is None and not isinstance(head, AuxHead) and head not in made:
            try:
                made[head] = FusedAuxHead.from_module(head, rule=rule, return_probs=return_probs)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    for path, parent, name, head, reason in found:
        if reason is not None:
            report.left_alone[path] = reason
        elif not isinstance(head, AuxHead):
            parent._modules[name] = report.replaced[path] = made[head]
    return report


def find_aux_heads(model: nn.Module) -> dict[str, str | None]:
    """Return by name what :func:`fuse_aux_heads` would replace (None), and what it would not (why)."""
    found = _find_heads(model, set(), set(), _number_of_classes(model))
    return {path: reason for path, _, _, head, reason in found if not isinstance(head, AuxHead)}


def _names(argument: str, patterns: str | Sequence[str], modules: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Return for each pattern the names of modules that it fits."""
    if isinstance(patterns, str):
        patterns = [patterns]
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        got = repr(patterns) if isinstance(patterns, Sequence) else kind_of(patterns)
        raise TypeError(f"{argument}: got {got}, wants a name, a pattern or a sequence of them")
    names = {pattern: [name for name in modules if name and fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern, its in names.items():
        if not its:
            close = close_names(pattern, [name for name in modules if name])
            raise ValueError(f"{argument}: {pattern!r} is the name of no module of the model{close}")
    return names


def _find_heads(model: nn.Module, excluded: set[str], named: set[str], classes: int | None) -> Iterator[_Found]:
    """Yield heads, which give class scores or are named, and candidates; of those within a candidate only heads."""

    def visit(parent: nn.Module, prefix: str, fed_on: bool, in_candidate: bool) -> Iterator[_Found]:
        listed = isinstance(parent, (nn.ModuleList, nn.ModuleDict))
        for name, child in parent._modules.items():
            path = prefix + name
            if child is None or path in excluded:
                continue
            if isinstance(child, AuxHead):
                yield _Found(path, parent, name, child, None)
                continue
            reason = match_or_fold(child)
            if not isinstance(reason, str) and path not in named:
                scores = reason.linear.out_features
                if scores != classes:
                    reason = f"gives {scores} numbers, which are no class scores"
                elif reason.linear.in_features == scores and not (listed or parent is model):
                    reason = f"gives {scores} numbers for {scores}, as a gate does; include it by name if not"
            candidate = not in_candidate and _could_be_head(child, classes, alone=listed)
            # in a chain every module but the last one feeds the next
            feeds = isinstance(parent, nn.Sequential) and (fed_on or name != next(reversed(parent._modules)))
            if not isinstance(reason, str):
                if not feeds:
                    yield _Found(path, parent, name, child, None)
                elif candidate:
                    yield _Found(path, parent, name, child, "is followed by other layers, which take a tensor")
                continue
            within = list(visit(child, path + ".", feeds, in_candidate or candidate))
            if candidate and not within:
                yield _Found(path, parent, name, child, reason)
            yield from within

    return visit(model, "", False, False)


def _only(found: list[_Found], included: dict[str, list[str]], modules: dict[str, nn.Module]) -> list[_Found]:
    """Return the heads that included modules are or hold; raises ``ValueError`` for one that is or holds none."""
    kept = []
    for names in included.values():
        its = [one for one in found if any(f"{one.path}.".startswith(f"{name}.") for name in names)]
        for one in its:
            if one.reason is not None:
                raise ValueError(f"include: {one.path!r}: {one.reason}")
        if not its:
            reason = match_or_fold(modules[names[0]])
            why = f"has no head in it: {reason}" if isinstance(reason, str) else "is excluded"
            raise ValueError(f"include: {names[0]!r} {why}")
        kept += its
    return [one for one in found if one in kept]


def _number_of_classes(model: nn.Module) -> int | None:
    """Return the outputs of the model's last Linear that no matrix of the model could take up; or None."""
    layers = [*model.modules()]
    behind_pools = {_behind_pool(layer) for layer in layers if type(layer) is nn.Sequential}
    matrices = [
        parameter
        for layer in layers
        if layer not in behind_pools
        for parameter in layer.parameters(recurse=False)
        if not is_lazy(parameter) and parameter.ndim == 2
    ]
    taken = {matrix.shape[1] for matrix in matrices}
    given = [layer.out_features for layer in layers if isinstance(layer, nn.Linear) and layer.out_features not in taken]
    return given[-1] if given else None


def _behind_pool(chain: nn.Sequential) -> nn.Module | None:
    """Return the one Linear of a chain, if it has one and a pool comes before it."""
    parts = [part for _, part in plain_parts(chain) if isinstance(part, (*POOLS, nn.AvgPool2d, nn.Linear))]
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    return linears[0] if len(linears) == 1 and parts[0] is not linears[0] else None


def _could_be_head(module: nn.Module, classes: int | None, *, alone: bool) -> bool:
    """Return whether a module looks like a head: at most three convolutions and Linears, the last for the classes."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or isinstance(module, nn.Linear) and not alone:
        return False
    layers = [part for part in module.modules() if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd))]
    if not 1 <= len(layers) <= 3 or not isinstance(layers[-1], nn.Linear):
        return False
    return layers[-1].out_features == classes
