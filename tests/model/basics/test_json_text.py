"""``parse_json``: values as Python reads them, and what is refused."""

import json
import time

import pytest
from auxhead.model.basics.json_file import parse_json


@pytest.mark.parametrize("value", [None, [], {}, "x", 1.5, {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}], ids=str)
def test_values(value):
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "^has 'a' twice in one object"),
        ('{"b": [{"c": {"é": 1, "é": 2}}]}', "^has 'é' twice in one object"),
        ("[" * 100_000, "^nested too deep"),
        ('{"a":' * 100_000, "^nested too deep"),
        ("1" * 5000, "limit"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
    ids=["twice", "inside", "lists", "objects", "digits", "empty", "two"],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_a_name_that_comes_again_after_many_is_found_soon():
    text = "{" + ", ".join(f'"{number}": 0' for number in (*range(100_000), 99_999)) + "}"
    start = time.process_time()
    with pytest.raises(ValueError, match="has '99999' twice"):
        parse_json(text)
    assert time.process_time() - start < 10.0, "seconds, where each name was looked for among all others"
