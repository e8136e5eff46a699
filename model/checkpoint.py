"""Checkpoints: parameters in ``model.safetensors``; taps, exit rules, classes and input format in ``model.json``."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .bad_input import BadInput
from .early_exit_network import EarlyExitNetwork
from .exit_rule import ExitRule
from .images import MEAN, STD
from .json_file import write_json

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
FORMAT = 1
_KEYS = {"format", "architecture", "classes", "taps", "rules", "image_size", "mean", "std", "accuracy"}

#: Arguments of :class:`ExitRule` that a checkpoint keeps.
_RULE_ARGUMENTS = ("threshold", "criterion", "temperature", "enabled")


@dataclass(frozen=True)
class Checkpoint:
    """A network, and the facts by which images become its input and its answers get names."""

    network: EarlyExitNetwork
    """A loaded one is in eval mode on the CPU, its rules set."""
    classes: tuple[str, ...]
    """Names, in the order of the labels."""
    image_size: int
    """Height and width of the input in pixels."""
    mean: tuple[float, ...] = MEAN
    """Subtracted from each channel, which is scaled to 0 to 1 before; see :func:`auxhead.model.images.normalise`."""
    std: tuple[float, ...] = STD
    """Divides each channel after that."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Facts for people, 0 to 1."""


def save_checkpoint(directory: Path, checkpoint: Checkpoint, *, architecture: str) -> None:
    """Write a network: its parameters, and in the description its taps and exit rules.

    The description of an older checkpoint is removed first and the new one written last, so that a description always
    belongs to the parameters beside it.

    Args:
        directory: made if it is not there.
        checkpoint: what to write.
        architecture: name of the builder that made the network, among those given to :func:`load_checkpoint`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    network = checkpoint.network
    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    unfinished = directory / f".{WEIGHTS}.{os.getpid()}"
    save_file(tensors, unfinished)
    (directory / DESCRIPTION).unlink(missing_ok=True)
    os.replace(unfinished, directory / WEIGHTS)
    description = {
        "format": FORMAT,
        "architecture": architecture,
        "classes": checkpoint.classes,
        "taps": network.taps,
        "rules": {
            tap: {name: getattr(head.rule, name) for name in _RULE_ARGUMENTS}
            for tap, head in zip(network.taps, network.fused_heads, strict=True)
        },
        "image_size": checkpoint.image_size,
        "mean": checkpoint.mean,
        "std": checkpoint.std,
        "accuracy": checkpoint.accuracy,
    }
    write_json(directory / DESCRIPTION, description)


def load_checkpoint(directory: Path, architectures: Mapping[str, Callable[[int], EarlyExitNetwork]]) -> Checkpoint:
    """Read what :func:`save_checkpoint` wrote.

    Args:
        directory: of the checkpoint.
        architectures: by name, the builders of known networks, given the number of classes.

    Raises:
        BadInput: files that are missing, damaged, or of another format or architecture.
    """
    for name in (DESCRIPTION, WEIGHTS):
        if not (directory / name).is_file():
            raise BadInput(f"--checkpoint: {directory} has no {name}, wants a directory written by `auxhead demo`")
    path = directory / DESCRIPTION
    description = _read_description(path, list(architectures))
    network = architectures[description["architecture"]](len(description["classes"]))
    if not description["taps"] == list(network.taps) == list(description["rules"]):
        raise _not_of_this_format(path)
    try:
        network.set_rules({tap: ExitRule(**rule) for tap, rule in description["rules"].items()})
    except (TypeError, ValueError) as error:
        raise BadInput(f"--checkpoint: {path} has a rule that cannot be used: {error}") from None
    try:
        network.load_state_dict(load_file(directory / WEIGHTS))
    except (SafetensorError, RuntimeError) as error:
        what = " ".join(str(error).split())[:200]
        raise BadInput(
            f"--checkpoint: {directory / WEIGHTS} does not hold the parameters that {DESCRIPTION} describes ({what})"
        ) from None
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Checkpoint(
        network.eval(),
        tuple(description["classes"]),
        description["image_size"],
        tuple(description["mean"]),
        tuple(description["std"]),
        description["accuracy"],
    )


def _read_description(path: Path, architectures: Sequence[str]) -> dict[str, Any]:
    """Read ``model.json`` and check all of it but the taps."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"--checkpoint: {path} is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise BadInput(f"--checkpoint: {path} has format {found!r}, wants {FORMAT}; written by another version?")
    if content.get("architecture") not in architectures:
        known = " or ".join(map(repr, architectures))
        raise BadInput(f"--checkpoint: {path} has architecture {content.get('architecture')!r}, wants {known}")
    try:
        good = (
            content.keys() == _KEYS
            and isinstance(content["rules"], dict)
            and all(isinstance(name, str) for name in content["classes"])
            and len(content["classes"]) > 0
            and isinstance(content["image_size"], int)
            and content["image_size"] > 0
            and all(isinstance(value, (int, float)) and isfinite(value) for value in content["mean"] + content["std"])
            and len(content["mean"]) == len(content["std"]) == 3
            and min(content["std"]) > 0
        )
    except TypeError:  # a value of another kind
        good = False
    if not good:
        raise _not_of_this_format(path)
    return content


def _not_of_this_format(path: Path) -> BadInput:
    return BadInput(f"--checkpoint: {path} lacks some of what format {FORMAT} has, or has it in another form")
