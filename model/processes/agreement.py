"""``agree``: processes that work together compare what has to be alike, checkpoints for one, and say what is not."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..bad_input import BadInput
from ..description import DESCRIPTION, WEIGHTS, content_hash, read_description, weights_name
from .dealing import exchanging
from .process_group import first_difference, ranks


def agree(facts: Callable[[], Mapping[str, str]]) -> None:
    """Check that several processes have the same facts, by name; one process has none to find.

    Raises:
        BadInput: names the first difference.
    """
    if ranks() == 1:
        return
    with exchanging() as exchange:
        found = [json.loads(content) for content in exchange(json.dumps(facts()).encode())]
    difference = first_difference(found)
    if difference is not None:
        raise BadInput(difference)


def file_digest(path: Path) -> str:
    """Return a hash of a file's content, or "none" where there is no file, for facts to agree on."""
    return content_hash(path)[:16] if path.is_file() else "none"


def checkpoint_facts(directory: Path) -> dict[str, str]:
    """Return hashes of a checkpoint's files, by name."""
    try:
        weights = weights_name(read_description(directory))
    except BadInput:  # which every process says that has none
        weights = WEIGHTS
    files = {DESCRIPTION: DESCRIPTION, "parameters": weights}
    return {f"checkpoint: {name}": file_digest(directory / file) for name, file in files.items()}


def tensor_digest(tensor: Tensor) -> str:
    """Return dtype, shape and a hash of a tensor's values."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} ({hashlib.sha256(values.tobytes()).hexdigest()[:16]})"
