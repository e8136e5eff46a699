"""Runs exported files as whoever deploys them would: by what their JSON says, with no code of ours."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor


def read_description(path: Path) -> dict:
    """Read the JSON of an export."""
    return json.loads(path.read_text())


def run_file(path: Path, inputs: list[Tensor]) -> list[Tensor]:
    """Run one file."""
    return _opened(path)(inputs)


@lru_cache(maxsize=8)
def _opened(path: Path) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Read a file, which takes far longer than to run it, once for batches of all sizes."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return torch.no_grad()(lambda inputs: list(module(*inputs)))
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(str(path))

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: value.numpy() for name, value in zip(model.input_names, inputs, strict=True)}
        return [torch.from_numpy(found) for found in model.run(None, given)]

    return run


def run_whole(description: Path, x: Tensor) -> list[Tensor]:
    """Return the logits of all exits from the one file of a description."""
    (file,) = read_description(description)["files"]
    return run_file(description.parent / file["file"], [x])


def run_stages(description: Path, x: Tensor) -> list[Tensor]:
    """Return the logits of all exits, stage by stage; asserts that each gives the shapes that the description says."""
    logits, handed = [], [x]
    for file in read_description(description)["files"]:
        _assert_as_said(file["inputs"], handed, len(x))
        found = run_file(description.parent / file["file"], handed)
        _assert_as_said(file["outputs"], found, len(x))
        logits.append(found[0])
        handed = found[1:]
    assert not handed
    return logits


def first_sure(description: Path, logits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return label and exit of each sample by the rules of a description, for max_prob, margin and entropy."""
    label = logits[-1].argmax(1)
    exit_index = torch.full_like(label, len(logits) - 1)
    for index, one in reversed(list(enumerate(read_description(description)["exits"][:-1]))):
        rule = one["rule"]
        probs = (logits[index] / rule["temperature"]).softmax(1)
        top = probs.topk(2, 1).values
        entropy = -(probs * probs.log()).sum(1) / torch.tensor(float(probs.shape[1])).log()
        confidence = {"max_prob": top[:, 0], "margin": top[:, 0] - top[:, 1], "entropy": 1 - entropy}[rule["criterion"]]
        sure = (confidence > rule["threshold"]) & rule["enabled"]
        label = torch.where(sure, logits[index].argmax(1), label)
        exit_index = exit_index.masked_fill(sure, index)
    return label, exit_index


def _assert_as_said(said: list[dict], found: list[Tensor], batch: int) -> None:
    shapes = [[_size(size, batch) for size in value["shape"]] for value in said]
    assert shapes == [list(value.shape) for value in found]
    assert [f"torch.{value['dtype']}" for value in said] == [str(value.dtype) for value in found]


def _size(said: int | str, batch: int) -> int:
    if isinstance(said, int):
        return said
    *factor, name = said.split("*")
    assert name == "batch"
    return batch * int(factor[0] if factor else 1)
