"""Links in a checkpoint's folder: none that leads out of it is followed when it is loaded, or written through."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from auxhead.model import load_checkpoint, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.files import replacing, write_json
from auxhead.model.saving.checkpoint_files import own_file
from support.checkpoint_files import weights_of
from support.example_models import SmallNet
from support.planner_fakes import small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")

FILES = ("model.json", "parameters")


def named(folder: Path, file: str) -> Path:
    return folder / file if file == FILES[0] else weights_of(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "net", small_network(), backbone="../../evil:run", classes=["../x", "/x", "c", "d", "e"])
    return tmp_path / "net"


@pytest.mark.parametrize(("way", "file"), [("absolute", FILES[0]), ("relative", FILES[1]), ("by a link", FILES[0])])
def test_a_link_that_leads_out_is_refused(saved: Path, way: str, file: str) -> None:
    """To a folder whose path begins as this one's."""
    name = named(saved, file).name
    elsewhere = saved.with_name(f"{saved.name}-other")
    elsewhere.mkdir()
    target = (saved / name).rename(elsewhere / name)
    if way == "by a link":
        (saved / "between").symlink_to(target)
    ways = {"absolute": target, "relative": Path("..", elsewhere.name, name), "by a link": "between"}
    (saved / name).symlink_to(ways[way])
    assert (saved / name).read_bytes(), "the link works"
    with pytest.raises(BadInput, match=rf"{name} is a link that leads out of .*net, wants the file itself"):
        load_checkpoint(saved, SmallNet())


def test_links_that_stay_inside_are_followed(saved: Path) -> None:
    (saved / "versions").mkdir()
    for name in [named(saved, file).name for file in FILES]:
        (saved / name).rename(saved / "versions" / name)
        (saved / name).symlink_to(Path("versions", name))
        load_checkpoint(saved, SmallNet())


def test_the_folder_itself_may_be_a_link(saved: Path) -> None:
    link = saved.parent / "latest"
    link.symlink_to(saved, target_is_directory=True)
    load_checkpoint(link, SmallNet())
    save_checkpoint(link, small_network())
    assert link.is_symlink() and sorted(saved.iterdir()) == [weights_of(saved), saved / "model.json"]


def test_other_files_of_a_demo_are_no_links_out_either(saved: Path) -> None:
    (saved.parent / "secret.png").write_bytes(b"x")
    (saved / "examples").mkdir()
    (saved / "examples" / "0.png").symlink_to(saved.parent / "secret.png")
    with pytest.raises(BadInput, match="0.png is a link that leads out"):
        own_file(saved, "examples/0.png")


@contextmanager
def opened() -> Iterator[list[str]]:
    """Names of all files that are opened in here."""
    names: list[str] = []
    watching = True
    sys.addaudithook(lambda event, said: names.append(str(said[0])) if watching and event == "open" else None)
    yield names
    watching = False


def test_names_in_the_description_are_no_paths(saved: Path) -> None:
    """Classes and a backbone whose names lead out of the folder open and import nothing."""
    before = set(sys.modules)
    with opened() as names:
        loaded = load_checkpoint(saved, SmallNet())
    assert loaded.classes[:2] == ("../x", "/x")
    read = [name for name in names if "auxhead" not in name and not name.endswith((".py", ".pyc", ".so"))]
    assert any(name.endswith("model.json") for name in read)
    assert all(Path(name).is_relative_to(saved) for name in read), read
    assert not any("evil" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize("file", FILES)
def test_saving_writes_through_no_link(saved: Path, file: str) -> None:
    target = saved.parent / "mine"
    target.write_text("mine")
    save_checkpoint(saved, small_network())  # of which the parameters get the same name again
    path = named(saved, file)
    path.unlink()
    path.symlink_to(target)
    save_checkpoint(saved, small_network())
    assert target.read_text() == "mine" and not path.is_symlink()
    load_checkpoint(saved, SmallNet())


def test_a_file_that_is_not_finished_yet_has_a_name_that_nobody_can_foresee(tmp_path) -> None:
    """Links at the names that were used before, with the number of this process, are not written through."""
    target = tmp_path / "mine"
    target.write_text("mine")
    folder = tmp_path / "net"
    folder.mkdir()
    for name in ("model.json", "model.safetensors", "figure.png"):
        for link in (f".{name}.{os.getpid()}", f".{name}.{os.getpid()}.{threading.get_ident()}"):
            (folder / link).symlink_to(target)
    save_checkpoint(folder, small_network())
    write_json(folder / "model.json", {})
    with replacing(folder / "figure.png") as unfinished:
        unfinished.write_text("drawn")
    assert target.read_text() == "mine" and (folder / "figure.png").read_text() == "drawn"
