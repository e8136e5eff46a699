"""Forms of fields: the values that each takes, and those it refuses."""

import math

import pytest
from auxhead.autotune.records import checks

NO_NUMBERS = (None, True, "1", [1], {}, math.nan, math.inf, -math.inf)
NO_TIMES = (
    None, [], [[]], [[1.0]], [[], []], [[1.0], 2.0], [[1.0], [2.0, 3.0]], [[1.0], ["2"]], [[1.0], [True]],
    [[1.0], [0.0]], [[1.0], [0]], [[1.0], [-0.5]], [[1.0], [-3.0]], [[1.0], [math.nan]], [[1.0], [math.inf]],
    [[1.0], (2.0,)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        ("OBJECT", ({}, {"a": 1}), (None, [], "{}")),
        ("LIST", ([], [1]), (None, {}, (1,), "[]")),
        ("TEXT", ("", "a"), (None, 1, ["a"])),
        ("TRUTH", (True, False), (None, 0, 1, "true")),
        ("NUMBER", (0, -1, 0.5, -2.5), NO_NUMBERS),
        ("POSITIVE", (1, 0.001, 0.5), (*NO_NUMBERS, 0, 0.0, -0.5, -1)),
        ("COUNT", (1, 2, 10**9), (*NO_NUMBERS, 0, -1, 1.0)),
        ("WHOLE", (0, 1, 10**9), (*NO_NUMBERS, -1, 1.0, 0.0)),
        ("SAMPLES", ([[1.0], [2.0]], [[1, 2.5], [0.001, 3]], [[0.25]] * 3), NO_TIMES),
    ],
)
def test_values_of_a_form(form, taken, refused):
    form = getattr(checks, form)
    assert [value for value in taken if not form.fits(value)] == []
    assert [value for value in refused if form.fits(value)] == []
