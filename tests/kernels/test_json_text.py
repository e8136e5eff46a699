"""json_text.py, that of kernels and that of records: values as Python reads them, and what is refused."""

import json
import time

import pytest
from auxhead.autotune.records import json_text as of_records
from auxhead.kernels import json_text as of_kernels

both = pytest.mark.parametrize("parse_json", [of_kernels.parse_json, of_records.parse_json], ids=["kernels", "records"])


@both
@pytest.mark.parametrize("value", [None, [], {}, "x", 1.5, {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}], ids=str)
def test_values(value, parse_json):
    assert parse_json(json.dumps(value)) == value


@both
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
def test_what_is_refused(text, message, parse_json):
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


@both
def test_a_name_that_comes_again_after_many_is_found_soon(parse_json):
    text = "{" + ", ".join(f'"{number}": 0' for number in (*range(100_000), 99_999)) + "}"
    start = time.process_time()
    with pytest.raises(ValueError, match="has '99999' twice"):
        parse_json(text)
    assert time.process_time() - start < 10.0, "seconds, where each name was looked for among all others"
