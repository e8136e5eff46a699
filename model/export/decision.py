"""``export_decision``: the answer for one sample as one file, which runs no further than the first sure exit."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import HeadOutput, Merged, decide_in_order, merge
from ..basics.bad_input import BadInput, one_line
from ..basics.files import naming, on_disk, write_json
from ..basics.tables import wrapped
from ..listening.batches import Batch, first_tensor, map_tensors, tensors_by_name
from ..network.early_exit_network import EarlyExitNetwork
from .decision_program import Rules, decision_program, naming_heads
from .exporting import ExportReport, beside, check_new, checked_network, describe, inputs_of, put_beside, value_like
from .file_formats import REFERENCE, Part, allowed, checked_format, open_file, open_program, write_part

#: What a file returns, in this order, as ``ExitResult`` does.
OUTPUTS = ("label", "confidence", "probs", "exit_index")
#: What of a file's rest cannot be skipped, by its format.
COSTS = {
    "pt2": "On a GPU the host waits for each exit's confidence before it launches what is behind it.",
    "onnx": "onnxruntime evaluates each If on the host: on a GPU it waits at each exit.",
}


@dataclass(frozen=True, repr=False)
class DecisionReport(ExportReport):
    """What an export of a decision has written; ``difference`` is of a confidence or a probability."""

    exits: int
    """At how many exits the file was compared with the network, the classifier's among them."""
    costs: str
    """What of the file's rest cannot be skipped."""

    def __repr__(self) -> str:
        """Say how far off the file is, what it skips and what not, and name the files."""
        found = f"not compared ({self.checked_by})"
        if self.difference is not None:
            found = f"{self.difference:.1g} at most, leaving at each of {self.exits} exits ({self.checked_by})"
        skips = f"Layers behind the exit that answers do not run; their parameters are loaded. {self.costs}"
        return f"{wrapped([f'Off from the network: {found}.', skips])}\nSaved: {', '.join(map(str, self.files))}"


def export_decision(
    network: EarlyExitNetwork,
    example: Batch,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    classes: Sequence[str] = (),
) -> ExportReport:
    """Write the network's answer for one sample as one file, which stops at the first sure exit, and a JSON beside it.

    The file takes a sample, a batch of one, and returns ``label``, ``confidence``, ``probs`` and ``exit_index`` as
    :class:`ExitResult` has them; without probs if a head leaves them out. Its ``thresholds``, ``temperatures`` and
    ``enabled``, a number a head, may be changed: a "pt2" file has them as buffers of its module, an "onnx" file as
    inputs that may be left out. The JSON, named like it with .json behind, holds inputs, outputs, preprocessing,
    classes, taps and rules. AOTInductor wants ``inductor_configs={"layout_optimization": False}``: as of PyTorch 2.11 a
    convolution in a branch is else another one.

    Args:
        network: in eval mode; the file has its parameters, its dtype and, as pt2, its device.
        example: a batch of one sample that the network takes, whose sizes are those of the file; it also serves to
            compare the file with the network, leaving at every exit.
        path: of the file, where there is none.
        format: "onnx", which needs onnx and onnxscript, or "pt2", which ``torch.export.load`` reads; None is that by
            which the path ends, and else "pt2".
        classes: names for the JSON, in the order of the labels; as many as the network has classes, or none.

    Raises:
        BadInput: the example has several samples; something is there already; or torch.export or ONNX cannot have the
            network, or a head, which the message names.
        TypeError, ValueError: network, example or classes cannot be used.
        RuntimeError: the file computes something else than the network; it is not kept.
        OSError: no space or no permission; names the path.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, rules=0.0).eval()
        >>> image = torch.randn(1, 3, 8, 8)
        >>> report = export_decision(network, image, f"{folder}.pt2")
        >>> label, confidence, probs, exit_index = torch.export.load(report.files[0]).module()(image)
        >>> exit_index  # any confidence is above 0.0
        tensor([0])
    """
    path = Path(path)
    format = checked_format(format, path)
    description = beside(path)
    check_new("path", path, description)
    sample = checked_network(network, example, "example")
    if len(first_tensor(sample)) != 1:
        raise BadInput(
            f"example: got a batch of {len(first_tensor(sample))}, wants one sample, images[:1], say: a file goes on "
            "or stops for all that it is given; for batches write export_stages(network, images, directory)"
        )
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"classes: got {classes!r:.60}, wants a list of names")
    if classes and len(classes) != network.exit_heads[0].num_classes:
        wants = f"{network.exit_heads[0].num_classes}, as the network has classes, or none"
        raise ValueError(f"classes: got {len(classes)} names, wants {wants}")
    rules = Rules.of(network, first_tensor(sample).device)
    part = _part(network, sample, rules, path.name, format)
    with naming(path), TemporaryDirectory(dir=path.parent, prefix=".auxhead-") as folder:
        with naming_heads(network, sample, _onnx_alone):
            written = write_part(part, Path(folder), format)
        difference, by = _compare(network, sample, rules, written, format)
        write_json(Path(folder, description.name), _description(network, part, classes))
        for file in Path(folder).iterdir():  # ONNX keeps large parameters in a file of their own
            on_disk(file)
        put_beside(Path(folder), path, description)
    return DecisionReport((path, description), difference, by, len(network.taps) + 1, COSTS[format])


def _part(network: EarlyExitNetwork, sample: Batch, rules: Rules, file: str, format: str) -> Part:
    """Return the program of a decision, its inputs and outputs by name, and the rules where they are inputs."""
    sample = map_tensors(sample, lambda each: each.clone(memory_format=torch.preserve_format))
    program, inputs = decision_program(network, sample, rules, rules_given=format == "onnx")
    defaults = rules._asdict() if format == "onnx" else {}
    with torch.no_grad():
        returned = program.module()(*inputs)
    names = OUTPUTS if len(returned) == len(OUTPUTS) else [name for name in OUTPUTS if name != "probs"]
    values = [value_like(name, each, None) for name, each in zip(names, returned, strict=True)]
    given = [value_like(name, each, None) for name, each in defaults.items()]
    takes = inputs_of(sample, tuple(tensors_by_name(sample).values()), {*OUTPUTS, *Rules._fields})
    return Part(file, program, (*takes, *given), tuple(values), defaults)


def _onnx_alone(head: nn.Module, features: Tensor) -> None:
    torch.onnx.export(torch.export.export(head, (features,)), (), dynamo=True, verbose=False)


def _description(network: EarlyExitNetwork, part: Part, classes: Sequence[str]) -> dict[str, Any]:
    """Return the content of the JSON: that of the other exports, and the names of classes; no logits have names."""
    found = describe(network, [part])
    exits = [{name: value for name, value in each.items() if name != "logits"} for each in found["exits"]]
    return {"format": found["format"], "classes": [*classes], **found, "exits": exits}


@torch.no_grad()
def _compare(
    network: EarlyExitNetwork, sample: Batch, rules: Rules, path: Path, format: str
) -> tuple[float | None, str]:
    """Run a file on the sample under its own rules, and leaving at every exit; ``RuntimeError`` for another answer.

    Returns the largest difference of a confidence or a probability, and what ran the file; None and the reason if
    onnx's reference, which lacks operators, cannot run it.
    """
    run, by = _opened(path, format)
    tensors = tuple(tensors_by_name(sample).values())
    logits = network.logits(sample)
    if not all(each.isfinite().all() for each in logits):
        raise BadInput("example: the network's logits for it are not all finite, wants a sample that it can answer")
    criteria = [head.rule.criterion for head in network.exit_heads]
    largest = 0.0
    for forced in (None, *range(len(logits))):
        under = rules if forced is None else rules.forcing(forced)
        where = "under its rules" if forced is None else f"made to leave at exit {forced}"
        limits = under.thresholds.where(under.enabled != 0, torch.inf)
        outputs = decide_in_order(logits, zip(under.temperatures, limits, criteria, strict=True))
        try:
            found = run([each.clone() for each in tensors], None if forced is None else under)
        except Exception as error:  # of many kinds
            said = f"{type(error).__name__}: {one_line(error)}"
            if by.startswith(REFERENCE) and forced is None:
                return None, f"onnx.checker alone, since {REFERENCE} cannot run it ({said})"
            raise RuntimeError(f"file: {by} cannot run it {where}: {said}") from error
        wanted = merge(outputs, with_probs=True)
        if forced is None and _is_at_threshold(outputs, limits, int(found[-1]), int(wanted.exit_index)):
            continue  # a confidence that is the threshold, but for rounding
        off = _difference(found, wanted)
        if not off <= allowed(logits[-1].dtype):
            raise RuntimeError(
                f"file: {by} answers a sample that is {where} by exit {int(found[-1])} of label {int(found[0])}, the "
                f"network by exit {int(wanted.exit_index)} of label {int(wanted.label)}; off by {off:.2g}"
            )
        largest = max(largest, off)
    return largest, by


#: Runs a file on the tensors of a sample, under other rules than its own if there are any.
Run = Callable[[Sequence[Tensor], Rules | None], Sequence[Tensor]]


def _opened(path: Path, format: str) -> tuple[Run, str]:
    """Read a file that was just written, and say what runs it."""
    if format == "onnx":
        file = open_file(path, format)
        return lambda tensors, rules: file.run([*tensors, *(rules or ())]), file.by
    module = open_program(path)

    def run(tensors: Sequence[Tensor], rules: Rules | None) -> Sequence[Tensor]:
        for name, value in ({} if rules is None else rules._asdict()).items():
            module.get_buffer(name).copy_(value)
        found: Sequence[Tensor] = module(*tensors)
        return found

    return run, "torch.export.load"


def _difference(found: Sequence[Tensor], wanted: Merged) -> float:
    """Return how far confidence and probabilities are off; infinity for another exit, or a label that is no equal."""
    label, confidence, *probs, exit_index = (part.cpu() for part in found)
    label_, confidence_, probs_, exit_index_ = (part.cpu() for part in wanted if part is not None)
    if not torch.equal(exit_index, exit_index_):
        return float("inf")
    off = [(confidence.double() - confidence_.double()).abs() / confidence_.double().abs().clamp_min(1.0)]
    off += [(each.double() - probs_.double()).abs().amax(1) for each in probs]
    off.append((probs_.gather(1, label_[:, None]) - probs_.gather(1, label[:, None])).double()[:, 0])
    return float(torch.stack(off).max())


def _is_at_threshold(outputs: Sequence[HeadOutput], limits: Tensor, found: int, wanted: int) -> bool:
    """Return whether the exit at which one answer goes on and the other does not is sure but for rounding."""
    if found == wanted:
        return False
    confidence, limit = float(outputs[min(found, wanted)].confidence), float(limits[min(found, wanted)])
    return abs(confidence - limit) <= allowed(outputs[-1].confidence.dtype) * max(1.0, abs(limit))
