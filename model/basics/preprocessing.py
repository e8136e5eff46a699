"""``Preprocessing``: how a picture becomes a network's input, the same in training, calibration and inference."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import torch
from PIL import Image
from torch import Tensor

from .arguments import kind_of
from .bad_input import BadInput
from .images import MOST_PIXELS, open_image

#: Mean and standard deviation of ImageNet's pixels of 0 to 1, by which nearly all pretrained networks are normalised.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Ways to resize, as torchvision's ``InterpolationMode`` names them; the last three always average.
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_FLOAT32 = torch.finfo(torch.float32)
#: A picture is resized to a larger shorter side than the crop, as torchvision's first presets do: 256 for 224.
_RESIZE_OF_224 = 256


def resize_for(crop: int) -> int:
    """Return the shorter side that goes with a crop by torchvision's presets: 256 for 224."""
    return round(crop * _RESIZE_OF_224 / 224)


@dataclass(frozen=True)
class Preprocessing:
    """A picture is resized by its shorter side, cropped at its centre, scaled to 0 to 1 and normalised.

    That is what torchvision's and timm's pretrained networks are given (``torchvision.transforms._presets``,
    ``timm.data.create_transform``); the defaults are those of torchvision's ResNets. A network carries it as
    ``network.preprocessing``, and checkpoints and exported folders with it.

    Args:
        crop: height and width of the input, in pixels.
        resize: the shorter side before the crop, in pixels; None squashes the whole picture to ``crop`` x ``crop``.
        mean: subtracted from each channel, scaled to 0 to 1 before; as many as there are channels, 3 (RGB) or 1 (grey).
        std: divides each channel after that.
        interpolation: one of ``INTERPOLATIONS``.
        antialias: False resizes as torchvision did tensors before 0.17, without averaging what falls together.

    Raises:
        ValueError, TypeError: a value that no pipeline can have; names the argument.

    Example:
        >>> preprocessing = Preprocessing(crop=64, resize=64)
        >>> preprocessing.pipeline()(Image.new("RGB", (200, 100))).shape
        torch.Size([3, 64, 64])
    """

    crop: int = 224
    resize: int | None = _RESIZE_OF_224
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        """Refuse what no pipeline can have."""
        for name, value in (("crop", self.crop), ("resize", self.resize)):
            if not (_is_size(value) or name == "resize" and value is None):
                or_none = " or None" if name == "resize" else ""
                wants = f"a positive int{or_none}, of {MOST_PIXELS:,} pixels at most"
                raise ValueError(f"{name}: got {value!r:.60}, wants {wants}")
        if self.resize is not None and self.resize < self.crop:
            wants = f"{self.crop} at least, as crop is, or None to squash pictures"
            raise ValueError(f"resize: got {self.resize}, wants {wants}")
        for name in ("mean", "std"):
            given = getattr(self, name)
            if isinstance(given, (str, bytes)) or not isinstance(given, (list, tuple)):
                raise TypeError(f"{name}: got {kind_of(given)}, wants a number for each channel, of RGB or of grey")
            if len(given) not in (1, 3) or not all(map(_is_number, given)):
                raise ValueError(f"{name}: got {given!r:.60}, wants three numbers for RGB, or one for grey")
            if not all(each == 0.0 or _FLOAT32.tiny <= abs(each) <= _FLOAT32.max for each in given):
                raise ValueError(
                    f"{name}: got {given!r:.60}, wants numbers that float32 holds: 0, or 1.2e-38 to 3.4e38"
                )
            object.__setattr__(self, name, tuple(map(float, given)))
        if len(self.std) != len(self.mean) or min(self.std) <= 0.0:
            wants = f"numbers greater than 0, as many as mean has: {len(self.mean)}"
            raise ValueError(f"std: got {list(self.std)}, wants {wants}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation: got {self.interpolation!r:.60}, wants one of {', '.join(INTERPOLATIONS)}")
        if not isinstance(self.antialias, bool):
            raise TypeError(f"antialias: got {kind_of(self.antialias)}, wants a bool")
        if not self.antialias and self.interpolation in INTERPOLATIONS[4:]:
            raise ValueError(f"antialias: got False, wants True with {self.interpolation}, which always averages")

    @classmethod
    def of_weights(cls, weights: Any) -> "Preprocessing":
        """Return what torchvision's weights were trained with: ``of_weights(ResNet50_Weights.DEFAULT)``.

        Raises:
            TypeError: weights that are not those of a classifier.
        """
        try:
            preset = weights.transforms() if hasattr(weights, "transforms") else weights
            (crop,), (resize,) = preset.crop_size, preset.resize_size
            mean, std, interpolation = preset.mean, preset.std, preset.interpolation.value
        except (AttributeError, TypeError, ValueError):
            wants = "weights of a classifier of torchvision.models, ResNet50_Weights.DEFAULT, say"
            raise TypeError(f"weights: got {kind_of(weights)}, wants {wants}") from None
        return cls(crop, resize, tuple(mean), tuple(std), interpolation, bool(preset.antialias))

    @classmethod
    def of_timm(cls, model: Any) -> "Preprocessing":
        """Return what a model of timm was trained with: its data config, as ``timm.data.create_transform`` reads it.

        Raises:
            ValueError: a config that resizes or crops in another way.
        """
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(model)
        _, height, width = config["input_size"]
        mode = config.get("crop_mode") or "center"
        resize = math.floor(height / (config.get("crop_pct") or 0.875))
        squashes = mode == "squash" and resize == height
        if height != width or not (mode == "center" or squashes):
            got = f"{height} x {width} pixels, crop_mode {mode!r} of {resize}"
            raise ValueError(f"model: its data config has {got}, wants a square, cropped at the centre or squashed")
        interpolation = config["interpolation"]
        return cls(height, None if squashes else resize, config["mean"], config["std"], interpolation)

    @property
    def channels(self) -> int:
        """Channels of the input: 3 (RGB), or 1 (grey)."""
        return len(self.mean)

    def pipeline(self) -> Callable[[Image.Image], Tensor]:
        """Return all of it as one transform, for a data set of torchvision: a picture becomes [C, crop, crop] float32.

        Beside this torchvision's own ``ImageFolder`` reads files; what it makes of more than 8 bits a channel or of
        transparency, is not what :meth:`Checkpoint.read_images` makes of them.
        """
        from torchvision.transforms import v2

        found: Callable[[Image.Image], Tensor] = v2.Compose([*self._steps, self.normalised])
        return found

    def cropped(self, image: Image.Image) -> Tensor:
        """Return a picture as pixels, uint8 [C, crop, crop]: what is kept in memory, and normalised batch by batch."""
        pixels: Any = image
        for step in self._steps:
            pixels = step(pixels)
        found: Tensor = pixels
        return found

    def read_pixels(self, file: str | os.PathLike[str] | BinaryIO, name: str = "") -> Tensor:
        """Read an image file, or the content of one that is called ``name``, as pixels, uint8 [C, crop, crop].

        Raises:
            BadInput: the file is missing or is not an image that can be read to its end; names it.
        """
        return self.cropped(open_image(file, name))

    def normalised(self, pixels: Tensor) -> Tensor:
        """Turn pixels (uint8 [N, C, H, W], or of one picture) into the network's input (float32), where they are."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        white = torch.tensor(255.0, device=pixels.device)  # by a number CUDA multiplies: other bits than on the CPU
        return (pixels.float() / white - mean) / std

    @cached_property
    def _steps(self) -> list[Any]:
        """The part of the pipeline that makes uint8 [C, crop, crop] of a picture."""
        from torchvision.transforms import InterpolationMode, v2

        size = (self.crop, self.crop) if self.resize is None else [self.resize]
        resize = v2.Resize(size, InterpolationMode(self.interpolation), antialias=self.antialias)
        to_tensor = v2.PILToTensor()  # Pillow's own resizing always averages
        resized = [resize, to_tensor] if self.antialias else [to_tensor, resize]
        cut = [] if self.resize is None else [v2.CenterCrop(self.crop)]
        return [v2.RGB() if self.channels == 3 else v2.Grayscale(), *resized, *cut]

    def cut_away(self, sizes: Iterable[tuple[int, int]]) -> str:
        """Say what part of pictures, of these widths and heights, the crop cuts away on average; "" for a quarter."""
        kept = [min(size) / max(size) * (self.crop / self.resize) ** 2 for size in sizes if self.resize is not None]
        if not kept or (cut := 1.0 - sum(kept) / len(kept)) <= 0.25:
            return ""
        less = f", `--resize {self.crop}` cuts less" if self.resize != self.crop else ""
        return f"The crop cuts away {cut:.0%} of the pictures; `auxhead train --squash` keeps all of them{less}."

    def describe(self) -> str:
        """Say in a line what happens to a picture."""
        size = f"{self.crop} x {self.crop} pixels"
        how = f"{self.interpolation}{'' if self.antialias else ', not antialiased'}"
        cut = f"resized to a shorter side of {self.resize}, cropped to {size} at the centre"
        geometry = f"squashed to {size}" if self.resize is None else cut
        colours = "RGB" if self.channels == 3 else "grey"
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"Pictures: {geometry} ({how}); {colours} of 0 to 1, less {mean}, over {std}."

    def as_json(self) -> dict[str, Any]:
        """Return its fields, and the number of channels, as files keep them."""
        return {**dataclasses.asdict(self), "channels": self.channels, "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def of_json(cls, fields: Any) -> "Preprocessing":
        """Return what :meth:`as_json` wrote; ``BadInput`` for anything else."""
        wanted = [*(field.name for field in dataclasses.fields(cls)), "channels"]
        if not isinstance(fields, Mapping) or {*fields} != {*wanted}:
            raise BadInput(f"preprocessing: got {fields!r:.100}, wants {', '.join(wanted)}")
        try:
            made = cls(**{name: value for name, value in fields.items() if name != "channels"})
        except (TypeError, ValueError) as error:
            raise BadInput(f"preprocessing: {error}") from None
        if fields["channels"] != made.channels:
            raise BadInput(
                f"preprocessing: channels: got {fields['channels']!r:.60}, wants {made.channels}, as mean has"
            )
        return made


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value and value**2 <= MOST_PIXELS


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e308
