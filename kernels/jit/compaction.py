"""Triton kernels of compaction: gather open rows into a smaller batch, copy the other rows' answers to the request.

A request enters by the batch that it was captured for. Each time few enough of its samples stay open, their rows move
into a smaller captured batch, in their order, and the network goes on with that one:

    features_small[rank of n among the open rows] = features[n]    for every open row n

``origin`` says of each row of a batch which sample of the request it is: None stands for the batch that the request
has entered by, -1 for a row that holds none of its samples. Prefixes of names are those of ``head``.
"""

import triton
import triton.language as tl


@triton.jit
def copy_answer(
    row, sample,
    label, exit_index, confidence, probs,
    to_label, to_exit_index, to_confidence, to_probs,
    K, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy the answer of a row to a sample of the request, unless the row holds none (-1)."""
    if sample >= 0:
        tl.store(to_label + sample, tl.load(label + row))
        tl.store(to_exit_index + sample, tl.load(exit_index + row))
        tl.store(to_confidence + sample, tl.load(confidence + row))
        if probs is not None:
            for start in range(0, K, BLOCK_K):
                off_k = start + tl.arange(0, BLOCK_K)
                mask_k = off_k < K
                tl.store(to_probs + sample * K + off_k, tl.load(probs + row * K + off_k, mask=mask_k), mask=mask_k)


@triton.jit
def gather_kernel(
    features,  # [N, WORDS] integers: the rows as they lie in memory
    destinations,  # [N + 1, ENTRY] int64: by the number of open rows the addresses of a batch, and its size; or zeros
    origin,  # [N] int64, or None
    label, exit_index, confidence, probs,  # the batch's answer: [N], [N, K] or None
    to_label, to_exit_index, to_confidence, to_probs,  # the request's
    N, WORDS, K,
    ENTRY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Move the open rows and copy the answers of the others; a program has a block of a row.

    Rows begin at multiples of ALIGNED bytes, in both batches.
    """
    blocks = tl.cdiv(WORDS, BLOCK_W)
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    block = pid % blocks
    off_n = tl.arange(0, BLOCK_N)
    is_open = tl.load(exit_index + off_n, mask=off_n < N, other=0) < 0
    count = tl.sum(is_open.to(tl.int64), axis=0)
    entry = destinations + count * ENTRY
    small_features = tl.load(entry)
    if small_features != 0:
        small_origin = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        small_exit_index = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
        sample = row if origin is None else tl.load(origin + row)
        if tl.sum((is_open & (off_n == row)).to(tl.int32), axis=0) > 0:
            rank = tl.sum((is_open & (off_n < row)).to(tl.int64), axis=0)
            off_w = block * BLOCK_W + tl.arange(0, BLOCK_W)
            mask_w = off_w < WORDS
            words = tl.load(features + row * WORDS + off_w, mask=mask_w)
            pointer = small_features.to(tl.pointer_type(features.dtype.element_ty)) + rank * WORDS
            # as the compiler knows of the load: without it 8 bytes at a time are stored, by way of shared memory
            pointer = tl.multiple_of(pointer + off_w, ALIGNED)
            tl.store(pointer, words, mask=mask_w)
            if block == 0:
                tl.store(small_origin + rank, sample)
                tl.store(small_exit_index + rank, tl.full((), -1, tl.int64))
        elif block == 0:
            copy_answer(
                row, sample, label, exit_index, confidence, probs,
                to_label, to_exit_index, to_confidence, to_probs, K, BLOCK_K,
            )  # fmt: skip
        if pid == 0:
            # the rest of the smaller batch neither answers nor is open; and it is in its next request
            mask_n = (off_n >= count) & (off_n < tl.load(entry + 4))
            tl.store(small_origin + off_n, tl.full((BLOCK_N,), -1, tl.int64), mask=mask_n)
            tl.store(small_exit_index + off_n, tl.zeros((BLOCK_N,), tl.int64), mask=mask_n)
            requests = tl.load(entry + 3).to(tl.pointer_type(tl.int64))
            tl.store(requests, tl.load(requests) + 1)


@triton.jit
def collect_kernel(
    origin,  # [N] int64
    label, exit_index, confidence, probs,  # the batch's answer: [N], [N, K] or None
    to_label, to_exit_index, to_confidence, to_probs,  # the request's
    K,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy the answers of the batch in which a request ended; a program has a row."""
    row = tl.program_id(0).to(tl.int64)
    copy_answer(
        row, tl.load(origin + row), label, exit_index, confidence, probs,
        to_label, to_exit_index, to_confidence, to_probs, K, BLOCK_K,
    )  # fmt: skip
