"""Reports that commands of ``auxhead`` write as one JSON object: read and checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..autotune.records.checks import Wanted, check
from ..autotune.records.json_text import parse_json
from ..autotune.records.record import BadRecord
from .records import NoRecords

_SOME = Wanted("an exit or more", bool)


def read_one_report(paths: Sequence[Path], report_format: str, made_by: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Read a report with a list of ``exits``.

    Args:
        paths: of one file.
        report_format: the value of its field ``format``.
        made_by: the command that writes it.
        form: of the fields that are read.

    Raises:
        NoRecords: there is no such file.
        BadRecord: several files, or one that is no such report.
    """
    if len(paths) > 1:
        raise BadRecord(f"{', '.join(map(str, paths))}: got {len(paths)} reports, wants one")
    (path,) = paths
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
    if content.get("format") != report_format:
        got = content.get("format")
        raise BadRecord(f"{path}: format: got {got!r:.60}, wants {report_format!r}, as `{made_by}` writes it")
    try:
        check(content, form)
        check(content, {"exits": _SOME})
    except ValueError as error:
        raise BadRecord(f"{path}: {error}") from None
    return content
