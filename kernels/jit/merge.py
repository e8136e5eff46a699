"""Merge in the kernel: the answer of the first place that is sure, and how many samples stay open.

reference/merge.py says what it means. A sample that an earlier launch has answered keeps its answer. The last program
of all knows how many samples stay open, and can tell the host (a number in pinned memory) or the graph (a conditional
node).
"""

import triton
import triton.language as tl
from triton.language import core

from .criteria import TALLY_BINS
from .hand_over import INTERPRETED


@triton.jit
def merge(output, answer, tallies, patience, is_open, off_n, N, LAUNCH: tl.constexpr):
    """Answer for the samples that are open, from the places of this launch; returns how many stay open."""
    probs, label, confidence, exits = output
    answer_probs, answer_label, answer_confidence, answer_exit = answer
    FIRST: tl.constexpr = LAUNCH.first
    HEADS: tl.constexpr = len(LAUNCH.places)
    mask_n = off_n < N
    chosen = tl.full((off_n.shape[0],), -1, tl.int32)
    chosen_label = tl.zeros((off_n.shape[0],), tl.int64)
    chosen_confidence = tl.zeros((off_n.shape[0],), tl.float32)
    if LAUNCH.patient:
        count = tl.zeros((off_n.shape[0],), tl.float32)
        before = tl.full((off_n.shape[0],), -1, tl.int64)
        for place in tl.static_range(FIRST):  # what earlier launches of this request have written
            source = place * N + off_n
            said = tl.load(label + source, mask=mask_n, other=0, cache_modifier=".cg")
            how_sure = tl.load(confidence + source, mask=mask_n, other=0, cache_modifier=".cg")
            count, before = heads_in_a_row(count, before, said, how_sure)
    for i in tl.static_range(HEADS):  # all are read at once, whichever is chosen; .cg: other SMs wrote them
        source = (FIRST + i) * N + off_n
        place_label = tl.load(label + source, mask=mask_n, other=0, cache_modifier=".cg")
        place_confidence = tl.load(confidence + source, mask=mask_n, other=0, cache_modifier=".cg")
        if LAUNCH.last and i == HEADS - 1:
            sure = mask_n
        else:
            sure = tl.load(exits + source, mask=mask_n, other=0, cache_modifier=".cg") != 0
        if LAUNCH.patient:
            count, before = heads_in_a_row(count, before, place_label, place_confidence)
            if patience[i] is not None:
                place_confidence = tl.where(place_confidence == place_confidence, count, place_confidence)
                sure |= place_confidence > tl.load(patience[i])  # the last place is in any case
        first = (chosen < 0) & sure
        chosen = tl.where(first, FIRST + i, chosen)
        chosen_label = tl.where(first, place_label, chosen_label)
        chosen_confidence = tl.where(first, place_confidence, chosen_confidence)
    answers = is_open & (chosen >= 0)
    tl.store(answer_label + off_n, chosen_label, mask=answers)
    tl.store(answer_confidence + off_n, chosen_confidence, mask=answers)
    if FIRST == 0:
        tl.store(answer_exit + off_n, tl.where(is_open, chosen, 0).to(tl.int64), mask=mask_n)
    else:
        tl.store(answer_exit + off_n, chosen.to(tl.int64), mask=answers)
    if tallies is not None:
        share = tl.where(chosen_confidence == chosen_confidence, chosen_confidence, 0.0)
        of_bin = tl.minimum(tl.maximum(share * TALLY_BINS, 0.0), TALLY_BINS - 1.0).to(tl.int32)
        tl.atomic_add(tallies + tl.maximum(chosen, 0) * TALLY_BINS + of_bin, 1, mask=answers, sem="relaxed")
    if answer_probs is not None:
        copy_probs(probs, tl.maximum(chosen, 0) * N + off_n, answer_probs, off_n, answers, LAUNCH)
    return tl.sum((is_open & (chosen < 0)).to(tl.int64), axis=0)


@triton.jit
def heads_in_a_row(count, before, label, confidence):
    """Count one more head: how many in a row, ending with it, gave its label, and that; see reference/merge.py."""
    said = tl.where(confidence == confidence, label, -1)
    return tl.where(said == before, count + 1.0, 1.0), said


@triton.jit
def copy_probs(probs, source, answer_probs, off_n, answers, LAUNCH: tl.constexpr):
    """Copy the probabilities of samples that are answered from the place that was chosen, rows ``source``."""
    for start_k in range(0, LAUNCH.classes, LAUNCH.block_j):
        off_j = start_k + tl.arange(0, LAUNCH.block_j)
        mask = answers[:, None] & (off_j < LAUNCH.classes)[None, :]
        pointer = probs + source.to(tl.int64)[:, None] * LAUNCH.classes + off_j[None, :]
        row = tl.load(pointer, mask=mask, cache_modifier=".cg")
        tl.store(answer_probs + off_n.to(tl.int64)[:, None] * LAUNCH.classes + off_j[None, :], row, mask=mask)


@triton.jit
def tell(still_open, tally, told, N, LAUNCH: tl.constexpr):
    """Count a merged sample; the last one of all tells the host, the graph or both how many samples stay open."""
    open_samples, requests, condition = told  # condition: [1] int64, the handle of a conditional node, or None
    if N == 1:
        before = tl.zeros((), tl.int64)
    else:  # one number counts merged samples (above) and open ones (below), so that the last program knows both
        before = tl.atomic_add(tally, still_open + (1 << 32), sem="acq_rel", scope="gpu")
    if (before >> 32) == N - 1:
        if N != 1:
            tl.store(tally, tl.zeros((), tl.int64))
        total = (before & 0xFFFFFFFF) + still_open
        if open_samples is not None:
            request = tl.load(requests)
            if LAUNCH.first == 0:
                request += 1
                tl.store(requests, request)
            tl.debug_barrier()
            publish(open_samples, (request << 32) + total)
        if condition is not None:
            handle = tl.load(condition)
            if handle != 0:  # it is 0 until the graph with the node exists
                set_condition(handle, (total > 0).to(tl.int32))


@triton.jit
def publish(pointer, value):
    """Store an int64 for the host to see, after all that was stored before.

    A store does not wait for an answer, as an atomic over PCIe would. Triton has none that releases to the system.
    """
    if INTERPRETED:
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l", [tl.cast(pointer, tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@core.extern
def set_condition(handle, value, _semantic=None):
    """Set the value of a conditional node of the running CUDA graph (cudaGraphSetConditional, device runtime)."""
    symbols = {(core.dtype("int64"), core.dtype("int32")): ("cudaGraphSetConditional", core.dtype("int32"))}
    return core.extern_elementwise("", "", [handle, value], symbols, is_pure=False, _semantic=_semantic)
