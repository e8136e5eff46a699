"""What Nsight Compute counts of footprints' launches, where there is ``ncu``: it runs a process of its own."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ..measuring.cells import Cell
from ..measuring.occupancy import Active
from ..measuring.replay_trace import HEAD_KERNEL
from . import launches as footprint_launches
from .footprints import Footprint
from .measure import FootprintsMeasured

#: What is counted: Nsight Compute's achieved occupancy.
METRIC = "sm__warps_active.avg.pct_of_peak_sustained_active"
#: Seconds that it may take.
TIMEOUT_S = 120
#: Clocks and caches as found; head launches only, and those only that ``footprint_launches`` asks to be counted.
_OPTIONS = (
    "--clock-control none --cache-control none --profile-from-start off "
    f"-k regex:{HEAD_KERNEL} --metrics {METRIC} --csv --page raw"
).split()
#: What lines begin with that are no results, and those that say what went wrong.
_SAYS, _ERROR, _WARNING = "==", "==ERROR==", "==WARNING=="
#: Characters of what it says that are kept.
_MOST_SAID = 300


class Counted(NamedTuple):
    """What Nsight Compute says of footprints, or why it says nothing."""

    active: dict[Footprint, list[Active]]
    """Of each launch beside the trunk, in order; empty if there is nothing."""
    absent: str | None
    """In a sentence, why; None if there is something."""


class _NotCounted(Exception):
    """Why there are no numbers, in words that go on after a colon."""


def count_active(cell: Cell, measured: FootprintsMeasured, device: torch.device) -> Counted:
    """Let Nsight Compute count the launches of all footprints that did not fail, after all timing.

    Args:
        cell: the network.
        measured: what was measured of it.
        device: where.

    Returns:
        Counted: whatever goes wrong is its ``absent``.
    """
    launches = {footprint: len(occupied.theoretical) for footprint, occupied in measured.occupied.items()}
    asked = {
        "cell": cell.as_json(),
        "device": str(device),
        "forks": measured.protocol["forks"],
        "names": [footprint.name for footprint in launches],
    }
    try:
        percent = iter(_counted(json.dumps(asked), sum(launches.values())))
    except _NotCounted as reason:
        return Counted({}, f"Nsight Compute's tier is absent: {reason}")
    return Counted(
        {footprint: [Active(next(percent)) for _ in range(count)] for footprint, count in launches.items()}, None
    )


def _counted(asked: str, launches: int) -> list[float]:
    """Return the percent of each launch, in order."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise _NotCounted("there is no ncu on the PATH.")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"  # what it says, apart from what the network's code may print
        child = [sys.executable, "-m", footprint_launches.__name__, asked]
        try:
            status, printed = _run([ncu, *_OPTIONS, "--log-file", str(log), *child])
        except OSError as error:
            raise _NotCounted(f"{ncu} does not start ({error.strerror}).") from None
        except subprocess.TimeoutExpired:
            raise _NotCounted(f"ncu took more than {TIMEOUT_S} s.") from None
        said = log.read_text(errors="replace") if log.exists() else ""
    percent = read_percent(said)
    if status != 0 or len(percent) != launches:
        why = _why(said.splitlines(), printed.splitlines()) or f"exit status {status}"
        raise _NotCounted(f"ncu counted {len(percent)} of {launches} launches: {why}")
    return percent


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit status of a command and what it and its children print."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, env={**os.environ, "LC_ALL": "C"},  # numbers as in Python
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException:  # an interrupt, too: what ncu has started does not end with it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed


def read_percent(said: str) -> list[float]:
    """Return the percent of each launch that ``ncu --csv --page raw`` lists, in order; none if it lists nothing.

    Under the names of the columns stands a row of units, and then a row for each launch. Rows that hold no percentage
    count as none, so that launches are missing.
    """
    lines = (line for line in said.splitlines() if line and not line.startswith(_SAYS))
    rows = list(csv.reader(lines))
    header = next((place for place, row in enumerate(rows) if METRIC in row), None)
    if header is None:
        return []
    column = rows[header].index(METRIC)
    cells = [row[column] if column < len(row) else "" for row in rows[header + 1 :]]
    found = []
    for cell in cells[1:] if cells[:1] == ["%"] else []:
        with suppress(ValueError):  # "n/a"
            found.append(float(cell))
    return [percent for percent in found if 0.0 <= percent <= 100.0]


def _why(said: Sequence[str], printed: Sequence[str]) -> str:
    """Return all errors that ncu tells, the last line of what was printed (that of a traceback), and its warnings."""

    def told(kind: str) -> list[str]:
        return [line.removeprefix(kind) for line in (*said, *printed) if line.startswith(kind)]

    last = [line for line in printed if line.strip() and not line.startswith(_SAYS)][-1:]
    return " ".join(" ".join([*told(_ERROR), *last, *told(_WARNING)]).split())[:_MOST_SAID]
