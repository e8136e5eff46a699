"""``parse_json``: reads JSON text, and refuses what Python's parser stumbles over or takes the last of."""

import json
from collections import Counter
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
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has {twice!r:.60} twice in one object")
    return made


_decode = json.JSONDecoder(object_pairs_hook=_object).decode
