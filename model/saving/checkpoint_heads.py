"""Heads in ``model.json`` of a checkpoint: what is written of each, and how they are made again."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor, nn

from ..answers.exit_rule import ExitRule
from ..basics.arguments import kind_of
from ..basics.bad_input import BadInput
from ..heads.fused_aux_head import FusedAuxHead
from ..heads.hidden_stack import HiddenStack
from ..heads.module_head import AuxHead, ModuleHead
from ..listening.reading import AnyExtract, Extract
from ..network.early_exit_network import EarlyExitNetwork
from .description import RULE_ARGUMENTS, one_line, wrong_in_head


def describe_head(network: EarlyExitNetwork, tap: str, head: nn.Module) -> dict[str, Any]:
    """Return the arguments that make a head of the same kind and rule."""
    extract = network.extract.get(tap, Extract())
    fields = dataclasses.asdict(extract) if isinstance(extract, Extract) else {}
    shared = {
        "extract": {name: value for name, value in fields.items() if (name, value) != ("mask", None)} or None,
        "rule": {name: getattr(head.rule, name) for name in RULE_ARGUMENTS},
    }
    if type(head) is ModuleHead:
        try:
            num_classes = head.num_classes
        except ValueError as error:
            raise ValueError(f"heads[{tap!r}]: {error}") from None
        kind = type(head.module).__qualname__
        own = {"module": kind, "num_classes": num_classes, "return_probs": head.return_probs}
        return _checked(tap, head, {**own, **shared})
    if type(head) is not FusedAuxHead:
        raise TypeError(f"heads[{tap!r}]: is a {type(head).__name__}, of which no checkpoint is known")
    try:
        own = describe_fused_head(head)
    except ValueError as error:
        raise ValueError(f"heads[{tap!r}]: {error}") from None
    return _checked(tap, head, {**own, **shared})


def _checked(tap: str, head: AuxHead, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a head if they are of their form, and the head's state has nothing that they do not make."""
    layers = head.layers() if isinstance(head, FusedAuxHead) else []
    made = {f"{name}.{part}" for name, _ in layers for part in ("weight", "bias")}
    more = [name for name in head.state_dict() if name not in made and not name.startswith(("module.", "rule."))]
    wrong = f"keeps {more[0]!r}, which files do not; wants that in the backbone" if more else wrong_in_head(fields)
    try:
        ExitRule(**fields["rule"])
    except (TypeError, ValueError) as error:  # what others have written to its tensors
        wrong = wrong or f"{error}"
    if wrong is not None:
        raise ValueError(f"heads[{tap!r}]: {wrong}")
    return fields


def make_heads(
    path: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, AuxHead]:
    """Make the heads of a description, if their sizes are those of the tensors: it may ask for any amount of memory."""
    heads: dict[str, AuxHead] = {}
    for number, (tap, arguments) in enumerate(described.items()):
        rest = {name: value for name, value in arguments.items() if name != "extract"}  # which is the network's
        rule = saved_rule(path, tap, arguments)
        if tap in modules:
            heads[tap] = ModuleHead(**{**rest, "module": modules[tap], "rule": rule})
            continue
        try:
            heads[tap] = make_fused_head(rest, f"heads.{number}.", tensors)
        except (TypeError, ValueError) as error:
            raise BadInput(f"checkpoint: {path} has a head {tap!r:.60} that cannot be made: {error}") from None
    return heads


def saved_rule(path: Path, tap: str, described: Mapping[str, Any]) -> ExitRule:
    """Return the rule of a head of a description."""
    try:
        return ExitRule(**described["rule"])
    except (TypeError, ValueError) as error:
        raise BadInput(f"checkpoint: {path} has a head {tap!r:.60} that cannot be made: {error}") from None


def saved_extract(
    where: Path, described: Mapping[str, Any], given: Mapping[str, Callable[[Any], Tensor]]
) -> dict[str, AnyExtract]:
    """Return what is extracted by tap: as it was saved, and the functions that are given."""
    functions = {tap for tap, head in described.items() if head["extract"] is None}
    for tap in sorted(given.keys() - functions):
        raise BadInput(f"extract: {where} has no function at {tap!r:.60}, wants those of {sorted(functions)} alone")
    for tap in sorted(functions - given.keys()):
        raise BadInput(
            f"extract: the head at {tap!r:.60} in {where} reads its tap by a function of yours, which cannot be saved; "
            f"wants it again: load_checkpoint(..., extract={{{tap!r:.60}: function}})"
        )
    return {
        tap: given[tap] if tap in functions else Extract(**{"mask": None, **head["extract"]})
        for tap, head in described.items()
    }


def checked_modules(
    where: Path, described: Mapping[str, Any], given: Mapping[str, nn.Module] | None
) -> Mapping[str, nn.Module]:
    """Return the modules of heads that are not fused, by tap, if they are those that are wanted."""
    if not isinstance(given, (Mapping, NoneType)):
        raise BadInput(f"modules: got {kind_of(given)}, wants a dict of modules by tap")
    given = {} if given is None else given
    saved = {tap: head["module"] for tap, head in described.items() if "module" in head}
    for tap in given:
        if tap not in saved:
            raise BadInput(f"modules: {where} has no module at {tap!r:.60}, wants those of {list(saved)} alone")
        if not isinstance(given[tap], nn.Module):
            raise BadInput(f"modules[{tap!r:.60}]: got {kind_of(given[tap])}, wants an nn.Module")
    for tap, kind in saved.items():
        if tap not in given:
            raise BadInput(
                f"modules: the head at {tap!r:.60} in {where} is a module of yours ({one_line(kind)}), of which the "
                "parameters alone were saved; wants one like it: "
                f"load_checkpoint(..., modules={{{tap!r:.60}: module}})"
            )
    return given


def describe_fused_head(head: FusedAuxHead) -> dict[str, Any]:
    """Return the fields that make a head of the same kind, but for its rule; those of hidden layers only if it has any.

    Raises:
        ValueError: a head that does not know its width, or that computes something else than its plain layers.
    """
    if head.in_features is None:
        raise ValueError("does not know its width yet; call network.check_taps(example_input) before")
    if (why := head.why_not_launched()) is not None:
        raise ValueError(f"{why}, which files do not keep; merge adapters, remove parametrizations and hooks before")
    fields: dict[str, Any] = {
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "pool": head.pool,
        "pool_size": list(head.pool_size),
        "bias": head.linear.bias is not None,
        "dropout": head.dropout,
        "return_probs": head.return_probs,
    }
    if head.map_size is not None:
        fields["map_size"] = list(head.map_size)
    if head.hidden is not None:
        fields["hidden"] = _describe_stack(head.hidden)
    return fields


def _describe_stack(stack: HiddenStack) -> dict[str, Any]:
    norm, linear = stack.norm, stack.linear
    parts = {} if norm is None else {"weight": norm.weight is not None, "bias": norm.bias is not None}
    return {
        "rectifies": stack.rectifies,
        "norm": None if norm is None else {"eps": norm.eps, **parts},
        "features": None if linear is None else int(linear.out_features),
        "bias": linear is not None and linear.bias is not None,
        "activation": stack.activation,
        "dropout": stack.dropout,
    }


def make_fused_head(fields: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> FusedAuxHead:
    """Make a head of its fields and its rule's, if its sizes are those of the tensors whose names begin with a prefix.

    Raises:
        ValueError, TypeError: sizes, which might ask for any amount of memory, are others; or a value is out of range.
    """
    options = dict(fields)
    hidden, map_size = options.pop("hidden", None), options.pop("map_size", None)
    width = options["in_features"] if hidden is None or hidden["features"] is None else hidden["features"]
    sizes = {"linear.weight": [options["num_classes"], width]}
    if hidden is not None and hidden["features"] is not None:
        sizes["hidden.linear.weight"] = [hidden["features"], options["in_features"]]
    if hidden is not None and hidden["norm"] is not None and hidden["norm"]["weight"]:
        sizes["hidden.norm.weight"] = [options["in_features"]]
    for name, size in sizes.items():
        saved = list(tensors[prefix + name].shape) if prefix + name in tensors else None
        if size != saved:
            raise ValueError(f"its '{prefix}{name}' is {size}, saved was {saved}")
    options |= {"pool_size": tuple(options["pool_size"]), "rule": ExitRule(**options["rule"])}
    if hidden is not None:
        options |= {
            "hidden_features": hidden["features"], "activation": hidden["activation"], "hidden_bias": hidden["bias"],
            "hidden_dropout": hidden["dropout"], "norm": hidden["norm"] is not None, "rectifies": hidden["rectifies"],
        }  # fmt: skip
    head = FusedAuxHead(**options)
    if head.hidden is not None and head.hidden.norm is not None:
        norm = hidden["norm"]
        head.hidden.norm = nn.LayerNorm(
            options["in_features"], eps=norm["eps"], elementwise_affine=norm["weight"], bias=norm["bias"]
        )
    head._map_size = None if map_size is None else (map_size[0], map_size[1])
    return head
