"""``fuse_aux_heads``: swaps the heads of an existing model for fused ones."""

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

    Heads are found at every depth: each ``nn.Sequential`` that :meth:`FusedAuxHead.from_module` knows. state_dicts of
    the original model load into the changed one and back. A replaced head returns a ``HeadOutput`` where the original
    returned a tensor. Every head gets a copy of ``rule``; ``return_probs`` is as in :class:`FusedAuxHead`.

    Raises:
        ValueError: ``model`` is itself the head: it has no parent to be replaced in.
    """
    if not isinstance(match_head(model), str):
        raise ValueError("model: is itself a head: use FusedAuxHead.from_module(model)")
    rule = as_exit_rule(rule)
    report = FuseReport({}, {})
    made: dict[nn.Module, FusedAuxHead] = {}  # a head that occurs twice stays one head

    def visit(parent: nn.Module, prefix: str, followed: bool = False) -> None:
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
            elif not isinstance(reason, str):
                if child not in made:
                    made[child] = FusedAuxHead.from_module(child, rule=rule, return_probs=return_probs)
                parent._modules[name] = report.replaced[path] = made[child]
            else:
                if isinstance(child, nn.Sequential) and any(isinstance(part, nn.Linear) for part in child):
                    report.left_alone[path] = reason
                visit(child, path + ".", feeds)

    visit(model, "")
    return report
