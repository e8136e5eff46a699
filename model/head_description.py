"""A fused head in ``model.json`` of a checkpoint: its fields, those of its hidden layers, and making it of them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .exit_rule import ExitRule
from .fused_aux_head import FusedAuxHead
from .hidden_stack import HiddenStack


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
