"""Answers for image files with any runner: finds the files, reads them batch by batch, and writes what is answered."""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from PIL import Image
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA
from ..answers.exit_result import ExitResult, joined
from ..basics.bad_input import BadInput
from ..basics.files import is_standard_output, writing
from ..basics.images import FORMATS
from ..make_runner import make_runner
from ..processes.dealing import dealt
from ..processes.process_group import own_rank
from ..runners.runner import Runner
from ..saving.checkpoint import Checkpoint
from .console import escaped


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that paths are, or that lie below them: in folders those named as images are, in order."""
    endings = {ending for ending, form in Image.registered_extensions().items() if form in FORMATS}
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        below = sorted(file for file in path.rglob("*") if file.suffix.lower() in endings and file.is_file())
        if not below:
            raise BadInput(f"{path}: has no images below it, wants files that end in {', '.join(sorted(endings))}")
        found += below
    return found


def answers(checkpoint: Checkpoint, files: Sequence[Path], *, exits: str, batch: int) -> Iterator[ExitResult]:
    """Answer for files, ``batch`` of them at a time, on the network's device; of several processes each in its turn.

    The runner, ``exits`` of :func:`make_runner`, is made for the first batch. ``BadInput`` for a file that cannot be
    read as an image, or a runner that cannot be made of this network.
    """
    runner: Runner | None = None

    def answered(of_batch: Sequence[Path]) -> dict[str, Tensor]:
        nonlocal runner
        x = checkpoint.read_images(of_batch)
        if runner is None:
            try:
                runner = make_runner(checkpoint.network, x, exits=exits)
            except (RuntimeError, ValueError) as error:
                raise BadInput(f"--runner: {exits}: {' '.join(str(error).split())}") from None
        parts = runner(x).cpu()._asdict()
        return {name: part for name, part in parts.items() if part is not None}

    def names_and_sizes(of_batch: Sequence[Path]) -> bytes:
        return repr([(str(file), file.stat().st_size) for file in of_batch if file.is_file()]).encode()

    batches = [files[start : start + batch] for start in range(0, len(files), batch)]
    try:
        found = dealt(batches, answered, names_and_sizes, "images")
        for parts in found:
            yield ExitResult(parts.get(name) for name in ExitResult._fields)
    finally:
        if runner is not None:
            runner.close()


def run_infer(
    checkpoint: Checkpoint, paths: Sequence[Path], *, exits: str, batch: int, out: Path | None, console: Console
) -> None:
    """Answer for images, and print a table or, where ``out`` is given, write JSON lines; of several processes rank 0.

    A file gets its name once all is answered; on standard output (``-``), and in what is no file, each batch's lines
    stand at once.
    """
    files = image_files(paths)
    network = checkpoint.network
    names = checkpoint.classes or [str(label) for label in range(network.exit_heads[0].num_classes)]
    exit_names = [*network.taps, "classifier"]
    if out is None:
        for head in network.exit_heads:
            head.return_probs = True  # which the table shows
    left: Counter[int] = Counter()
    began = time.perf_counter()
    found = answers(checkpoint, files, exits=exits, batch=batch)
    if own_rank() > 0:
        deque(found, maxlen=0)  # what it answers goes to rank 0 meanwhile
        return
    if out is None:
        result = joined(list(found))
        console.print(answers_table(files, result, exit_names, names))
        left.update(result.exit_index.tolist())
    else:
        to_stdout = is_standard_output(out)
        with writing(out) as lines:
            for number, result in enumerate(found):
                of_batch = files[number * batch :][:batch]
                _write_lines(lines, of_batch, result, exit_names, names)
                left.update(result.exit_index.tolist())
        if to_stdout:
            return
    seconds = time.perf_counter() - began
    shares = ", ".join(f"{left[index] / len(files):.0%} {name}" for index, name in enumerate(exit_names) if left[index])
    saved = "" if out is None else f" Saved in {out}."
    if all(head.rule.threshold >= CRITERIA[head.rule.criterion].high for head in network.exit_heads):
        saved += (
            " No head may answer: `auxhead calibrate` found no thresholds within its budget, and says which one is "
            "within reach."
            if checkpoint.calibration
            else " No head may answer yet: `auxhead calibrate` chooses thresholds."
        )
    if cut := checkpoint.preprocessing.cut_away(map(_size_of, files)):
        saved += f" {cut}"
    console.print(
        f"{len(files):,} images in {seconds:.1f} s, reading included; left at: {shares}.{saved}", soft_wrap=True
    )


def _size_of(file: Path) -> tuple[int, int]:
    with Image.open(file, formats=FORMATS) as image:  # which reads no pixel
        return image.size


def _write_lines(
    lines: BinaryIO, files: Sequence[Path], result: ExitResult, exits: Sequence[str], classes: Sequence[str]
) -> None:
    """Write an object a line: image, class by name and index, confidence (null if there is none), exit."""
    values = zip(files, result.label.tolist(), result.confidence.tolist(), result.exit_index.tolist(), strict=True)
    for file, label, confidence, exit_index in values:
        line = {
            "image": str(file),
            "class": classes[label],
            "class_index": label,
            "confidence": confidence if math.isfinite(confidence) else None,
            "exit": exits[exit_index],
            "exit_index": exit_index,
        }
        lines.write((json.dumps(line) + "\n").encode())
    lines.flush()


def answers_table(files: Sequence[Path], result: ExitResult, exits: Sequence[str], classes: Sequence[str]) -> Table:
    """Return the table of answers for image files, a row each; the last of ``exits`` is the classifier."""
    assert result.probs is not None
    top = result.probs.topk(min(2, len(classes)), dim=1)
    table = Table(
        Column("file", overflow="fold"),
        "answer",
        Column("sure", justify="right"),
        Column(f"exit (0 to {len(exits) - 1})", no_wrap=True),
        "next",
    )
    for row, file in enumerate(files):
        exit_index, sure = int(result.exit_index[row]), result.confidence[row].item()
        likely = zip(top.indices[row, 1:].tolist(), top.values[row, 1:].tolist(), strict=True)
        table.add_row(
            escaped(str(file)),
            classes[int(result.label[row])],
            f"{sure:.1%}" if 0.0 <= sure <= 1.0 else f"{sure:.4g}",  # an energy is of any size
            f"{exit_index}: {exits[exit_index]}",
            ", ".join(f"{classes[label]} {share:.0%}" for label, share in likely),
        )
    return table
