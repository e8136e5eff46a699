"""Reports that commands of ``auxhead`` write as one JSON object: read and checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..autotune.records.checks import Wanted, check
from ..autotune.records.json_text import parse_json
from ..autotune.records.record import BadRecord
from .records import NoRecords

#: The formats of reports, by the command that writes them.
FORMATS = {"auxhead demo": "auxhead demo report 1", "auxhead calibrate": "auxhead calibration report 1"}
_SOME = Wanted("an exit or more", bool)


def read_one_report(paths: Sequence[Path], made_by: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Read a report with a list of ``exits``.

    Args:
        paths: of files, one of which is a report of that command; those of the other commands are passed over.
        made_by: the command that writes it, one of ``FORMATS``.
        form: of the fields that are read.

    Raises:
        NoRecords: there is no such file.
        BadRecord: several reports, or a file that is none.
    """
    others = {report for command, report in FORMATS.items() if command != made_by}
    read = [(path, _read(path)) for path in paths]
    own = [(path, content) for path, content in read if content.get("format") not in others]
    if not own:
        raise NoRecords(f"{', '.join(map(str, paths))}: got reports of other commands")
    if len(own) > 1:
        raise BadRecord(f"{', '.join(str(path) for path, _ in own)}: got {len(own)} reports, wants one")
    ((path, content),) = own
    if content.get("format") != FORMATS[made_by]:
        got = content.get("format")
        raise BadRecord(f"{path}: format: got {got!r:.60}, wants {FORMATS[made_by]!r}, as `{made_by}` writes it")
    try:
        check(content, form)
        check(content, {"exits": _SOME})
    except ValueError as error:
        raise BadRecord(f"{path}: {error}") from None
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoRecords(f"{path}: no such file, wants a report.json") from None
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadRecord(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadRecord(f"{path}: holds a JSON {type(content).__name__}, wants an object")
    return content
