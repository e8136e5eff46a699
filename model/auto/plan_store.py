"""Plans on disk: a JSON file a plan, in the user's cache directory."""

import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

from ..json_file import write_json
from .plan import Plan

#: Of the files; others are ignored.
FORMAT = 1


def plans_directory() -> Path:
    """Return where plans are kept: in AUXHEAD_CACHE if that is set, else in auxhead/ of the user's cache directory."""
    if own := os.environ.get("AUXHEAD_CACHE"):
        return Path(own) / "plans"
    cache = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored where it is relative, says its specification
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "auxhead" / "plans"


def remembered_plan(key: dict[str, Any]) -> Plan | None:
    """Return the plan that was kept for exactly this key, if there is one.

    A file that cannot be read as one is told of in a warning; the next plan for that key is written over it.
    """
    path = _path(key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, wants {FORMAT}")
        if content["key"] != _as_read(key):
            raise ValueError("of another key than its name says")
        return dataclasses.replace(Plan.from_json(content["plan"]), remembered=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path} holds no plan ({type(error).__name__}: {error}); measuring anew", stacklevel=2)
        return None


def remember_plan(key: dict[str, Any], plan: Plan) -> None:
    """Keep a plan for later processes; where nothing can be written, say so in a warning."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "key": key, "plan": plan.as_json()})
    except OSError as error:
        warnings.warn(f"{path}: the plan is not remembered ({error.strerror or error})", stacklevel=2)


def _path(key: dict[str, Any]) -> Path:
    return plans_directory() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _as_read(key: dict[str, Any]) -> Any:
    """A key as it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(key))
