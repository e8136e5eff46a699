"""``export_exits`` and ``export_stages``: a network as files that others run, compared with it before."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..basics.arguments import check_mode
from ..basics.bad_input import BadInput
from ..basics.files import naming, on_disk, write_json
from ..listening.batches import Batch, check_input_batch, first_tensor, map_tensors, tensors_by_name, two_samples
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..runners.checks import check_device
from ..saving.description import RULE_ARGUMENTS
from .file_formats import BATCH, Part, Value, check_files, checked_format, write_part
from .program import Stage, cut_into_stages, logits_program, stage_program

#: The JSON of a folder of stages.
STAGES = "stages.json"


@dataclass(frozen=True)
class ExportReport:
    """What an export has written, and how far it is from the network."""

    files: tuple[Path, ...]
    """In the order in which they run; the JSON is the last."""
    difference: float | None
    """The largest difference of a logit, in parts of the largest one; None if nothing here could run the files."""
    checked_by: str
    """What ran the files, or why nothing did."""

    def __repr__(self) -> str:
        """Say how far off the files are, and name them."""
        found = "not compared" if self.difference is None else f"{self.difference:.1g} of the largest logit at most"
        return f"Off from the network: {found} ({self.checked_by}).\nSaved: {', '.join(map(str, self.files))}"


def export_exits(
    network: EarlyExitNetwork, example_images: Batch, path: str | os.PathLike[str], *, format: str | None = None
) -> ExportReport:
    """Write the logits of all exits as one file, for batches of any size, and a JSON beside it.

    The file takes a batch and returns the logits of every head and, last, of the classifier, before temperatures. The
    JSON, named like it with .json behind, holds inputs, outputs, taps and rules, by which whoever loads it decides
    which exit answers.

    Args:
        network: in eval mode; the file has its parameters, its dtype and, as pt2, its device.
        example_images: a batch that the network takes, which also serves to compare the file with it. Of several
            tensors the file takes one after the other; their sizes but for the batch's are the example's, as is what
            is no tensor.
        path: of the file, where there is none.
        format: "onnx", which needs onnx and onnxscript, or "pt2", which ``torch.export.load`` reads; None is that by
            which the path ends, and else "pt2".

    Returns:
        ExportReport: the file, then the JSON; the difference is that of the logits.

    Raises:
        BadInput: something is there already, a head does not know its width, the format cannot be written here, or
            torch.export or ONNX cannot have the network; the message says what they said.
        TypeError, ValueError: network or images cannot be used.
        RuntimeError: the file computes something else than the network; it is not kept.
        OSError: no space or no permission; names the path.
    """
    path = Path(path)
    format = checked_format(format, path)
    description = beside(path)
    check_new("path", path, description)
    images = checked_network(network, example_images)
    program = logits_program(network, _example(images))
    nodes = {node.name: node for node in program.graph.nodes}
    takes = [nodes[name].meta["val"] for name in program.graph_signature.user_inputs]
    batch = takes[0].shape[0]
    outputs = [nodes[name].meta["val"] for name in program.graph_signature.user_outputs]
    part = Part(
        path.name,
        program,
        inputs_of(images, takes),
        tuple(value_like(exit_name(index), each, batch) for index, each in enumerate(outputs)),
    )
    with naming(path), TemporaryDirectory(dir=path.parent, prefix=".auxhead-") as folder:
        difference, by = _write(network, images, [part], Path(folder), description.name, format)
        put_beside(Path(folder), path, description)
    return ExportReport((path, description), difference, by)


def export_stages(
    network: EarlyExitNetwork, example_images: Batch, directory: str | os.PathLike[str], *, format: str | None = None
) -> ExportReport:
    """Write the network cut at its taps, a file a stage, for batches of any size, and ``stages.json``.

    The first stage takes a batch, each other one what the stage before has returned behind its logits. Every stage
    returns the logits of its exit and what the next one needs; the last one the classifier's logits. Whoever runs them
    one after another may stop as soon as the rule of an exit, in the JSON, is content.

    Args:
        network: as of :func:`export_exits`.
        example_images: likewise.
        directory: made for the files, where there is nothing.
        format: likewise.

    Returns:
        ExportReport: the files of the stages in their order, then ``stages.json``.

    Raises:
        BadInput, TypeError, ValueError, RuntimeError, OSError: as :func:`export_exits` does.
    """
    directory = Path(directory)
    format = checked_format(format, directory)
    check_new("directory", directory)
    images = checked_network(network, example_images)
    x = _example(images)
    stages = cut_into_stages(logits_program(network, x).module())
    parts = _parts(stages, x, inputs_of(x, stages[0].takes), format)
    with naming(directory), TemporaryDirectory(dir=directory.parent, prefix=".auxhead-") as folder:
        inside = Path(folder, directory.name)  # with the permissions of a new folder, which a temporary one lacks
        inside.mkdir()
        difference, by = _write(network, images, parts, inside, STAGES, format)
        os.replace(inside, directory)
    return ExportReport((*(directory / part.file for part in parts), directory / STAGES), difference, by)


def put_beside(folder: Path, path: Path, description: Path) -> None:
    """Move the files of a folder to where a path is, its JSON last; ``BadInput`` if somebody was there first."""
    check_new("path", path, description)
    for file in sorted(folder.iterdir(), key=lambda file: file.name == description.name):
        os.replace(file, path.parent / file.name)


def check_new(name: str, *paths: Path) -> None:
    """Raise ``BadInput`` unless the paths of an argument are such where something new can be made."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise BadInput(f"{name}: {path} is there already, wants the name of something new")
        if not path.parent.is_dir():
            raise BadInput(f"{name}: {path.parent} is no folder, wants one that is there to put {path.name} into")


def beside(path: Path) -> Path:
    """Return the path of the JSON of a file; ``BadInput`` if it is none of a file."""
    if not path.name:
        raise BadInput(f"path: got {str(path)!r}, wants the name of a file")
    return path.with_name(f"{path.name}.json")


def _example(images: Batch) -> Batch:
    """Return two samples of a batch: a program made of one takes one alone, and of a view it keeps the sizes behind."""
    return map_tensors(two_samples(images), lambda each: each.clone(memory_format=torch.preserve_format))


def inputs_of(images: Batch, takes: Sequence[Tensor], taken: Collection[str] = ()) -> tuple[Value, ...]:
    """Describe the inputs of a file by the names that they have in a batch, unless taken; that of one is "input"."""
    words = [re.sub(r"\W+", "_", name).strip("_") for name in tensors_by_name(images)]
    names = [f"input_{word}" if word.isdecimal() else word or "input" for word in words]
    if len({*names}) < len(names) or any(name.startswith("exit_") or name in taken for name in names):
        names = [f"input_{index}" for index in range(len(names))]
    return tuple(value_like(name, each, takes[0].shape[0]) for name, each in zip(names, takes, strict=True))


def checked_network(network: EarlyExitNetwork, example_images: Batch, name: str = "example_images") -> Batch:
    """Return the images, without gradients, if they and the network can be exported; errors call them by ``name``."""
    check_network(network)
    check_input_batch(name, example_images)
    check_mode(network)
    for tap, head in zip(network.taps, network.exit_heads, strict=True):
        if any(map(is_lazy, head.parameters())):
            raise BadInput(f"heads[{tap!r}]: does not know its width yet, wants to have seen a batch and been trained")
    first = first_tensor(example_images)
    check_device(network, first.device)
    if first.is_floating_point() and first.dtype != network.dtype:
        raise BadInput(f"{name}: got {first.dtype}, wants {network.dtype}, as the network has")
    network.check_taps(example_images)
    return map_tensors(example_images, Tensor.detach)


def _parts(stages: Sequence[Stage], x: Batch, inputs: tuple[Value, ...], format: str) -> list[Part]:
    """Return the programs of stages, exported with what the stages before hand over for ``x``, and the first takes."""
    batch = stages[0].takes[0].shape[0]
    handed = tuple(tensors_by_name(x).values())
    parts = []
    for index, stage in enumerate(stages):
        hands = [value_like(f"handed_{index}_{place}", each, batch) for place, each in enumerate(stage.hands)]
        outputs = (value_like(exit_name(index), stage.logits, batch), *hands)
        program = stage_program(stage, handed)
        parts.append(Part(f"stage_{index}.{format}", program, inputs, outputs))
        with torch.no_grad():
            handed = stage.module(*handed)[1:]
        inputs = tuple(hands)
    return parts


def _write(
    network: EarlyExitNetwork, images: Batch, parts: Sequence[Part], folder: Path, description: str, format: str
) -> tuple[float | None, str]:
    """Write files and JSON into a folder, and compare them with the network."""
    paths = [write_part(part, folder, format) for part in parts]
    checked = check_files(network, images, paths, format)
    write_json(folder / description, describe(network, parts))
    for file in folder.iterdir():  # ONNX keeps large parameters in a file of their own
        on_disk(file)
    return checked


#: Of the JSON; a reader of this one refuses others.
FORMAT = 1


def describe(network: EarlyExitNetwork, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the content of the JSON: exits in the order of their logits, and files in the order in which they run."""
    rules = [{name: getattr(head.rule, name) for name in RULE_ARGUMENTS} for head in network.exit_heads]
    exits = zip([*network.taps, None], [*rules, None], strict=True)  # the classifier has neither
    return {
        "format": FORMAT,
        "preprocessing": None if network.preprocessing is None else network.preprocessing.as_json(),
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
