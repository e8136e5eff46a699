"""JSON files that are whole for whoever reads; images that are none, or more than they seem, refused undecoded."""

import io
import json
import multiprocessing
import os
import random
import struct
import threading
import time
import zlib
from pathlib import Path

import pytest
from auxhead.model import load_checkpoint, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.files import parse_json, write_json
from auxhead.model.basics.images import MOST_PIXELS, open_image
from PIL import Image
from support.damaged import assert_short, damaged_bytes
from support.example_models import SmallNet
from support.pictures import whole, write_image_folder
from support.planner_fakes import small_network


def write_often(path: Path, number: int) -> None:
    for _ in range(50):
        write_json(path, [number] * 2000)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a new process takes seconds")
def test_threads_and_processes_that_write_and_one_that_reads(tmp_path: Path) -> None:
    path, fork = tmp_path / "file.json", multiprocessing.get_context("fork")
    write_json(path, [0] * 2000)
    kinds = (fork.Process, fork.Process, threading.Thread, threading.Thread)  # processes first: no thread is copied
    writers = [kind(target=write_often, args=(path, 1 + number % 2)) for number, kind in enumerate(kinds)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        content = json.loads(path.read_text())
        assert len(content) == 2000 and len(set(content)) == 1
    for writer in writers:
        writer.join()
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left"
    assert set(json.loads(path.read_text())) <= {1, 2}


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


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_of(width: int, height: int) -> bytes:
    """A few bytes that claim to be that large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def bmp_of(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 58, 0, 0, 54, 40, width, height, 1, 24, 0, 4, 0, 0, 0, 0) + b"\0" * 4


def animation(ending: str) -> bytes:
    first, *others = (Image.new("RGB", (5, 5), colour) for colour in ("red", "blue", "green"))
    file = io.BytesIO()
    first.save(file, format=ending, save_all=True, append_images=others)
    return file.getvalue()


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may decode."""

    def fails(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fails)
    monkeypatch.setattr("auxhead.model.basics.images.to_rgb", fails)


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        open_image(path)
    assert_short(str(caught.value), path, "cannot be read as an image (")
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("make", [png_of, bmp_of])
@pytest.mark.usefixtures("undecoded")
def test_a_small_file_of_many_pixels(tmp_path: Path, make) -> None:
    sizes = [(2**31 - 1, 2**31 - 1), (60_000, 60_000), (1, MOST_PIXELS + 1), (MOST_PIXELS // 8 + 1, 8), (16_000, 8_000)]
    for width, height in sizes:
        (tmp_path / "x.png").write_bytes(make(width, height))
        assert "pixels" in refused(tmp_path / "x.png")


def test_as_many_pixels_as_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auxhead.model.basics.images.MOST_PIXELS", 12)
    Image.new("RGB", (4, 3)).save(tmp_path / "x.png")
    assert open_image(tmp_path / "x.png").size == (4, 3)
    Image.new("RGB", (13, 1)).save(tmp_path / "x.png")
    refused(tmp_path / "x.png")


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tiff"])
def test_several_pictures_in_one_file(tmp_path: Path, ending: str, request: pytest.FixtureRequest) -> None:
    path = tmp_path / f"x.{ending}"
    path.write_bytes(animation(ending))
    request.getfixturevalue("undecoded")
    assert "it holds several pictures, wants one" in refused(path)


def test_one_picture_is_read_in_every_format(tmp_path: Path) -> None:
    for ending in ("gif", "webp", "tiff", "ppm", "jpg", "bmp", "jp2"):
        Image.new("RGB", (6, 4), "red").save(tmp_path / f"x.{ending}")
        image = open_image(tmp_path / f"x.{ending}")
        assert image.size == (6, 4) and image.getpixel((3, 2))[0] > 240, ending


def test_a_photo_with_a_preview(tmp_path: Path) -> None:
    """As telephones write them: the first picture is the photo."""
    photo, preview = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (2, 2), "blue")
    photo.save(tmp_path / "x.jpg", format="MPO", save_all=True, append_images=[preview])
    assert open_image(tmp_path / "x.jpg").size == (8, 8)


def test_what_starts_a_program_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    assert "its format is not known" in refused(tmp_path / "x.png")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.png"
    {"pipe": os.mkfifo, "device": lambda it: it.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(refused(path)), daemon=True)
    thread.start()
    thread.join(20)
    assert said and "it is not a file" in said[0]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_any_damage(tmp_path: Path) -> None:
    """A picture, or one line."""
    path, read = tmp_path / "x.png", 0
    picture = Image.effect_noise((9, 7), 50).convert("RGB")
    for ending in ("png", "jpg", "gif", "bmp", "tiff", "webp"):
        picture.save(tmp_path / f"whole.{ending}")
        whole = (tmp_path / f"whole.{ending}").read_bytes()
        for seed in range(60):
            path.write_bytes(damaged_bytes(whole, random.Random(seed)))
            try:
                image = open_image(path)
            except BadInput as error:
                assert_short(str(error), path)
            else:
                assert image.mode == "RGB" and image.width * image.height <= MOST_PIXELS
                read += 1
    assert 20 < read < 340


def test_checkpoints_name_the_file(tmp_path: Path) -> None:
    network = small_network()
    network.preprocessing = whole(8)
    save_checkpoint(tmp_path / "net", network)
    good = sorted(write_image_folder(tmp_path / "pictures", per_class=1).glob("*/*.png"))[0]
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_of(60_000, 60_000))
    with pytest.raises(BadInput, match="bomb.png: cannot be read as an image"):
        load_checkpoint(tmp_path / "net", SmallNet()).read_images([good, bomb])
