"""A save is all there or not there: killed at any point, on a full disk, with other writers and a reader beside it."""

import errno
import multiprocessing
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    FusedAuxHead,
    export_exits,
    export_stages,
    load_checkpoint,
    save_checkpoint,
)
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.saving import checkpoint_files
from support.checkpoint_files import weights_of
from support.example_models import SmallNet
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def network(value: float) -> EarlyExitNetwork:
    """One whose threshold and parameters are a number."""
    made = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}, rules=value).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def loaded(folder: Path) -> float:
    """The number of the network that is there, which is the same everywhere."""
    found = load_checkpoint(folder, SmallNet()).network
    (value,) = {found.exit_heads[0].rule.threshold, *(one.flatten()[0].item() for one in found.parameters())}
    return value


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saves_until(folder: Path, calls: int) -> None:
    """Save, and end at a call of the operating system, as if killed: nothing is tidied up."""
    left = calls

    def ending(function):
        def call(*arguments, **keywords):
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            return function(*arguments, **keywords)

        return call

    for name in ("replace", "fsync", "unlink", "open", "mkdir", "rmdir"):
        setattr(os, name, ending(getattr(os, name)))
    save_checkpoint(folder, network(0.75))
    os._exit(0)


def test_killed_anywhere_there_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    fork, found, calls, status = multiprocessing.get_context("fork"), [], 0, 9
    while status == 9:
        calls += 1
        save_checkpoint(tmp_path, network(0.25))
        process = fork.Process(target=saves_until, args=(tmp_path, calls))
        process.start()
        process.join()
        status = process.exitcode
        found.append(loaded(tmp_path))
    assert calls > 5 and set(found) == {0.25, 0.75} and found == sorted(found)
    save_checkpoint(tmp_path, network(0.5))
    assert sorted(tmp_path.iterdir()) == [weights_of(tmp_path), tmp_path / "model.json"], "what was left is removed"


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, network(0.25))

    def save_often(one: EarlyExitNetwork) -> None:
        for _ in range(15):
            save_checkpoint(tmp_path, one)

    writers = [threading.Thread(target=save_often, args=(network(value),)) for value in (0.25, 0.75)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert loaded(tmp_path) in (0.25, 0.75)
    assert loaded(tmp_path) in (0.25, 0.75) and weights_of(tmp_path)


def test_a_reader_whose_parameters_go_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers take turns while it reads."""
    save_checkpoint(tmp_path, network(0.25))
    read, reads = checkpoint_files._read_weights, []

    def among_saves(directory, *rest):
        reads.append(directory)
        if len(reads) > 1:
            return read(directory, *rest)
        save_checkpoint(tmp_path, network(0.75))
        try:
            return read(directory, *rest)
        finally:
            save_checkpoint(tmp_path, network(0.25))

    monkeypatch.setattr(checkpoint_files, "_read_weights", among_saves)
    assert loaded(tmp_path) == 0.25 and len(reads) == 2


def test_parameters_that_go_while_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, network(0.25))
    opens = checkpoint_files.safe_open

    def gone(path, _framework):
        monkeypatch.setattr(checkpoint_files, "safe_open", opens)
        save_checkpoint(tmp_path, network(0.75))
        raise RuntimeError(f"unable to open file <{path}> in read-only mode: No such file or directory (2)")

    monkeypatch.setattr(checkpoint_files, "safe_open", gone)
    assert loaded(tmp_path) == 0.75


def test_files_that_do_not_belong_to_each_other_say_so(tmp_path: Path) -> None:
    for value in (0.25, 0.75):
        save_checkpoint(tmp_path / str(value), network(value))
    weights_of(tmp_path / "0.25").write_bytes(weights_of(tmp_path / "0.75").read_bytes())
    with pytest.raises(BadInput, match=r"0.25/model-.* does not belong to model.json beside it: its SHA-256 is"):
        load_checkpoint(tmp_path / "0.25", SmallNet())
    (tmp_path / "0.25" / "model.json").write_bytes((tmp_path / "0.75" / "model.json").read_bytes())
    with pytest.raises(BadInput, match=r"has no model-"):
        load_checkpoint(tmp_path / "0.25", SmallNet())


def test_parameters_of_another_program_stay(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    for value in (0.25, 0.75):
        save_checkpoint(tmp_path, network(value))
    assert loaded(tmp_path) == 0.75 and (tmp_path / "model.safetensors").read_bytes() == b"theirs"


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr("fcntl.flock", refused)
    for value in (0.25, 0.75):
        save_checkpoint(tmp_path, network(value))
    assert loaded(tmp_path) == 0.75 and len(list(tmp_path.glob("model-*"))) == 2


@pytest.mark.parametrize("room", [100, 3000])
def test_a_full_disk_is_an_error_of_the_path(tmp_path: Path, room: int) -> None:
    save_checkpoint(tmp_path / "old", network(0.25))
    before = sorted((tmp_path / "old").iterdir())
    for folder in (tmp_path / "old", tmp_path / "new"):
        with full_disk(room), pytest.raises(OSError) as caught:
            save_checkpoint(folder, network(0.75))
        assert caught.value.errno == errno.EFBIG and caught.value.filename == str(folder / "model.json")
    assert sorted((tmp_path / "old").iterdir()) == before and loaded(tmp_path / "old") == 0.25
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("write", [export_exits, export_stages])
def test_an_export_on_a_full_disk(tmp_path: Path, write) -> None:
    path = tmp_path / "net"
    with full_disk(1000), pytest.raises(OSError) as caught:
        write(network(0.25), torch.randn(2, 3, 8, 8), path)
    assert caught.value.filename == str(path) and not list(tmp_path.iterdir())


def test_what_is_no_name_of_a_folder_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (b"bytes", 3, None, "a\0b", os.fsdecode(b"q\xff"), ""):
        wanted = "^directory: got an empty name" if name == "" else "^directory: got .*, wants the path of a folder"
        for call, given in ((save_checkpoint, network(0.25)), (load_checkpoint, nn.Identity())):
            with pytest.raises((BadInput, TypeError), match=wanted):
                call(name, given)
    with pytest.raises(BadInput, match="UTF-8"):
        save_checkpoint(tmp_path / os.fsdecode(b"q\xff"), network(0.25))
    assert not list(tmp_path.iterdir())
    save_checkpoint(".", network(0.25))
