"""``parse_json`` as kernels has it: what reads records imports no torch, and so nothing of that package."""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: no JSON, nested too deep, or an object with a name twice, of which nobody knows the right one.
    """
    try:
        return _decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has {next(name for name in names if names.count(name) > 1)!r:.60} twice in one object")
    return made


_decode = json.JSONDecoder(object_pairs_hook=_object).decode
