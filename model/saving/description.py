"""``model.json`` of a checkpoint: fields, the form that each must have, heads as fields and made of them again."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import ACTIVATIONS
from ...kernels.launch.check_arguments import POOLS
from ...kernels.reference.hidden_layers import MOST_HIDDEN
from ..answers.exit_rule import ExitRule
from ..basics.arguments import kind_of
from ..basics.bad_input import BadInput, one_line
from ..basics.images import MOST_PIXELS
from ..basics.preprocessing import Preprocessing
from ..heads.fused_aux_head import FusedAuxHead
from ..heads.head import AuxHead
from ..heads.module_head import ModuleHead
from ..listening.reading import LAYOUTS, AnyExtract, Extract
from ..network.early_exit_network import EarlyExitNetwork

FORMAT = 5

#: Arguments of :class:`ExitRule` that a checkpoint keeps.
RULE_ARGUMENTS = ("threshold", "criterion", "temperature", "enabled")

#: The form of a field: in words, as a test, and of an object the forms of its fields, and whose they are.
_Forms = Mapping[str, tuple[Any, ...]]
#: Fields that only those have that need them.
_OPTIONAL = {"hidden", "map_size", "mask"}


def checked_description(path: Path, content: Any) -> dict[str, Any]:
    """Return the content of a ``model.json``; ``BadInput`` for the first thing wrong with it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        by = "a newer" if type(found) is int and found > FORMAT else "another"
        raise BadInput(
            f"checkpoint: {path} has format {found!r:.60}, wants {FORMAT}; written by {by} version? Load it with that "
            "one, or its network.state_dict() into a network that this version makes, and save that"
        )
    wrong = wrong_field(content)
    if wrong is not None:
        raise BadInput(f"checkpoint: {path} has {wrong}")
    if content["preprocessing"] is not None:
        try:
            Preprocessing.of_json(content["preprocessing"])
        except BadInput as error:
            raise BadInput(f"checkpoint: {path} has {error}") from None
    for tap, head in content["heads"].items():
        wrong = wrong_in_head(head)
        if wrong is not None:
            raise BadInput(f"checkpoint: {path} has a head {tap!r:.60} that cannot be made: {wrong}")
    sizes = {head["num_classes"] for head in content["heads"].values()}
    if len(sizes) > 1:
        raise BadInput(f"checkpoint: {path} has heads of {' and '.join(map(str, sorted(sizes)))} classes, wants one")
    if content["classes"] and len(content["classes"]) not in sizes:
        count = len(content["classes"])
        raise BadInput(f"checkpoint: {path} has {count} names of classes, wants {sizes.pop()} or none")
    return content


def describe_head(network: EarlyExitNetwork, tap: str, head: AuxHead) -> dict[str, Any]:
    """Return the arguments that make a head of the same kind and rule.

    Raises:
        ValueError, TypeError: a head that files do not keep; the message names the tap.
    """
    extract = network.extract.get(tap, Extract())
    fields = dataclasses.asdict(extract) if isinstance(extract, Extract) else {}
    rule = {name: getattr(head.rule, name) for name in RULE_ARGUMENTS}
    try:
        described = {
            **head.fields(),
            "extract": {name: value for name, value in fields.items() if (name, value) != ("mask", None)} or None,
            "rule": rule,
        }
        made = {f"{name}.{part}" for name, _ in head.parts() for part in ("weight", "bias")}
        more = [name for name in head.state_dict() if name not in made and not name.startswith(("module.", "rule."))]
        if more:
            raise ValueError(f"keeps {more[0]!r}, which files do not; wants that in the backbone")
        if (wrong := wrong_in_head(described)) is not None:
            raise ValueError(wrong)
        ExitRule(**rule)  # refuses what others have written to its tensors
    except (ValueError, TypeError) as error:
        raise type(error)(f"heads[{tap!r}]: {error}") from None
    return described


def make_heads(
    path: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> dict[str, AuxHead]:
    """Make the heads of a description, if their sizes are those of the tensors: it may ask for any amount of memory."""
    heads: dict[str, AuxHead] = {}
    for number, (tap, arguments) in enumerate(described.items()):
        rest = {name: value for name, value in arguments.items() if name != "extract"}  # which is the network's
        rest["rule"] = saved_rule(path, tap, arguments)
        if tap in modules:
            heads[tap] = ModuleHead(**{**rest, "module": modules[tap]})
            continue
        try:
            heads[tap] = _make_fused_head(rest, f"heads.{number}.", tensors)
        except (TypeError, ValueError) as error:
            raise BadInput(f"checkpoint: {path} has a head {tap!r:.60} that cannot be made: {error}") from None
    return heads


def _make_fused_head(fields: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> FusedAuxHead:
    """Make a head of its fields, if its sizes, which may ask for any amount of memory, are those of the tensors."""
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
    options["pool_size"] = tuple(options["pool_size"])
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
    head.map_size = None if map_size is None else (map_size[0], map_size[1])
    return head


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


def wrong_in_head(head: Any) -> str | None:
    """Return in words the first field of a described head that is missing, unknown or of another form."""
    return _first_wrong(head, _MODULE_HEAD if isinstance(head, Mapping) and "module" in head else _HEAD, "a head")


def wrong_field(description: Mapping[str, Any]) -> str | None:
    """Return in words the first field of a description that is missing, unknown or of another form, heads aside."""
    return _first_wrong(description, _DESCRIPTION, f"format {FORMAT}")


def _first_wrong(values: Any, forms: _Forms, owner: str) -> str | None:
    if not isinstance(values, Mapping):
        return f"{values!r:.60}, wants {', '.join(forms)}"
    for name in sorted((forms.keys() ^ values.keys()) - (_OPTIONAL & forms.keys())):
        return f"no {name}, which {owner} has" if name in forms else f"{one_line(name):.60}, which {owner} has not"
    for name, (wanted, is_good, *inner) in forms.items():
        if name not in values:
            continue
        if not is_good(values[name]):
            return f"{name}: got {values[name]!r:.60}, wants {wanted}"
        if inner and values[name] is not None and (wrong := _first_wrong(values[name], *inner)) is not None:
            return f"{name}: {wrong}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e308


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair is in a str, but cannot be printed."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_report(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return value is None or isinstance(value, dict) and _is_text(value.get("format"))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_pool_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_example(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"input", "dtype", "final"}:
        return value is None
    sizes, dtype = value["input"], getattr(torch, str(value["dtype"]), None)
    of_counts = isinstance(sizes, list) and all(map(_is_count, sizes))
    final = value["final"] if isinstance(value["final"], list) else [value["final"]]
    is_input = of_counts and math.prod(sizes) <= MOST_PIXELS and isinstance(dtype, torch.dtype)
    return is_input and all(map(_is_part, final))


def _is_part(value: Any) -> bool:
    return value is None or type(value) is int or _is_text(value)


_BOOL = ("a bool", lambda value: isinstance(value, bool))
_PROBABILITY = ("a probability in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1)
_DESCRIPTION: _Forms = {
    "format": (str(FORMAT), lambda value: value == FORMAT),
    "backbone": ("a str or None", lambda value: value is None or _is_text(value)),
    "with_backbone": _BOOL,
    "classes": ("a list of names", _are_names),
    "heads": ("heads by tap", lambda value: isinstance(value, dict) and len(value) > 0 and _are_names(list(value))),
    "preprocessing": ("an object or None", lambda value: value is None or isinstance(value, dict)),
    "accuracy": (
        "numbers by name",
        lambda value: isinstance(value, Mapping) and _are_names([*value]) and all(map(_is_number, value.values())),
    ),
    "calibration": ("a report, as its to_json() says it, or None", _is_report),
    "logits": ("an index, a key or None", _is_part),
    "parameters": (
        "the SHA-256 of a file",
        lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    ),
    "own_exits": ("the sizes of an input, its dtype and final, or None", _is_example),
    "learned_from": ("a dict or None", lambda value: value is None or isinstance(value, dict)),
}
_NORM: _Forms = {
    "eps": ("a number from 0", lambda value: _is_number(value) and value >= 0),
    "weight": _BOOL,
    "bias": _BOOL,
}
_HIDDEN: _Forms = {
    "rectifies": _BOOL,
    "norm": ("fields of a norm or None", lambda value: value is None or isinstance(value, dict), _NORM, "a norm"),
    "features": (
        f"None or an int from 1 to {MOST_HIDDEN}",
        lambda value: value is None or _is_count(value) and value <= MOST_HIDDEN,
    ),
    "bias": _BOOL,
    "activation": (f"one of {list(ACTIVATIONS)}", lambda value: isinstance(value, str) and value in ACTIVATIONS),
    "dropout": _PROBABILITY,
}
_EXTRACT: _Forms = {
    "item": ("an index, a key or None", _is_part),
    "layout": (f"one of {list(LAYOUTS)} or None", lambda value: value is None or value in list(LAYOUTS)),
    "mask": ("a name or None", lambda value: value is None or _is_text(value) and value.strip("~") != ""),
}
_RULE: _Forms = {
    "threshold": ("a number", _is_number),
    "criterion": ("a str", lambda value: isinstance(value, str)),
    "temperature": ("a number", _is_number),
    "enabled": _BOOL,
}
_HEAD: _Forms = {
    "in_features": ("a positive int", _is_count),
    "num_classes": ("a positive int", _is_count),
    "pool": (f"one of {list(POOLS)}", lambda value: value in POOLS),
    "pool_size": ("two positive ints", _is_pool_size),
    "bias": _BOOL,
    "dropout": _PROBABILITY,
    "return_probs": _BOOL,
    "extract": (
        "item and layout, or None for a function", lambda value: value is None or isinstance(value, dict),
        _EXTRACT, "an extract",
    ),
    "rule": (", ".join(RULE_ARGUMENTS), lambda value: isinstance(value, dict), _RULE, "a rule"),
    "hidden": ("fields of hidden layers", lambda value: isinstance(value, dict), _HIDDEN, "a hidden part"),
    "map_size": ("two positive ints", _is_pool_size),
}  # fmt: skip
#: Of a head that is a module of the user's, of which the parameters alone are saved.
_MODULE_HEAD: _Forms = {
    "module": ("the name of a class", _is_text),
    **{name: _HEAD[name] for name in ("num_classes", "return_probs", "extract", "rule")},
}
