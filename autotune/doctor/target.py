"""``NamedTarget``: a factory, a trace, or a script with its arguments, as the words of the command name it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...model.basics.bad_input import BadInput

#: What TARGET is for a script, and for two files of records that are compared.
SCRIPT, DIFF = "run", "diff"
#: How names of traces end.
TRACES = (".json", ".json.gz")


class NamedTarget(NamedTuple):
    """A target that is there, as far as that can be told without running it."""

    name: str
    """As the record has it: the factory, the trace, or the script with its arguments."""
    file: Path | None = None
    """The trace, or the script; None: the name is a factory's, ``package.module:factory``."""
    arguments: Sequence[str] | None = None
    """The script's; None: it is no script."""


def named_target(target: str, words: Sequence[str]) -> NamedTarget:
    """Tell which of the three TARGET and the words behind it are.

    Raises:
        BadInput: none of them, or a file that is not there; says how to write what may have been meant.
    """
    if target == SCRIPT:
        if not words:
            raise BadInput("TARGET: got run and no script, wants run SCRIPT [ARGUMENTS]...")
        found = NamedTarget(" ".join(words), Path(words[0]), words[1:])
    elif words:
        raise BadInput(f"TARGET: got {target} and {' '.join(words)}, wants one target")
    elif target.endswith(TRACES) or Path(target).is_file() and not target.endswith(".py"):
        found = NamedTarget(target, Path(target))
    elif ":" in target:
        return NamedTarget(target)
    else:
        script_name = target if target.endswith(".py") else "SCRIPT"
        raise BadInput(
            f"TARGET: got {target!r}, wants package.module:factory; a script is run by: auxhead-tune doctor "
            f"{SCRIPT} {script_name}; a trace's name ends in {' or '.join(TRACES)}"
        )
    argument = "TARGET" if found.arguments is None else "SCRIPT"
    if found.file is None or found.file.is_dir():
        raise BadInput(f"{argument}: {found.file} is a directory, wants a file")
    if not found.file.is_file():
        raise BadInput(f"{argument}: {found.file}: no such file")
    return found
