"""Checks of a sweep's records, made as they are read, where file and line can be named."""

import math
from collections.abc import Mapping
from typing import Any

#: Fields of a HeadShape, in its order, and where heads are launched; written out since what knows them imports torch.
SHAPE = ("samples", "channels", "height", "width", "grid_h", "grid_w", "layout", "pool", "classes", "dtype")
PLACES = ("alone", "network")
#: Fields of the shape that are text; the others are sizes.
_WORDS = ("layout", "pool", "dtype")


def check_sweep(values: Mapping[str, Any]) -> None:
    """Check the record of a sweep, as JSON holds it.

    Raises:
        ValueError: names the field, what it got and what it wants.
    """
    cell, protocol = values["cell"], values["protocol"]
    place = protocol.get("place")
    _check(place in PLACES, "protocol.place", place, f"one of {', '.join(PLACES)}")
    for name in SHAPE:
        if name not in _WORDS:
            _check_count(f"cell.{name}", cell.get(name))
    for name in (*_WORDS, *(("model", "tap") if place == "network" else ())):
        _check_text(f"cell.{name}", cell.get(name))
    _check_text("protocol.kernel", protocol.get("kernel"))
    for name in ("captures", "rounds"):
        _check_count(f"protocol.{name}", protocol.get(name))
    if values["error"] is not None:
        return
    rule = next((pair for pair in values["paired"] if isinstance(pair, dict) and pair.get("role") == "rule"), {})
    _check(bool(rule), "paired", values["paired"], "a pair of role 'rule'")
    _check_samples("device_us.samples", (values["device_us"] or {}).get("samples"))
    _check_samples("paired: samples", rule.get("samples"))
    _check_text("paired: variant", rule.get("variant"))


def _check_samples(name: str, samples: Any) -> None:
    """Check times: [captures][rounds], as many rounds of each."""
    fits = (
        isinstance(samples, list)
        and all(isinstance(one, list) and one for one in samples)
        and len({len(one) for one in samples}) == 1
        and {type(us) for one in samples for us in one} <= {int, float}
        and all(0 < us < math.inf for one in samples for us in one)
    )
    _check(fits, name, samples, "[captures][rounds] of positive numbers")


def _check_text(name: str, value: Any) -> None:
    _check(isinstance(value, str), name, value, "text")


def _check_count(name: str, value: Any) -> None:
    _check(type(value) is int and value > 0, name, value, "a positive whole number")


def _check(fits: bool, name: str, got: Any, wants: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {got!r:.60}, wants {wants}")
