"""``NamedTarget``: the factory, script or trace that the arguments of ``auxhead-tune doctor`` name."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ....model.basics.bad_input import BadInput

#: What TARGET is for a script.
_SCRIPT = "run"
#: How names of traces end.
_TRACES = (".json", ".json.gz")


class NamedTarget(NamedTuple):
    """A target that is there, as far as that can be told without running it; one of the three is not None."""

    name: str
    """As the record has it: the factory, the trace, or the script with its arguments."""
    factory: str | None = None
    """``package.module:factory``."""
    trace: Path | None = None
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    """The script's."""


def named_target(target: str, words: Sequence[str]) -> NamedTarget:
    """Tell which of the three TARGET and the words behind it are.

    Raises:
        BadInput: none of them, or a file that is not there; says how to write what may have been meant.
    """
    if target == _SCRIPT:
        if not words:
            raise BadInput("TARGET: got run and no script, wants run SCRIPT [ARGUMENTS]...")
        script = _file("SCRIPT", words[0])
        return NamedTarget(" ".join(words), script=script, arguments=tuple(words[1:]))
    if words:
        raise BadInput(f"TARGET: got {target} and {' '.join(words)}, wants one target; options go before it")
    if target.endswith(_TRACES) or Path(target).is_file() and not target.endswith(".py"):
        return NamedTarget(target, trace=_file("TARGET", target))
    if ":" not in target:
        script_name = target if target.endswith(".py") else "SCRIPT"
        raise BadInput(
            f"TARGET: got {target!r}, wants package.module:factory; a script is run by: auxhead-tune doctor "
            f"{_SCRIPT} {script_name}; a trace's name ends in {' or '.join(_TRACES)}"
        )
    return NamedTarget(target, factory=target)


def _file(argument: str, name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise BadInput(f"{argument}: {name} is a directory, wants a file")
    if not path.is_file():
        raise BadInput(f"{argument}: {name}: no such file")
    return path
