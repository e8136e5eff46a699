"""The two files of a checkpoint: parameters, named by their content, and ``model.json``, which points to them.

A save writes both beside the old ones and then replaces ``model.json``: whoever reads finds the old checkpoint or the
new one, whatever ends the save. Files that nothing points to any more are removed by the save that comes through.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..basics.bad_input import BadInput, one_line
from ..basics.files import as_json, naming, on_disk, read_json
from .description import checked_description

DESCRIPTION = "model.json"
#: How names of folders begin in which a save is at work, or was when it was killed.
_UNFINISHED = ".model-unfinished-"
#: Names of parameters, for ``glob``: shards of other programs are called alike.
_BY_CONTENT = f"model-{'[0-9a-f]' * 16}.safetensors"
#: Dtypes by their names in the header of a file of parameters.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def write_files(directory: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint into a folder, or leave the one that is there; of several writers the last one wins.

    Raises:
        OSError: nothing can be written; names the folder's ``model.json``.
    """
    with naming(directory / DESCRIPTION), _one_writer(directory) as alone:
        with tempfile.TemporaryDirectory(dir=directory, prefix=_UNFINISHED) as folder:
            weights, text = Path(folder, "parameters"), Path(folder, DESCRIPTION)
            save_file(dict(tensors), weights)
            whole = {**description, "parameters": content_hash(weights)}
            text.write_text(as_json(whole), encoding="utf-8")
            for file in (weights, text):
                on_disk(file)
            others = {*directory.glob(_BY_CONTENT)}
            os.replace(weights, directory / weights_name(whole))
            os.replace(text, directory / DESCRIPTION)
            on_disk(directory)
        if alone:
            for path in others - {directory / weights_name(whole)}:
                path.unlink(missing_ok=True)
            for path in directory.glob(f"{_UNFINISHED}*"):  # of saves that were killed
                shutil.rmtree(path, ignore_errors=True)


def read_files(directory: Path, unread: Container[str] = ()) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and parameters that belong together, while others may save; see :func:`load_checkpoint`.

    Of the parameters named in ``unread`` the file's header is read alone: they are on the device meta.
    """
    while True:
        saved = _save_of(directory)
        description = read_description(directory)
        try:
            return description, _read_weights(directory, description, unread)
        except BadInput:
            if _save_of(directory) == saved:
                raise  # else another save has taken the parameters away since, and maybe one more brought them back


def read_description(directory: Path) -> dict[str, Any]:
    """Read ``model.json`` of a checkpoint and check all of it; see :func:`load_checkpoint` for errors."""
    path = own_file(directory, DESCRIPTION)
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"checkpoint: {path} is not JSON ({one_line(error)})") from None
    return checked_description(path, content)


def own_file(directory: Path, name: str) -> Path:
    """Return the path of a checkpoint's file.

    Raises:
        BadInput: it is not there, is no file, or is a link that leads out of the folder: whoever made a checkpoint must
            not choose what else is read. The folder itself may be a link.
    """
    path = directory / name
    if not path.is_file():
        raise BadInput(f"checkpoint: {directory} has no {name}, wants a directory that save_checkpoint wrote")
    if not path.resolve().is_relative_to(directory.resolve()):
        raise BadInput(
            f"checkpoint: {path} is a link that leads out of {directory}, wants the file itself; if you trust it, copy "
            "the directory with `cp -rL`"
        )
    return path


def weights_name(description: Mapping[str, Any]) -> str:
    """Return the name of the file of parameters that a description belongs to."""
    return f"model-{description['parameters'][:16]}.safetensors"


def read_tensor(path: Path, name: str, device: torch.device) -> Tensor:
    """Read one tensor of a file of parameters onto a device, into memory of its own; the others stay unread.

    Args:
        path: of the file, as ``EarlyExitNetwork.unread`` has it; its hash was compared when the checkpoint was loaded.
        name: as in the network's ``state_dict``, "backbone.layer1.0.conv1.weight" say.
        device: where it goes.

    Raises:
        BadInput: the file is damaged, has no such tensor, or is gone, as it is after another save into its folder.
    """
    try:
        with safe_open(path, "pt") as file:
            if name not in file.keys():
                raise BadInput(f"checkpoint: {path} has no tensor {name!r:.100}")
            tensor: Tensor = file.get_tensor(name)
    except FileNotFoundError:
        raise BadInput(
            f"checkpoint: {path} is not there any more: another save has taken its place, or its folder was moved; "
            "load the checkpoint again"
        ) from None
    except (SafetensorError, OSError) as error:
        raise BadInput(f"checkpoint: {path} is damaged ({one_line(error)})") from None
    return tensor.to(device, copy=True)  # it lies in the file until then


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            found.update(chunk)
    return found.hexdigest()


def _save_of(directory: Path) -> tuple[int, ...]:
    """Return what tells apart the saves that a folder has seen, even those of the same content."""
    with suppress(OSError):
        found = (directory / DESCRIPTION).stat()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
    return ()


def _read_weights(directory: Path, description: Mapping[str, Any], unread: Container[str]) -> dict[str, Tensor]:
    path, wanted = own_file(directory, weights_name(description)), description["parameters"]
    try:
        found = content_hash(path)
        if found != wanted:
            raise BadInput(
                f"checkpoint: {path} is damaged, or does not belong to {DESCRIPTION} beside it: its SHA-256 is "
                f"{found:.16}..., wants {wanted:.16}..., as both were saved"
            )
        with torch.device("cpu"), safe_open(path, "pt") as file:  # whatever device the caller makes tensors on
            return {
                name: _of_header(path, file, name) if name in unread else file.get_tensor(name) for name in file.keys()
            }
    except (SafetensorError, OSError, RuntimeError) as error:  # PyTorch opens it once more
        raise BadInput(f"checkpoint: {path} is damaged ({one_line(error)})") from None


def _of_header(path: Path, file: Any, name: str) -> Tensor:
    """Return a tensor on the device meta, of the shape and dtype that an opened file has for one."""
    saved = file.get_slice(name)
    kind = saved.get_dtype()
    if kind not in _DTYPES:
        raise BadInput(f"checkpoint: {path} has {name!r:.100} as {kind}, wants one of {', '.join(_DTYPES)}")
    return torch.empty(saved.get_shape(), dtype=_DTYPES[kind], device="meta")


@contextmanager
def _one_writer(directory: Path) -> Iterator[bool]:
    """Wait for other saves into a folder; yields False where the file system has no locks."""
    import fcntl  # readers do without it, on any platform

    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # a process that was forked meanwhile has the lock, too
    finally:
        os.close(opened)
