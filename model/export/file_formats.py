"""The formats of exported files, ONNX and PyTorch's own: writing a program, and comparing what was written."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..basics.bad_input import BadInput, one_line
from ..listening.batches import Batch, first_tensor, map_tensors, tensors_by_name
from ..listening.rounding import relative_error
from ..network.early_exit_network import EarlyExitNetwork
from .program import one_line_of_exporter, quietly

#: Formats by name, which is also how their files end.
FORMATS = ("onnx", "pt2")
#: The first dimension of a batch, where shapes are written down.
BATCH = "batch"


class Value(NamedTuple):
    """A tensor that a file takes or returns."""

    name: str
    shape: tuple[int | str, ...]
    """Sizes; those that depend on the batch size in words: "batch", "4*batch"."""
    dtype: str
    """As PyTorch calls it, without ``torch.``."""


class Part(NamedTuple):
    """A program that becomes one file."""

    file: str
    program: ExportedProgram
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    defaults: Mapping[str, Tensor] = MappingProxyType({})
    """What inputs, by name, are if they are left out, which ONNX alone has."""


#: Runs ONNX where onnxruntime does not, and lacks operators.
REFERENCE = "onnx.reference"


class OpenFile(NamedTuple):
    """A file that has been read again: a function, of as many tensors as it takes, and what runs it, in words."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    by: str


def checked_format(format: str | None, path: Path) -> str:
    """Return a format, None being that by which the path ends, or else "pt2"; ``BadInput`` if it cannot be."""
    named = path.suffix.removeprefix(".").lower()
    if format is None:
        format = named if named in FORMATS else "pt2"
    if format not in FORMATS:
        raise BadInput(f"format: got {format!r}, wants one of {list(FORMATS)}")
    if named in FORMATS and named != format:
        raise BadInput(f"format: got {format!r} for {path}, wants {named!r} or a name that ends in .{format}")
    if format == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise BadInput(
                f"format: 'onnx' needs onnx and onnxscript ({error}); wants `pip install onnx onnxscript`, or 'pt2'"
            ) from None
    return format


def write_part(part: Part, folder: Path, format: str) -> Path:
    """Write a program into a folder; ``BadInput`` if ONNX has no operators for it."""
    path = folder / part.file
    if format == "pt2":
        content = io.BytesIO()  # PyTorch's own writer ends the process where a disk is full
        with quietly():
            torch.export.save(part.program, content)
        path.write_bytes(content.getbuffer())
        return path
    from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass

    names: list[dict[int, str]] = [{} for _ in part.inputs]
    for value, of_value in zip(part.inputs, names, strict=True):
        if BATCH in value.shape:  # of all inputs it is one size, which is named once
            of_value[value.shape.index(BATCH)] = BATCH
            break
    with one_line_of_exporter("network: torch.onnx cannot export it"):
        program = part.program.run_decompositions({torch.ops.aten.adaptive_max_pool2d.default: _max_of_windows})
        made = torch.onnx.export(
            program,
            (),
            dynamo=True,
            verbose=False,
            input_names=[value.name for value in part.inputs],
            output_names=[value.name for value in part.outputs],
            dynamic_shapes=tuple(names),
        )
        assert made is not None
        _set_defaults(made, part.defaults)
        RemoveUnusedNodesPass()(made.model)  # what the exporter's own has left in branches, of which onnxruntime warns
        NameFixPass()(made.model)  # of a value that is called as an input is
        made.save(path)
    return path


def _set_defaults(made: torch.onnx.ONNXProgram, defaults: Mapping[str, Tensor]) -> None:
    """Let inputs be left out: an initializer by the name of an input is its default."""
    import onnx_ir

    graph = made.model.graph
    for value in graph.inputs:
        name = value.name or ""
        if name in defaults:
            value.const_value = onnx_ir.tensor(defaults[name].cpu().numpy(), name=name)
            graph.register_initializer(value)


def _max_of_windows(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pool as ``adaptive_max_pool2d`` does, which ONNX does not have: maxima [..., h, w], and where they are."""
    values, places = [], []
    rows, columns = (
        [(i * size // windows, -(-(i + 1) * size // windows)) for i in range(windows)]
        for size, windows in zip(x.shape[-2:], output_size, strict=True)
    )
    for top, bottom in rows:
        for left, right in columns:
            value, place = x[..., top:bottom, left:right].flatten(-2).max(-1)
            values.append(value)
            places.append((place // (right - left) + top) * x.shape[-1] + place % (right - left) + left)
    shape = [*x.shape[:-2], *output_size]
    return torch.stack(values, -1).view(shape), torch.stack(places, -1).view(shape)


def open_program(path: Path) -> nn.Module:
    """Read a "pt2" file as a module."""
    with quietly(), path.open("rb") as file:  # of a file by another name than .pt2 it logs that, and the name
        return torch.export.load(file).module()


def open_file(path: Path, format: str) -> OpenFile:
    """Read a file that was just written; an ONNX file is checked by ``onnx.checker``, too."""
    if format == "pt2":
        module = open_program(path)
        return OpenFile(lambda values: module(*values), "torch.export.load")
    import onnx

    with one_line_of_exporter("network: onnx.checker refuses its file"):
        onnx.checker.check_model(path, full_check=True)
    try:
        model: Any = _session(path)
        names, by = [each.name for each in (*model.get_inputs(), *model.get_overridable_initializers())], "onnxruntime"
    except Exception as error:  # not installed, or without an operator for a dtype, which it says by many kinds
        from onnx.reference import ReferenceEvaluator

        model, by = ReferenceEvaluator(str(path)), REFERENCE
        names = model.input_names
        if not isinstance(error, ImportError):
            by += f", since onnxruntime cannot run it: {one_line(error)}"

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        given = {name: value.cpu().numpy() for name, value in zip(names[: len(values)], values, strict=True)}
        return [torch.tensor(found) for found in model.run(None, given)]  # a copy: an array may be read-only

    return OpenFile(run, by)


def _session(path: Path) -> Any:
    """Open an ONNX file in onnxruntime, on the CPU."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3  # errors alone: it warns of inputs that may be left out
    return InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


#: Other sizes than the one of the export, and one sample, which PyTorch likes to treat apart.
_SIZES = (1, 3)


def allowed(dtype: torch.dtype) -> float:
    """Return how far logits may be off, in parts of the largest: of a wrong graph it is more, by TF32 it is less."""
    return {torch.float64: 1e-6, torch.float32: 5e-3}.get(dtype, 5e-2)


@torch.no_grad()
def check_files(
    network: EarlyExitNetwork, images: Batch, paths: Sequence[Path], format: str
) -> tuple[float | None, str]:
    """Run the files, one after another, beside the network; ``RuntimeError`` for more than rounding between them.

    Returns the largest difference of a logit, in parts of the largest one, and what ran the files; None and the reason
    if onnx's reference, which lacks operators, cannot run them.
    """
    files = [open_file(path, format) for path in paths]
    by, largest = files[0].by, 0.0
    for size in _SIZES:
        samples = len(first_tensor(images))
        which = torch.arange(size) % samples
        own = [y for y in tensors_by_name(images).values() if y.ndim and len(y) == samples]
        x = map_tensors(images, lambda y, i=which, own=own: y[i] if any(y is one for one in own) else y)  # type: ignore[misc]
        found: list[Tensor] = []
        handed: Sequence[Tensor] = [each.clone() for each in tensors_by_name(x).values()]
        for file in files:
            try:
                returned = file.run(handed)
            except Exception as error:  # of many kinds
                said = f"{type(error).__name__}: {one_line(error)}"
                if by.startswith(REFERENCE) and size == _SIZES[0]:
                    return None, f"onnx.checker alone, since {REFERENCE} cannot run it ({said})"
                raise RuntimeError(f"file: {by} cannot run it on a batch of {size}: {said}") from error
            logits, handed = (returned[:1], returned[1:]) if len(files) > 1 else (returned, [])
            found += logits
        wanted = [logits.cpu() for logits in network.logits(x)]
        off = relative_error([logits.cpu() for logits in found], [logits.double() for logits in wanted])
        if not off <= allowed(wanted[-1].dtype):
            raise RuntimeError(
                f"file: logits that {by} computes of a batch of {size} differ from the network's by {off:.2g} of the "
                "largest one"
            )
        largest = max(largest, off)
    return largest, by
