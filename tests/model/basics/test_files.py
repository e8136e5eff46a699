"""write_json: whoever reads a file finds all of it, however many write it at the same time."""

import json
import multiprocessing
import threading
from functools import partial
from pathlib import Path

import pytest
from auxhead.model.basics.files import write_json


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
