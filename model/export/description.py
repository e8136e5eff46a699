"""The JSON beside exported files: what they take and return, and the rule of each exit, by which an answer counts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..description import RULE_ARGUMENTS
from ..early_exit_network import EarlyExitNetwork
from .file_formats import BATCH, Part, Value

#: Of the JSON; a reader of this one refuses others.
FORMAT = 1


def describe(network: EarlyExitNetwork, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the content of the JSON: exits in the order of their logits, and files in the order in which they run."""
    rules = [{name: getattr(head.rule, name) for name in RULE_ARGUMENTS} for head in network.exit_heads]
    exits = zip([*network.taps, None], [*rules, None], strict=True)  # the classifier has neither
    return {
        "format": FORMAT,
        "exits": [{"logits": exit_name(index), "tap": tap, "rule": rule} for index, (tap, rule) in enumerate(exits)],
        "files": [
            {
                "file": part.file,
                "inputs": [value._asdict() for value in part.inputs],
                "outputs": [value._asdict() for value in part.outputs],
            }
            for part in parts
        ],
    }


def exit_name(index: int) -> str:
    """Return the name of an exit's logits; the classifier is the last exit."""
    return f"exit_{index}"


def value_like(name: str, tensor: Tensor, batch: object) -> Value:
    """Describe a fake tensor, with the symbol of the batch size by its name."""
    symbol = str(batch)
    sizes = (str(size).replace(symbol, BATCH) if isinstance(size, torch.SymInt) else size for size in tensor.shape)
    return Value(name, tuple(sizes), str(tensor.dtype).removeprefix("torch."))
