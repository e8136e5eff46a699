"""The comparison's table in Markdown: a row for each way, means over the seeds."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

HEADINGS = ("trained and calibrated by", "accuracy", "accuracy without exits", "leave early", "mean exit", "mean work")


def comparison_table(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table of a record."""
    rows = content["rows"]
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for way in dict.fromkeys(row["way"] for row in rows):

        def over_seeds(field: str, way: str = way) -> float:
            return mean(row[field] for row in rows if row["way"] == way)

        cells = [
            way,
            *(f"{over_seeds(field):.2%}" for field in ("accuracy", "full_accuracy")),
            f"{over_seeds('left_early'):.1%}",
            f"{over_seeds('mean_exit'):.2f}",
            f"{over_seeds('mean_work'):.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
