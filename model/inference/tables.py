"""The table of answers for image files."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table

from ..commands.console import escaped
from ..exit_result import ExitResult


def answers_table(files: Sequence[Path], result: ExitResult, exits: Sequence[str], classes: Sequence[str]) -> Table:
    """Return the table of answers for image files, a row each; the last of ``exits`` is the classifier."""
    assert result.probs is not None
    top = result.probs.topk(min(3, len(classes)), dim=1)
    table = Table(
        Column("file", overflow="fold"),
        "answer",
        Column("sure", justify="right"),
        Column(f"exit (of {len(exits)})", no_wrap=True),
        "most likely",
    )
    for row, file in enumerate(files):
        exit_index = int(result.exit_index[row])
        likely = zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)
        table.add_row(
            escaped(str(file)),
            classes[int(result.label[row])],
            _in_words(result.confidence[row].item()),
            f"{exit_index + 1}: {exits[exit_index]}",
            ", ".join(f"{classes[label]} {share:.0%}" for label, share in likely),
        )
    return table


def _in_words(confidence: float) -> str:
    """Return a confidence in percent, or an energy, which is of any size, as it is."""
    return f"{confidence:.1%}" if 0.0 <= confidence <= 1.0 else f"{confidence:.4g}"
