"""``text_table`` and ``wrapped``: reports as text of 80 columns."""

import textwrap
from collections.abc import Sequence

#: Columns of a terminal, by default.
WIDTH = 80
#: A first column is folded to no less than this.
_LEAST = 8


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text, whose first row has the headings, of several lines where a line ends in one.

    The first column is at the left, and folded where the table would be wider than ``WIDTH``; others are at the right.
    """
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    widths[0] = min(widths[0], max(_LEAST, WIDTH - sum(widths[1:]) - len(gap) * (len(widths) - 1)))
    lines: list[str] = []
    for number, row in enumerate(rows):
        first = [line[at : at + widths[0]] for line in row[0].split("\n") for at in range(0, len(line) or 1, widths[0])]
        cells = [first, *(cell.split("\n") for cell in row[1:])]
        height = max(map(len, cells))
        for cell in cells:  # headings stand on their rule, and what is folded begins beside its numbers
            cell[len(cell) * (number > 0) : 0] = [""] * (height - len(cell))
        for left, *others in zip(*cells, strict=True):
            right = (one.rjust(width) for one, width in zip(others, widths[1:], strict=True))
            lines.append(gap.join([left.ljust(widths[0]), *right]).rstrip())
        if not number:
            lines.append(gap.join("-" * width for width in widths))
    return "\n".join(lines)


def wrapped(sentences: Sequence[str]) -> str:
    """Return sentences one below another, each in lines of ``WIDTH`` columns at most."""
    return "\n".join(textwrap.fill(one, WIDTH, break_long_words=False, break_on_hyphens=False) for one in sentences)
