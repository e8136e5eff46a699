"""Image files to network input: reading, resizing, normalising, shifting; training and ``auxhead infer`` share it."""

import os
import stat

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .bad_input import BadInput, one_line

#: Mean and standard deviation of each channel that the demo normalises with, pixels scaled to 0 to 1. They put pixels
#: in [-1, 1]; batch normalisation does the rest.
MEAN = (0.5, 0.5, 0.5)
STD = (0.5, 0.5, 0.5)

#: Formats that are read, by their names in Pillow. Of its others some start programs (EPS: Ghostscript), and few are
#: tried as often.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: Pixels of an image, at most: a quarter of a GiB as RGB, from where Pillow warns. A file of a few kB may claim more.
MOST_PIXELS = 2**30 // 12


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image file and return it as RGB, upright, on white where it is transparent.

    Before a pixel is decoded, what is no file is refused (whoever opens a pipe waits), other formats than ``FORMATS``,
    more than ``MOST_PIXELS`` pixels, and several pictures in one file, of which nobody knows the right one; the first
    one of a photo with a preview (MPO) is the photo.

    Raises:
        BadInput: the file is missing or is not an image that can be read to its end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a file")
        with Image.open(path, formats=FORMATS) as file:
            width, height = file.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"it has {width:,} x {height:,} pixels, wants at most {MOST_PIXELS:,} in all")
            if getattr(file, "is_animated", False) and file.format != "MPO":
                raise ValueError("it holds several pictures, wants one")
            return to_rgb(ImageOps.exif_transpose(file))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, wants an image") from None
    except UnidentifiedImageError:
        what = "its format is not known" if os.path.getsize(path) else "it is empty"
        raise BadInput(f"{path}: cannot be read as an image ({what})") from None
    except Exception as error:  # Pillow's plugins raise what they come across: struct.error, TypeError, KeyError
        raise BadInput(f"{path}: cannot be read as an image ({one_line(error)})") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as RGB with 8 bits a channel."""
    if image.mode.startswith(("I", "F")):  # 16 or 32 bits: Pillow's own conversion would clip at 255
        values = np.asarray(image, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("it has pixels that are no finite numbers")
        full_scale = 65535.0 if values.max(initial=0.0) > 255.0 else 255.0
        image = Image.fromarray((values / full_scale * 255.0).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def to_pixels(image: Image.Image, size: int) -> Tensor:
    """Return an RGB image, resized to size x size whatever its shape, as uint8 [3, size, size]."""
    resized = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def normalise(pixels: Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Turn pixels (uint8 [N, 3, H, W]) into the network's input (float32, the same shape)."""
    middle = torch.tensor(mean, device=pixels.device).view(3, 1, 1)
    spread = torch.tensor(std, device=pixels.device).view(3, 1, 1)
    white = torch.tensor(255.0, device=pixels.device)  # by a number CUDA multiplies: other bits than on the CPU
    return (pixels.float() / white - middle) / spread


def random_shift(pixels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Shift each image of [N, 3, H, W] by up to ``most`` pixels either way, and fill up with black.

    Does the same as torchvision's ``RandomCrop((H, W), padding=most)`` on each image, for a batch at once. Draws from
    ``generator`` on the CPU, so that a seed means the same on every device.
    """
    if most == 0:
        return pixels
    batch, _, height, width = pixels.shape
    padded = F.pad(pixels, (most, most, most, most))
    start = torch.randint(0, 2 * most + 1, (2, batch), generator=generator, device="cpu").to(pixels.device)
    rows = start[0, :, None, None] + torch.arange(height, device=pixels.device)[:, None]  # [N, H, 1]
    columns = start[1, :, None, None] + torch.arange(width, device=pixels.device)  # [N, 1, W]
    sample = torch.arange(batch, device=pixels.device)[:, None, None]
    return padded[sample, :, rows, columns].permute(0, 3, 1, 2).contiguous()  # as loaders': for backbones with a .view
