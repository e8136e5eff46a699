"""Small image sources of two classes that a network separates at once."""

import pickle
from pathlib import Path

import numpy as np
from auxhead.model.basics.preprocessing import Preprocessing
from PIL import Image


def stripes(label: int, size: int, generator: np.random.Generator) -> Image.Image:
    """Vertical stripes for class 0, horizontal ones for class 1, with noise."""
    wave = np.where(np.arange(size) // 2 % 2, 200, 40)
    grey = np.broadcast_to(wave if label == 0 else wave[:, None], (size, size))
    noisy = grey[..., None] + generator.integers(-30, 30, (size, size, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def whole(size: int) -> Preprocessing:
    """Return what squares of another size become without a crop, in [-1, 1]."""
    return Preprocessing(size, size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def write_image_folder(directory: Path, per_class: int = 12, size: int = 16) -> Path:
    """Write ``directory``/{lying,standing}/*.png."""
    generator = np.random.default_rng(0)
    for label, name in ((1, "lying"), (0, "standing")):
        (directory / name).mkdir(parents=True)
        for number in range(per_class):
            stripes(label, size, generator).save(directory / name / f"{number}.png")
    return directory


def write_cifar10(root: Path, per_batch: int = 20) -> Path:
    """Write CIFAR-10's six batches in the format in which they are distributed, with few pictures."""
    generator = np.random.default_rng(0)
    directory = root / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = [number % 10 for number in range(per_batch)]
        data = generator.integers(0, 256, (per_batch, 3072), dtype=np.uint8)
        batch = {"batch_label": name, "labels": labels, "data": data, "filenames": ["x.png"] * per_batch}
        (directory / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": [f"kind{number}" for number in range(10)], "num_cases_per_batch": per_batch, "num_vis": 3072}
    (directory / "batches.meta").write_bytes(pickle.dumps(meta))
    return root
