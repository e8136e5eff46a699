"""Work that several processes share: batches dealt in turns, all answers in order, and facts that have to agree."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ..basics.bad_input import BadInput
from ..saving.checkpoint_files import DESCRIPTION, content_hash, read_description, weights_name
from .process_group import first_difference, own_rank, ranks
from .rank_failures import RankFailed, in_words

Item = TypeVar("Item")
Tensors = dict[str, Tensor]


class _Round(NamedTuple):
    """The part of a process in one round, as the others see it."""

    items: list[str]
    """Digests of all items of the round, dealt to any process."""
    error: str | None
    answer: Tensors
    """For the own item; empty without one."""


def dealt(
    items: Iterable[Item], answer: Callable[[Item], Tensors], content: Callable[[Item], bytes], name: str
) -> Iterator[Tensors]:
    """Yield the answers for all items, in order, in each process; item i is answered by process i % ranks().

    Answers are those of one process, which answers for the same items, bit for bit where the device repeats its
    results. An error in one process is raised there, and as ``RankFailed`` in the others.

    Args:
        items: the same in each process.
        answer: from an item to tensors, on the CPU.
        content: of an item, by which is seen that the processes have the same ones.
        name: of the items, for errors.

    Raises:
        BadInput: processes have different items.
    """
    if ranks() == 1:
        yield from map(answer, items)
        return
    rest = iter(items)
    with exchanging() as exchange:
        while True:
            own, error = _Round([], None, {}), None
            try:
                some = list(islice(rest, ranks()))
                own = own._replace(items=[hashlib.sha256(content(item)).hexdigest()[:16] for item in some])
                if own_rank() < len(some):
                    own = own._replace(answer=answer(some[own_rank()]))
            except Exception as raised:
                error = raised
                own = own._replace(error=in_words(error), answer={})
            parts = [_unpacked(packed) for packed in exchange(_packed(own))]
            _raise_first(error, parts, name)
            if not own.items:
                return
            yield from (part.answer for part in parts[: len(own.items)])


def made_by_rank_0(make: Callable[[], Any]) -> Any:
    """Return what rank 0 makes, as JSON has it, in every process; the others make nothing."""

    def as_tensor(_: None) -> Tensors:
        return {"json": torch.tensor(list(json.dumps(make()).encode()), dtype=torch.uint8)}

    [found] = dealt([None], as_tensor, lambda _: b"", "item")
    return json.loads(found["json"].numpy().tobytes())


@contextmanager
def exchanging() -> Iterator[Callable[[bytes], list[bytes]]]:
    """Yield what gives each process what all of them hand in, by rank; all do so the same number of times.

    It goes by gloo, on the CPU, whatever the process group is made for: what is exchanged ends there anyway.
    """
    group = dist.new_group(backend="gloo")
    waiting = False

    def gather(own: Tensor) -> list[Tensor]:
        nonlocal waiting
        found = [torch.empty_like(own) for _ in range(ranks())]
        work = dist.all_gather(found, own, group, async_op=True)
        waiting = True
        while not work.is_completed():  # Python's own waiting can be interrupted when another process dies
            time.sleep(0.001)
        waiting = False
        work.wait()
        return found

    def exchange(content: bytes) -> list[bytes]:
        sizes = [int(size) for size in gather(torch.tensor([len(content)]))]
        padded = torch.frombuffer(bytearray(content.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        return [one[:size].numpy().tobytes() for one, size in zip(gather(padded), sizes, strict=True)]

    try:
        yield exchange
    finally:
        if not waiting:  # an interrupted one would be waited for, and by then files are to be closed
            dist.destroy_process_group(group)


def _packed(own: _Round) -> bytes:
    header = json.dumps([own.items, own.error]).encode()
    tensors = save({name: tensor.contiguous() for name, tensor in own.answer.items()}) if own.answer else b""
    return len(header).to_bytes(8, "little") + header + tensors


def _unpacked(packed: bytes) -> _Round:
    end = 8 + int.from_bytes(packed[:8], "little")
    items, error = json.loads(packed[8:end])
    return _Round(items, error, load(packed[end:]) if packed[end:] else {})


def _raise_first(own: Exception | None, parts: list[_Round], name: str) -> None:
    """Raise the own error, or name that of another process, or a difference between their items."""
    if own is not None:
        raise own
    for rank, part in enumerate(parts):
        if part.error is not None:
            raise RankFailed(f"rank {rank} failed: {part.error}")
    for rank, part in enumerate(parts):
        if part.items != parts[0].items:
            raise BadInput(
                f"{name}: rank {rank} has other ones than rank 0; wants the same in every process, in the same order: "
                "they are dealt out here, without a DistributedSampler"
            )


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


def checkpoint_facts(directory: Path) -> dict[str, str]:
    """Return hashes of a checkpoint's files, by name, or "none" where there is no file, to agree on."""
    try:
        weights: Path | None = directory / weights_name(read_description(directory))
    except BadInput:  # which every process says that has none
        weights = None
    files = {f"checkpoint: {DESCRIPTION}": directory / DESCRIPTION, "checkpoint: parameters": weights}
    return {name: content_hash(path)[:16] if path and path.is_file() else "none" for name, path in files.items()}


def tensor_digest(tensor: Tensor) -> str:
    """Return dtype, shape and a hash of a tensor's values."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} ({hashlib.sha256(values.tobytes()).hexdigest()[:16]})"
