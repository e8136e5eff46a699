"""Checkpoints: parameters in ``model.safetensors``; taps, exit rules, classes and input format in ``model.json``."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Checkpoint:
    """A network, and the facts by which images become its input and its answers get names."""

    network: EarlyExitNetwork
    """In eval mode on the CPU, its rules set."""
    classes: tuple[str, ...]
    image_size: int
    """Height and width of the input in pixels."""
    mean: tuple[float, ...]
    """Subtracted from each channel, which is scaled to 0 to 1 before; see :func:`auxhead.model.images.normalise`."""
    std: tuple[float, ...]
    """Divides each channel after that."""
    accuracy: Mapping[str, float]
    """Facts for people, 0 to 1."""


@dataclass(frozen=True)
class _Description:
    """The content of ``model.json``."""

    format: int
    architecture: str
    classes: list[str]
    taps: list[str]
    rules: dict[str, dict[str, Any]]
    """By tap, the arguments of :class:`ExitRule`."""
    image_size: int
    mean: list[float]
    std: list[float]
    accuracy: dict[str, float]


def save_checkpoint(
    directory: Path,
    network: EarlyExitNetwork,
    *,
    architecture: str,
    classes: tuple[str, ...],
    image_size: int,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    accuracy: Mapping[str, float] | None = None,
) -> None:
    """Write a network: its parameters, and in the description its taps and exit rules.

    The description of an older checkpoint is removed first and the new one written last, so that a description always
    belongs to the parameters beside it.

    Args:
        directory: made if it is not there.
        network: as one of the builders given to :func:`load_checkpoint` makes it; its parameters may have changed.
        architecture: the name of that builder.
        classes: names, in the order of the labels.
        image_size: height and width of the input in pixels.
        mean: of each channel, as :func:`auxhead.model.images.normalise` takes it.
        std: of each channel.
        accuracy: facts for people, 0 to 1.
    """
    directory.mkdir(parents=True, exist_ok=True)
    description = _Description(
        format=FORMAT,
        architecture=architecture,
        classes=list(classes),
        taps=list(network.taps),
        rules={tap: _arguments(head.rule) for tap, head in zip(network.taps, network.heads, strict=True)},
        image_size=image_size,
        mean=list(mean),
        std=list(std),
        accuracy=dict(accuracy or {}),
    )
    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    unfinished = directory / f".{WEIGHTS}.{os.getpid()}"
    save_file(tensors, unfinished)
    (directory / DESCRIPTION).unlink(missing_ok=True)
    os.replace(unfinished, directory / WEIGHTS)
    write_json(directory / DESCRIPTION, asdict(description))


def _arguments(rule: Any) -> dict[str, Any]:
    """Return the arguments that make the same :class:`ExitRule` again."""
    names = ("threshold", "criterion", "temperature", "enabled")
    return {name: getattr(rule, name) for name in names}


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
    description = _read_description(directory / DESCRIPTION, list(architectures))
    network = architectures[description.architecture](len(description.classes))
    if not description.taps == list(network.taps) == list(description.rules):
        raise _not_of_this_format(directory / DESCRIPTION)
    try:
        network.set_rules({tap: ExitRule(**rule) for tap, rule in description.rules.items()})
    except (TypeError, ValueError) as error:
        raise BadInput(f"--checkpoint: {directory / DESCRIPTION} has a rule that cannot be used: {error}") from None
    try:
        network.load_state_dict(load_file(directory / WEIGHTS))
    except (SafetensorError, RuntimeError) as error:
        what = " ".join(str(error).split())[:200]
        raise BadInput(
            f"--checkpoint: {directory / WEIGHTS} does not hold the parameters that {DESCRIPTION} describes ({what})"
        ) from None
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Checkpoint(
        network=network.eval(),
        classes=tuple(description.classes),
        image_size=description.image_size,
        mean=tuple(description.mean),
        std=tuple(description.std),
        accuracy=description.accuracy,
    )


def _read_description(path: Path, architectures: Sequence[str]) -> _Description:
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
        description = _Description(**content)
        good = (
            isinstance(description.rules, dict)
            and all(isinstance(name, str) for name in description.classes)
            and len(description.classes) > 0
            and isinstance(description.image_size, int)
            and description.image_size > 0
            and all(
                isinstance(value, (int, float)) and isfinite(value) for value in [*description.mean, *description.std]
            )
            and len(description.mean) == len(description.std) == 3
            and min(description.std) > 0
        )
    except TypeError:  # keys missing, or too many, or a value of another kind
        good = False
    if not good:
        raise _not_of_this_format(path)
    return description


def _not_of_this_format(path: Path) -> BadInput:
    return BadInput(f"--checkpoint: {path} lacks some of what format {FORMAT} has, or has it in another form")
