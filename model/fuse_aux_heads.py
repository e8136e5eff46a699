"""``fuse_aux_heads``: swaps the heads of an existing model for fused ones."""

from copy import deepcopy
from typing import NamedTuple

from torch import nn

from .exit_rule import ExitRule, as_exit_rule
from .fused_aux_head import FusedAuxHead
from .head_pattern import match_head


class FuseReport(NamedTuple):
    """The heads that :func:`fuse_aux_heads` replaced, and those that it did not."""

    replaced: dict[str, FusedAuxHead]
    """The new heads by the names of the modules they replaced."""
    left_alone: dict[str, str]
    """For every other candidate, an ``nn.Sequential`` with a Linear in it, the reason."""


def fuse_aux_heads(model: nn.Module, *, rule: ExitRule | float = 1.0, return_probs: bool = True) -> FuseReport:
    """Replace in place every head of a known shape by a :class:`FusedAuxHead` that shares its parameters.

    A head is an ``nn.Sequential`` that :meth:`FusedAuxHead.from_module` knows. state_dicts of the original model
    load into the changed one and back. A replaced head returns a ``HeadOutput`` where the original returned a tensor.

    Args:
        model: any module; the heads are looked for at every depth.
        rule: the exit rule; every head gets one of its own with these values.
        return_probs: whether the heads' answers carry probabilities.

    Raises:
        ValueError: ``model`` is itself the head: it has no parent to be replaced in.
    """
    if not isinstance(match_head(model), str):
        raise ValueError("model: is itself a head: use FusedAuxHead.from_module(model)")
    report = FuseReport({}, {})
    _visit(model, "", report, {}, as_exit_rule(rule), return_probs)
    return report


def _visit(
    parent: nn.Module,
    prefix: str,
    report: FuseReport,
    made: dict[nn.Module, FusedAuxHead],
    rule: ExitRule,
    return_probs: bool,
    followed: bool = False,
) -> None:
    """Replace heads among the children of ``parent``; ``made`` keeps a head that occurs twice one head."""
    for name, child in list(parent._modules.items()):
        path = prefix + name
        if child is None:
            continue
        if isinstance(child, FusedAuxHead):
            if child in made.values():
                report.replaced[path] = child
            continue
        reason = match_head(child)
        # in a chain every module but the last one feeds the next
        feeds = isinstance(parent, nn.Sequential) and (followed or name != next(reversed(parent._modules)))
        if feeds and not isinstance(reason, str):
            report.left_alone[path] = "is followed by other layers, which take a tensor"
            continue
        if not isinstance(reason, str):
            if child not in made:
                made[child] = FusedAuxHead.from_module(child, rule=deepcopy(rule), return_probs=return_probs)
            parent._modules[name] = report.replaced[path] = made[child]
            continue
        if isinstance(child, nn.Sequential) and any(isinstance(part, nn.Linear) for part in child):
            report.left_alone[path] = reason
        _visit(child, path + ".", report, made, rule, return_probs, feeds)
