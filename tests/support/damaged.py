"""Damages files: bytes of any kind, and JSON whose values, names and nesting are not as they were."""

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Written where a value is nested deeper than a parser may go.
_DEEP = "@@deep@@"
#: Values that stand where another belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 2**31, 2**63, 10**400, -(10**400), 1e308, 5e-324,
    math.nan, math.inf, -math.inf, "", "x", "0.5", "nan", "\ud800", "a\nb", "\x00", "../x", "/etc/passwd", "é" * 50_000,
    [], {}, [[]], [None], [1, 2], [0.5, 0.5, 0.5], {"": None}, {"x": {}}, _DEEP,
)  # fmt: skip


def damaged_bytes(content: bytes, dice: random.Random) -> bytes:
    """Return content with a few of its bytes changed, gone, doubled or too many."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        start = dice.randrange(len(content) + 1)
        end = min(len(content), start + dice.choice((1, 1, 2, 8, 100)))
        piece, noise = content[start:end], dice.randbytes(dice.choice((1, 2, 8, 100)))
        match dice.randrange(8):
            case 0:
                content = content[:start]
            case 1:
                content = content[:start] + bytes(byte ^ 1 << dice.randrange(8) for byte in piece) + content[end:]
            case 2:
                content = content[:start] + content[end:]
            case 3:
                content = content[:start] + piece + piece + content[end:]
            case 4:
                content = content[:start] + noise + content[start:]
            case 5:
                content = content[:start] + bytes(len(piece)) + content[end:]
            case 6:
                content = content[start:]
            case _:
                content = content + noise
    return content


def damaged_json(value: Any, dice: random.Random) -> bytes:
    """Return the text of a JSON value in which one or a few things are other than they were."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2))):
        value = _with_damage(value, dice)
    text = json.dumps(value, ensure_ascii=dice.random() < 0.8)
    text = text.replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000)
    match dice.randrange(20):
        case 0:
            text = text.replace('"', "'", 2)
        case 1:
            return text.encode("utf-16", "surrogatepass")
        case 2:
            text = "\ufeff" + text
        case 3 if text.startswith('{"'):  # a name twice
            name, _, _ = text[1:].partition(":")
            text = text[:-1] + f", {name}: null}}"
    return text.encode("utf-8", "surrogatepass")


def _with_damage(value: Any, dice: random.Random) -> Any:
    places = [(owner, name) for owner, name in _places(value)]
    if not places or dice.random() < 0.02:
        return dice.choice(VALUES)
    owner, name = dice.choice(places)
    match dice.randrange(6):
        case 0:
            del owner[name]
        case 1 if isinstance(owner, dict):
            owner[dice.choice(("x", "", "a\nb", "__class__", "é" * 1000))] = owner[name]
        case 2 if isinstance(owner, dict):
            owner[dice.choice(("x", "", "a\nb", "__class__", "../x"))] = owner.pop(name)
        case 3 if isinstance(owner, list):
            owner.insert(dice.randrange(len(owner) + 1), owner[name])
        case _:
            owner[name] = dice.choice(VALUES)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, name
            yield from _places(inner)


def read_damaged(path: Path, content: bytes, read: Callable[[], Any], refusal: type[Exception], named: object) -> Any:
    """Write content to a file and read it; returns what it holds, or None where a short line refuses it."""
    path.write_bytes(content)
    try:
        return read()
    except refusal as error:
        assert_short(str(error), named)
    return None


def assert_short(message: str, *names: object) -> None:
    """Assert that a message is one line that names something, and does not repeat all of a damaged file."""
    for name in names:
        assert str(name) in message, message[:1000]
        message = message.replace(str(name), "")
    assert "\n" not in message and len(message) < 500, message[:1000]


def make_unreadable(path: Path, kind: str) -> None:
    """Put in the place of a file something else, or nothing."""
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "broken-link":
            path.symlink_to(path.parent / "gone")
        case "endless-link":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            assert kind == "nothing"


UNREADABLE = ("folder", "pipe", "broken-link", "endless-link", "device", "nothing")
