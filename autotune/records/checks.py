"""Checks of what JSON holds against a form, with messages that name the field, what it got and what it wants."""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """The form of a single value, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """The form of a value that may be absent, and null, unless said otherwise."""

    form: "Form"
    absent: bool = True
    null: bool = True


class Roles(NamedTuple):
    """The form of a list of objects that are told by their "role"."""

    wanted: Mapping[str, "Form"]
    """Forms of those that must be there, once each."""
    others: Mapping[str, "Form"] = {}
    """Forms of those that may be."""


#: A dict holds the forms of an object's fields, others being allowed; a list of one form, that of a list's elements.
Form = Wanted | Maybe | Roles | Mapping[str, Any] | list[Any]


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def check(name: str, value: Any, form: Form) -> None:
    """Check a value as JSON holds it.

    Args:
        name: of the value, for messages; empty for a whole line or file.
        value: the value.
        form: what it should be.

    Raises:
        ValueError: names the field, what it got and what it wants.
    """
    if isinstance(form, Wanted):
        if not form.fits(value):
            raise ValueError(f"{name}: got {value!r:.60}, wants {form.words}")
    elif isinstance(form, Maybe):
        if not (value is _NOTHING and form.absent or value is None and form.null):
            check(name, value, form.form)
    elif isinstance(form, Roles):
        _check_roles(name, value, form)
    elif isinstance(form, list):
        check(name, value, LIST)
        for place, one in enumerate(value):
            check(f"{name}[{place}]", one, form[0])
    else:
        check(name, value, OBJECT)
        for key, inner in form.items():
            field = value.get(key, _NOTHING)
            if not (isinstance(inner, Wanted) and inner.fits(field)):  # most are, and to name them takes time
                check(f"{name}.{key}" if name else key, field, inner)


def _check_roles(name: str, value: Any, form: Roles) -> None:
    check(name, value, [{"role": TEXT}])
    for role in form.wanted:
        if sum(one["role"] == role for one in value) != 1:
            raise ValueError(f"{name}: got {value!r:.60}, wants a pair of role {role!r}")
    forms = {**form.others, **form.wanted}
    for one in value:
        check(f"{name}, {one['role']}", one, forms.get(one["role"], OBJECT))


def one_of(*names: str) -> Wanted:
    """Return the form of one of these words."""
    return Wanted(f"one of {', '.join(names)}", names.__contains__)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_samples(value: Any) -> bool:
    if type(value) is not list or len(value) < 2 or {*map(type, value)} != {list} or len({*map(len, value)}) != 1:
        return False
    times = [*chain.from_iterable(value)]
    # of a time that is no number, the sum is none either
    return bool(times) and {*map(type, times)} <= {int, float} and 0 < min(times) and sum(times) < math.inf


OBJECT = Wanted("an object", lambda value: isinstance(value, dict))
LIST = Wanted("a list", lambda value: isinstance(value, list))
TEXT = Wanted("text", lambda value: isinstance(value, str))
TRUTH = Wanted("true or false", lambda value: isinstance(value, bool))
NUMBER = Wanted("a number", _is_number)
POSITIVE = Wanted("a positive number", lambda value: _is_number(value) and value > 0)
COUNT = Wanted("a positive whole number", lambda value: type(value) is int and value > 0)
WHOLE = Wanted("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
#: Times, [captures][rounds], as many rounds of each.
SAMPLES = Wanted("[captures][rounds] of positive numbers, two captures or more", _is_samples)
