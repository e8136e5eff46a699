"""``Preprocessing``: bit for bit what torchvision's and timm's own transforms make of a picture; files; refusals."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from auxhead.model import Preprocessing
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.images import open_image
from PIL import Image
from torchvision.transforms import functional as F
from torchvision.transforms import v2

SIZES = [(640, 320), (57, 123), (300, 300)]


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["ResNet18_Weights", "ResNet50_Weights", "EfficientNet_B0_Weights", "Swin_T_Weights"])
def test_pictures_are_prepared_as_torchvision_does_for_its_weights(name: str, size: tuple[int, int]) -> None:
    weights = getattr(torchvision.models, name).DEFAULT
    preprocessing, wanted = Preprocessing.of_weights(weights), weights.transforms()(picture(size))
    assert torch.equal(preprocessing.pipeline()(picture(size)), wanted)
    assert Preprocessing.of_weights(weights.transforms()) == preprocessing
    in_two = preprocessing.normalised(torch.stack([preprocessing.cropped(picture(size, seed)) for seed in (0, 1)]))
    assert torch.equal(in_two[0], wanted) and in_two.shape == (2, 3, preprocessing.crop, preprocessing.crop)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mobilenetv4_conv_small", "convnext_tiny", "vit_tiny_patch16_224"])
def test_pictures_are_prepared_as_timm_does_for_its_models(name: str, size: tuple[int, int]) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    wanted = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    assert torch.equal(Preprocessing.of_timm(model).pipeline()(picture(size)), wanted(picture(size)))


def test_pictures_are_squashed_or_not_averaged_or_grey_where_that_is_asked_for() -> None:
    of_all = picture((40, 20))
    squashed = Preprocessing(16, None).cropped(of_all)
    assert torch.equal(squashed, F.pil_to_tensor(of_all.resize((16, 16), Image.Resampling.BILINEAR)))
    rough = Preprocessing(16, 18, antialias=False).cropped(of_all)
    resized = v2.functional.resize(F.pil_to_tensor(of_all), [18], antialias=False)
    assert torch.equal(rough, v2.functional.center_crop(resized, [16, 16]))
    assert not torch.equal(rough, Preprocessing(16, 18).cropped(of_all))
    grey = Preprocessing(16, 16, (0.25,), (0.5,))
    assert torch.equal(grey.cropped(of_all), grey.cropped(of_all.convert("L"))) and grey.channels == 1
    assert grey.pipeline()(Image.new("L", (32, 32), 255)).unique().item() == 1.5
    assert Preprocessing(16, 16).cropped(Image.new("L", (32, 32))).shape == (3, 16, 16)


def test_the_same_input_is_made_on_every_device(device: torch.device) -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 3, 16, 16)
    found = Preprocessing().normalised(pixels.to(device)).cpu()
    assert torch.equal(found, Preprocessing().normalised(pixels)) and found.dtype == torch.float32


def test_pixels_are_read_of_a_file_or_of_its_content(tmp_path: Path) -> None:
    preprocessing, file, content = Preprocessing(16, 18), tmp_path / "a.png", io.BytesIO()
    picture((40, 30)).save(file)
    picture((40, 30)).save(content, "PNG")
    wanted = preprocessing.cropped(picture((40, 30)))
    assert torch.equal(preprocessing.read_pixels(file), wanted) and torch.equal(
        preprocessing.read_pixels(content), wanted
    )
    with pytest.raises(BadInput, match="^upload: cannot be read as an image"):
        preprocessing.read_pixels(io.BytesIO(b"none"), "upload")


def test_it_goes_through_files_and_to_the_workers_of_a_loader() -> None:
    made = Preprocessing(8, None, (0.1,), (0.2,), "bicubic", antialias=False)
    assert Preprocessing.of_json(made.as_json()) == made and made.as_json()["channels"] == 1
    again = pickle.loads(pickle.dumps(made.pipeline()))
    assert torch.equal(again(picture((9, 9))), made.pipeline()(picture((9, 9))))
    assert (
        made.describe()
        == "Pictures: squashed to 8 x 8 pixels (bicubic, not antialiased); grey of 0 to 1, less 0.1, over 0.2."
    )
    assert Preprocessing().describe() == (
        "Pictures: resized to a shorter side of 256, cropped to 224 x 224 pixels at the centre (bilinear); RGB of "
        "0 to 1, less 0.485, 0.456, 0.406, over 0.229, 0.224, 0.225."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop": 0}, "crop: got 0, wants a positive int, of 89,478,485 pixels at most"),
        ({"crop": 224.0}, "crop: got 224.0, wants a positive int"),
        ({"resize": True}, "resize: got True, wants a positive int or None"),
        ({"resize": 200}, "resize: got 200, wants 224 at least, as crop is, or None to squash pictures"),
        ({"mean": 0.5}, "mean: got float, wants a number for each channel"),
        ({"mean": (0.5, 0.5)}, r"mean: got \(0.5, 0.5\), wants three numbers for RGB, or one for grey"),
        ({"mean": (0.5,)}, r"std: got \[0.229, 0.224, 0.225\], wants numbers greater than 0, as many as mean has: 1"),
        ({"std": (0.2, 0.0, 0.2)}, r"std: got \[0.2, 0.0, 0.2\], wants numbers greater than 0"),
        (
            {"std": (1e-50, 0.2, 0.2)},
            r"std: got \(1e-50, 0.2, 0.2\), wants numbers that float32 holds: 0, or 1.2e-38 to",
        ),
        ({"mean": (1e40,), "std": (1.0,)}, r"mean: got \(1e\+40,\), wants numbers that float32 holds"),
        ({"interpolation": "cubic"}, "interpolation: got 'cubic', wants one of nearest, "),
        ({"antialias": 1}, "antialias: got int, wants a bool"),
        ({"interpolation": "box", "antialias": False}, "antialias: got False, wants True with box, which"),
    ],
)
def test_what_no_pipeline_can_have_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        Preprocessing(**arguments)


def test_it_says_what_the_crop_cuts_away_of_wide_pictures() -> None:
    assert Preprocessing().cut_away([(100, 100), (80, 80)]) == "", "less than a quarter"
    assert Preprocessing(16, None).cut_away([(100, 10)]) == "" == Preprocessing(16, 16).cut_away([])
    assert Preprocessing(16, 16).cut_away([(100, 50), (40, 160)]) == (
        "The crop cuts away 62% of the pictures; `auxhead train --squash` keeps all of them."
    )
    assert "cuts away 43% of" in (said := Preprocessing().cut_away([(40, 30)])) and "`--resize 224` cuts less" in said


def test_weights_of_no_classifier_and_configs_that_crop_in_another_way_are_refused() -> None:
    of_class = torchvision.models.ResNet50_Weights  # without .DEFAULT
    for weights in (torchvision.models.segmentation.FCN_ResNet50_Weights.DEFAULT, "DEFAULT", of_class):
        with pytest.raises(TypeError, match="^weights: got .*, wants weights of a classifier of torchvision.models"):
            Preprocessing.of_weights(weights)
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv4_conv_small")
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": "border"}
    with pytest.raises(ValueError, match="^model: its data config has 224 x 224 pixels, crop_mode 'border' of 256"):
        Preprocessing.of_timm(model)
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": "squash", "crop_pct": 1.0}
    assert Preprocessing.of_timm(model).resize is None


def saved(path: Path, values: np.ndarray, form: str) -> Path:
    Image.fromarray(values).save(path, form)
    return path


def test_more_than_8_bits_are_read_by_their_type_and_never_by_what_is_brightest(tmp_path: Path) -> None:
    values = np.array([[0, 200, 257 * 30], [257 * 128, 65_534, 65_535]], dtype=np.uint16)
    wanted = [[0, 1, 30], [128, 255, 255]]
    for form in ("PNG", "TIFF", "JPEG2000", "PPM"):
        read = np.asarray(open_image(saved(tmp_path / form, values, form)))
        assert read[..., 0].tolist() == read[..., 2].tolist() == wanted, form
        dark = np.asarray(open_image(saved(tmp_path / form, values.clip(0, 200), form)))
        assert dark.max() == 1, form
    for kind in (np.float32, np.int32):
        path = saved(tmp_path / "wide.tif", values.astype(kind), "TIFF")
        with pytest.raises(BadInput, match="of 32 bits, of which nobody knows white; wants 8 or 16 bits a channel"):
            open_image(path)


def test_a_transparent_value_of_16_bits_is_refused(tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((4, 4), np.uint16))
    image.save(tmp_path / "clear.png", transparency=0)
    with pytest.raises(BadInput, match="clear.png: cannot be read as an image .one of its 16-bit values is tr"):
        open_image(tmp_path / "clear.png")


def test_a_picture_that_is_a_line_is_refused_before_it_is_resized(tmp_path: Path) -> None:
    line = io.BytesIO()
    Image.new("1", (2_000_000, 1)).save(line, "PNG")
    (tmp_path / "line.png").write_bytes(line.getvalue())
    with pytest.raises(BadInput, match="line.png: cannot be read as an image .it has 2,000,000 x 1 pixels, wants s"):
        open_image(tmp_path / "line.png")
