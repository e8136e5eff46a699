"""JSON files: whoever reads one finds all of it, however many write it at the same time; what is refused as text."""

import json
import multiprocessing
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from auxhead.model.basics.files import parse_json, write_json


def write_often(path: Path, number: int) -> None:
    for _ in range(50):
        write_json(path, [number] * 2000)


def assert_whole_while(path: Path, writers: list[threading.Thread] | list[multiprocessing.Process]) -> None:
    write_json(path, [0] * 2000)
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        content = json.loads(path.read_text())
        assert len(content) == 2000 and len(set(content)) == 1
    for writer in writers:
        writer.join()
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left"
    assert set(json.loads(path.read_text())) <= {1, 2}


def test_two_threads_that_write_and_one_that_reads(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert_whole_while(path, [threading.Thread(target=partial(write_often, path, number)) for number in (1, 2)])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a new process takes seconds")
def test_two_processes_that_write_and_one_that_reads(tmp_path: Path) -> None:
    path, fork = tmp_path / "file.json", multiprocessing.get_context("fork")
    assert_whole_while(path, [fork.Process(target=partial(write_often, path, number)) for number in (1, 2)])


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
