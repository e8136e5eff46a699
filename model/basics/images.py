"""Image files as RGB with 8 bits a channel; training and inference share it."""

import os
import stat
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .bad_input import BadInput, one_line

#: Formats that are read, by their names in Pillow. Of its others some start programs (EPS: Ghostscript), and few are
#: tried as often.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: Pixels of an image, at most: a quarter of a GiB as RGB, from where Pillow warns. A file of a few kB may claim more.
MOST_PIXELS = 2**30 // 12
#: The longer side of an image for each pixel of the shorter one, at most: resized by that, others take any memory.
MOST_TO_ONE = 100


def open_image(path: str | os.PathLike[str] | BinaryIO, name: str = "") -> Image.Image:
    """Read an image file, or the content of one that is called ``name``: as RGB, upright, on white if transparent.

    Before a pixel is decoded, what is no file is refused (whoever opens a pipe waits), other formats than ``FORMATS``,
    more than ``MOST_PIXELS`` pixels, and several pictures in one file, of which nobody knows the right one; the first
    one of a photo with a preview (MPO) is the photo.

    Raises:
        BadInput: the file is missing or is not an image that can be read to its end.
    """
    name = name or str(path)
    try:
        if isinstance(path, (str, os.PathLike)) and not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a file")
        with Image.open(path, formats=FORMATS) as file:
            width, height = file.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"it has {width:,} x {height:,} pixels, wants at most {MOST_PIXELS:,} in all")
            if getattr(file, "is_animated", False) and file.format != "MPO":
                raise ValueError("it holds several pictures, wants one")
            if max(width, height) > MOST_TO_ONE * min(width, height):
                raise ValueError(f"it has {width:,} x {height:,} pixels, wants sides of 1 to {MOST_TO_ONE} at most")
            return to_rgb(ImageOps.exif_transpose(file), file.format)
    except FileNotFoundError:
        raise BadInput(f"{name}: no such file, wants an image") from None
    except UnidentifiedImageError:
        is_empty = isinstance(path, (str, os.PathLike)) and not os.path.getsize(path)
        what = "it is empty" if is_empty else "its format is not known"
        raise BadInput(f"{name}: cannot be read as an image ({what})") from None
    except Exception as error:  # Pillow's plugins raise what they come across: struct.error, TypeError, KeyError
        raise BadInput(f"{name}: cannot be read as an image ({one_line(error)})") from None


def to_rgb(image: Image.Image, file_format: str | None = None) -> Image.Image:
    """Return an image of any mode as RGB with 8 bits a channel.

    Of 16 bits 65,535 is white, whatever the brightest pixel is. Raises ``ValueError`` for numbers of 32 bits, of which
    nobody knows what white is.
    """
    if image.mode.startswith("I;16") and image.has_transparency_data:
        raise ValueError("one of its 16-bit values is transparent; wants 8 bits, or none")
    if image.mode.startswith("I;16") or (image.mode, file_format) == ("I", "PPM"):  # which Pillow scales to 65,535
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray(np.rint(values * (255.0 / 65535.0)).astype(np.uint8))
    elif image.mode.startswith(("I", "F")):
        kind = "floats" if image.mode.startswith("F") else "integers"
        raise ValueError(f"its pixels are {kind} of 32 bits, of which nobody knows white; wants 8 or 16 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
