"""The demo's picture sources, their splits and refusals."""

import struct
import sys

import numpy as np
import pytest
import torch
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.images import open_image, to_rgb
from auxhead.model.training.data_sets import decode, read_splits, split_indices
from auxhead.model.training.sources import LabelledImages, load_digits, load_source
from PIL import Image
from support.pictures import whole, write_cifar10, write_image_folder
from torchvision.datasets import CIFAR10


def labelled(labels, given=None):
    images = [lambda value=i: Image.new("RGB", (4, 4), (value % 256,) * 3) for i in range(len(labels))]
    return LabelledImages("made", images, torch.tensor(labels), ("a", "b"), given=given)


def test_digits_are_the_real_ones_on_the_full_scale():
    source = load_digits()
    assert len(source.open) == len(source.labels) == 1797
    assert source.classes == tuple("0123456789")
    pixels = decode(source, whole(8))[1].pixels
    assert pixels.shape == (1797, 3, 8, 8) and pixels.dtype == torch.uint8
    assert pixels.min() == 0 and pixels.max() == 255
    assert torch.equal(pixels[:, 0], pixels[:, 2])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'auxhead\[demo\]'"):
        load_digits()


def test_splits_are_disjoint_stratified_and_seeded():
    source = load_digits()
    splits = split_indices(source, seed=0)
    assert sorted(torch.cat(splits).tolist()) == list(range(1797))
    for part, share in zip(splits, (0.6, 0.2, 0.2), strict=True):
        counts = torch.bincount(source.labels[part], minlength=10)
        assert (counts / torch.bincount(source.labels) - share).abs().max() < 0.01
    for again, part in zip(split_indices(source, seed=0), splits, strict=True):
        assert torch.equal(again, part)
    assert not torch.equal(split_indices(source, seed=1)[0], splits[0])


def test_a_class_with_too_few_images_is_named():
    splits = split_indices(labelled([0, 0, 0, 1, 1, 1]), seed=0)
    assert [len(part) for part in splits] == [2, 2, 2], "just enough"
    with pytest.raises(BadInput, match=r"--data: class 'b' has 2 images, wants at least 3"):
        split_indices(labelled([0, 0, 0, 1, 1]), seed=0)


def test_each_split_holds_the_pictures_of_its_places_and_a_given_test_split_stays():
    _, splits = read_splits(labelled([i % 2 for i in range(60)], torch.tensor([0] * 40 + [2] * 20)), whole(8), 0)
    assert splits.test.indices.tolist() == list(range(40, 60))
    assert [len(split.labels) for split in splits] == [36, 4, 20]
    assert sorted(torch.cat([split.indices for split in splits]).tolist()) == list(range(60))
    for split in splits:
        assert torch.equal(split.pixels[:, 0, 0, 0].long(), split.indices)
        assert torch.equal(split.labels, split.indices % 2)


def test_folders_that_are_no_classes(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "flat" / "x.png")
    (tmp_path / "one" / "only").mkdir(parents=True)
    for name, message in (
        ("nowhere", "nowhere does not exist"),
        ("file", "file is not a directory"),
        ("flat", "has no folders, wants at least two"),
        ("one", "has only the folder 'only'"),
    ):
        with pytest.raises(BadInput, match=f"--data: .*{message}"):
            load_source(tmp_path / name)


#: What is wrong with a picture file, by its content (of a whole one), and what is said about it.
DAMAGE = {
    "empty": (lambda whole: b"", "it is empty"),
    "text": (lambda whole: b"no picture\n", "its format is not known"),
    "truncated": (lambda whole: whole[:300], "truncated"),
    "zeros": (lambda whole: whole[:100] + bytes(len(whole) - 100), ""),
}


def damage(path, kind):
    path.write_bytes(DAMAGE[kind][0](path.read_bytes()))


def test_damaged_pictures_are_named_with_what_to_do_and_can_be_left_out(tmp_path):
    """The others keep their classes and paths."""
    folder = write_image_folder(tmp_path / "x", per_class=8)
    for number, kind in enumerate(DAMAGE):
        damage(folder / "lying" / f"{number}.png", kind)
    (folder / "standing" / "note.png").symlink_to(folder / "gone.png")
    source = load_source(folder)
    with pytest.raises(
        BadInput, match=r"/0.png: cannot be read as an image \(it is empty\); --skip-damaged leaves out"
    ):
        decode(source, whole(16))
    read = []
    readable, split, damaged = decode(source, whole(16), lambda: read.append(1), skip_damaged=True)
    pixels = split.pixels
    assert len(read) == len(source.open) == 17 and len(damaged) == 5
    assert [message.partition(": ")[0] for message in damaged] == [
        str(path) for path in source.paths if path not in readable.paths
    ]
    for said, (_, reason) in zip(damaged, DAMAGE.values(), strict=False):
        assert ": cannot be read as an image (" in said and reason in said
        assert said.count(".png") == 1 and "\n" not in said
    assert len(readable.open) == len(readable.paths) == len(readable.labels) == len(pixels) == 12
    assert readable.labels.tolist() == [0] * 4 + [1] * 8 and readable.classes == source.classes
    for path, read_again, image in zip(readable.paths, readable.open, pixels, strict=True):
        assert torch.equal(whole(16).cropped(open_image(path)), image)
        assert torch.equal(whole(16).cropped(read_again()), image)


def test_a_picture_whose_orientation_cannot_be_read_is_named(tmp_path, monkeypatch):
    """Pillow raises what it comes across in a damaged file."""

    def damaged(image):
        raise struct.error("required argument is not an integer")

    write_image_folder(tmp_path, per_class=4)
    monkeypatch.setattr("auxhead.model.basics.images.ImageOps.exif_transpose", damaged)
    with pytest.raises(BadInput, match=r"\.png: cannot be read as an image \(required argument"):
        decode(load_source(tmp_path), whole(16))


def test_pictures_of_which_none_can_be_read(tmp_path):
    folder = write_image_folder(tmp_path, per_class=2)
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(BadInput, match="^--data: of 4 images none can be read: .*png: cannot be read as an image"):
        decode(load_source(folder), whole(16), skip_damaged=True)


def test_more_pictures_than_memory_are_refused_before_reading():
    with pytest.raises(BadInput, match=r"--crop: 20000 images of 512x512 take 15 GiB"):
        decode(labelled([0, 1] * 10_000), whole(512))


def test_cifar10_by_torchvisions_loader(tmp_path, monkeypatch):
    write_cifar10(tmp_path, per_batch=20)
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    source = load_source(tmp_path)
    assert source.name == "CIFAR-10" and source.classes[3] == "kind3"
    assert len(source.labels) == 120 and source.given.tolist() == [0] * 100 + [2] * 20 and source.fills
    direct = CIFAR10(str(tmp_path), train=False)
    assert torch.equal(decode(source, whole(32))[1].pixels[100:], torch.from_numpy(direct.data).permute(0, 3, 1, 2))
    train, validation, test = split_indices(source, 0)
    assert (len(train), len(validation), len(test)) == (90, 10, 20)


def test_pictures_of_every_mode_become_rgb():
    grey = np.array([[0, 128], [255, 64]], dtype=np.uint8)
    as_rgb = np.asarray(to_rgb(Image.fromarray(grey)))
    assert (as_rgb == grey[..., None]).all()
    sixteen = Image.fromarray(grey.astype(np.uint16) * 257)
    assert (np.asarray(to_rgb(sixteen)) == as_rgb).all()
    assert (np.asarray(to_rgb(Image.fromarray(grey).convert("P"))) == as_rgb).all()
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert (np.asarray(to_rgb(clear)) == 255).all()


def test_a_photo_is_turned_upright(tmp_path):
    image = Image.new("RGB", (6, 3), "white")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "photo.jpg", exif=exif)
    assert open_image(tmp_path / "photo.jpg").size == (3, 6)
