"""Compaction: moves the open samples of a captured batch into a smaller one, by launches that a graph can hold."""

import math

import torch
from torch import Tensor

from .exits import Answer, ExitBuffers
from .launch.launch_config import next_power_of_2

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
#: Words that a program copies: 8 reads of 16 bytes for each of its 128 threads.
_BLOCK_WORDS = 2048
#: Columns of a table of destinations: addresses of features, origins, exits and request counter, and the batch size.
_ENTRY = 5


def moves_rows(features: Tensor, small: Tensor | None = None) -> bool:
    """Return whether samples can be moved: each is a dense block of memory, one behind the other, in ``small`` too.

    Args:
        features: [N, ...], in any order of its dimensions but the first.
        small: [M, ...], of the same dtype; its samples must lie in memory as those of ``features`` do.
    """
    if small is not None:
        return moves_rows(features) and moves_rows(small) and _row(features) == _row(small)
    behind = 1
    for stride, size in sorted(_row(features)[0]):
        if stride != behind:
            return False
        behind *= size
    return behind > 0 and (len(features) == 1 or features.stride(0) == behind)


def _row(features: Tensor) -> tuple[list[tuple[int, int]], int]:
    """Return a sample's layout, (stride, size) of all dimensions of several elements, and its alignment, 1 to 16."""
    sizes, strides = features.shape[1:], features.stride()[1:]
    layout = [(stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1]
    return layout, math.gcd(math.prod(sizes) * features.element_size(), features.data_ptr(), 16)


def new_destinations(buffers: ExitBuffers) -> Tensor:
    """Make an empty table for ``gather_open``, [N + 1, 5] int64 zeros: rows go nowhere, however many are open."""
    return torch.zeros(buffers.label.shape[1] + 1, _ENTRY, dtype=torch.int64, device=buffers.label.device)


def destination(features: Tensor, origin: Tensor, buffers: ExitBuffers) -> list[int]:
    """Return the row of a table of destinations that stands for a smaller batch, whose memory must outlive its use.

    The arguments are those of :func:`gather_open` for the smaller batch.
    """
    tensors = (features, origin, buffers.answer(buffers.packed_answer)[1], buffers.requests)
    return [*(tensor.data_ptr() for tensor in tensors), len(features)]


def gather_open(
    features: Tensor, buffers: ExitBuffers, origin: Tensor | None, destinations: Tensor, answer: Answer
) -> None:
    """Move the open rows into a smaller batch, if the table has one for their number; one launch.

    A row is open if its exit in the batch's answer is negative. The answers of all others are copied to the request's.
    In the smaller batch the rows behind those that came belong to no sample, and its request counter is counted up.

    Args:
        features: what a tap returns, [N, ...]; see :func:`moves_rows`.
        buffers: of the batch.
        origin: [N] int64, the sample of the request that each row is, or -1; None where row and sample are the same.
        destinations: [N + 1, 5] int64, by the number of open rows a row made by :func:`destination`, or zeros. Read on
            the device, so that it may change after a capture.
        answer: the request's, for at least as many samples as it has.
    """
    from .jit import compaction as compact_kernel

    samples = buffers.label.shape[1]
    aligned = _row(features)[1]
    word = min(aligned, 8)
    row_words = math.prod(features.shape[1:]) * features.element_size() // word
    flat = features.as_strided((features.numel(),), (1,)).view(_WORDS[word])
    block_w = min(next_power_of_2(row_words), _BLOCK_WORDS)
    classes, block_k = _classes(answer)
    with torch.cuda.device_of(features):
        compact_kernel.gather_kernel[(samples * -(-row_words // block_w),)](
            flat, destinations, origin, *buffers.answer(buffers.packed_answer), *answer,
            samples, row_words, classes,
            ENTRY=_ENTRY, ALIGNED=aligned, BLOCK_N=next_power_of_2(samples), BLOCK_W=block_w, BLOCK_K=block_k,
            num_warps=4,
        )  # fmt: skip


def collect(buffers: ExitBuffers, origin: Tensor, answer: Answer) -> None:
    """Copy the answers of the batch in which a request ended to the request's; one launch.

    None of its rows is open. See :func:`gather_open` for the arguments.
    """
    from .jit import compaction as compact_kernel

    classes, block_k = _classes(answer)
    with torch.cuda.device_of(origin):
        compact_kernel.collect_kernel[(len(origin),)](
            origin, *buffers.answer(buffers.packed_answer), *answer, classes, BLOCK_K=block_k, num_warps=1,
        )  # fmt: skip


def _classes(answer: Answer) -> tuple[int, int]:
    """Return K, and how many classes of probabilities are copied in one step."""
    classes = 1 if answer[3] is None else answer[3].shape[1]
    return classes, min(next_power_of_2(classes), 1024)
