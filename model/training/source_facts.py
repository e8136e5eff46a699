"""``source_facts``: in few characters, which images a data set has, for processes to agree on."""

import hashlib

from .data_sets import LabelledImages


def source_facts(source: LabelledImages) -> str:
    """Return the number of images, and a hash of their names, sizes on disk, labels and classes."""
    found = hashlib.sha256(repr(source.classes).encode())
    found.update(source.labels.numpy().tobytes())
    for path in source.paths or ():
        found.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
    return f"{len(source.labels)} images of {source.name} ({found.hexdigest()[:16]})"
