"""Triton kernel of a network's exits: one launch runs successive heads and merges their answers per sample.

A place is an exit index: the heads from 0, and last the network's own classifier. A launch covers successive places.
Each of its heads writes its output for every sample; the last program of a sample to finish then gives the sample the
answer of the first place that is sure, unless an earlier launch has answered already. The last program of all knows
how many samples stay open, and can tell the host (a number in pinned memory) or the graph (a conditional node).
"""

import triton
import triton.language as tl
from triton.language import core

from .criteria import MAX_PROB, TALLY_BINS
from .head_stages import decide, draw_ticket, head_program
from .residency import clock, record_turn


@core.extern
def set_condition(handle, value, _semantic=None):
    """Set the value of a conditional node of the running CUDA graph (cudaGraphSetConditional, device runtime)."""
    symbols = {(core.dtype("int64"), core.dtype("int32")): ("cudaGraphSetConditional", core.dtype("int32"))}
    return core.extern_elementwise("", "", [handle, value], symbols, is_pure=False, _semantic=_semantic)


@triton.jit
def publish(pointer, value, INTERPRETED: tl.constexpr):
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


@triton.jit
def heads_in_a_row(count, before, label, confidence):
    """Count one more head: how many in a row, ending with it, gave its label, and that; see reference/merge.py."""
    said = tl.where(confidence == confidence, label, -1)
    return tl.where(said == before, count + 1.0, 1.0), said


@triton.jit
def merge(
    probs, label, confidence, exits,  # [PLACES, N, K], [PLACES, N]
    answer_probs, answer_label, answer_confidence, answer_exit,  # [N, K], [N]
    tallies,  # [PLACES, TALLY_BINS] int64, or None
    patience,  # by head its threshold, or None under another criterion; read if PATIENT
    is_open, off_n, mask_n, N, K,
    PLACE: tl.constexpr, HEADS: tl.constexpr, LAST: tl.constexpr, PATIENT: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Answer for the samples that are open from places PLACE to PLACE + HEADS; returns how many stay open."""
    chosen = tl.full((off_n.shape[0],), -1, tl.int32)
    chosen_label = tl.zeros((off_n.shape[0],), tl.int64)
    chosen_confidence = tl.zeros((off_n.shape[0],), tl.float32)
    if PATIENT:
        count = tl.zeros((off_n.shape[0],), tl.float32)
        before = tl.full((off_n.shape[0],), -1, tl.int64)
        for place in tl.static_range(PLACE):  # what earlier launches of this request have written
            source = place * N + off_n
            said = tl.load(label + source, mask=mask_n, other=0, cache_modifier=".cg")
            how_sure = tl.load(confidence + source, mask=mask_n, other=0, cache_modifier=".cg")
            count, before = heads_in_a_row(count, before, said, how_sure)
    for i in tl.static_range(HEADS):  # all are read at once, whichever is chosen; .cg: other SMs wrote them
        source = (PLACE + i) * N + off_n
        place_label = tl.load(label + source, mask=mask_n, other=0, cache_modifier=".cg")
        place_confidence = tl.load(confidence + source, mask=mask_n, other=0, cache_modifier=".cg")
        if LAST and i == HEADS - 1:
            sure = mask_n
        else:
            sure = tl.load(exits + source, mask=mask_n, other=0, cache_modifier=".cg") != 0
        if PATIENT:
            count, before = heads_in_a_row(count, before, place_label, place_confidence)
            if patience[i] is not None:
                place_confidence = tl.where(place_confidence == place_confidence, count, place_confidence)
                sure = place_confidence > tl.load(patience[i])
        first = (chosen < 0) & sure
        chosen = tl.where(first, PLACE + i, chosen)
        chosen_label = tl.where(first, place_label, chosen_label)
        chosen_confidence = tl.where(first, place_confidence, chosen_confidence)
    answers = is_open & (chosen >= 0)
    tl.store(answer_label + off_n, chosen_label, mask=answers)
    tl.store(answer_confidence + off_n, chosen_confidence, mask=answers)
    if PLACE == 0:
        tl.store(answer_exit + off_n, tl.where(is_open, chosen, 0).to(tl.int64), mask=mask_n)
    else:
        tl.store(answer_exit + off_n, chosen.to(tl.int64), mask=answers)
    if tallies is not None:
        share = tl.where(chosen_confidence == chosen_confidence, chosen_confidence, 0.0)
        of_bin = tl.minimum(tl.maximum(share * TALLY_BINS, 0.0), TALLY_BINS - 1.0).to(tl.int32)
        tl.atomic_add(tallies + tl.maximum(chosen, 0) * TALLY_BINS + of_bin, 1, mask=answers, sem="relaxed")
    source = tl.maximum(chosen, 0) * N + off_n
    if answer_probs is not None:
        for start_k in range(0, K, BLOCK_J):
            off_j = start_k + tl.arange(0, BLOCK_J)
            mask = answers[:, None] & (off_j < K)[None, :]
            row = tl.load(probs + source.to(tl.int64)[:, None] * K + off_j[None, :], mask=mask, cache_modifier=".cg")
            tl.store(answer_probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :], row, mask=mask)
    return tl.sum((is_open & (chosen < 0)).to(tl.int64), axis=0)


@triton.jit
def place_program(
    pid, head, probs, label, confidence, exits, N, K,
    CONFIGS: tl.constexpr, HEAD: tl.constexpr, PLACE: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Do the work of program ``pid`` if it is of this place; returns whether it decided about a sample, and which."""
    pid_n = 0
    decided = False
    label += PLACE * N
    confidence += PLACE * N
    exits += PLACE * N
    if probs is not None:
        probs += tl.cast(PLACE, tl.int64) * N * K
    if CONFIGS[HEAD] is None:  # the classifier's logits are there
        logits, stride_ln, stride_lk, start = head
        if (pid >= start) & (pid < start + N):
            pid_n = pid - start
            decided = True
            off_n = pid_n + tl.arange(0, 1)
            decide(
                tl.zeros((1, BLOCK_J), tl.float32), logits, 0, stride_ln, stride_lk, None, 0, 1.0, 1.0,
                probs, label, confidence, exits, off_n, off_n < N, K, K, 1,
                False, False, INTERPRETED, 1, BLOCK_J, BLOCK_J >= K, MAX_PROB,
            )  # fmt: skip
    elif len(CONFIGS[HEAD]) == 1:  # the logits of a head that is a module of its own, and the head's rule
        logits, stride_ln, stride_lk, temperature, threshold, start = head
        if (pid >= start) & (pid < start + N):
            pid_n = pid - start
            decided = True
            off_n = pid_n + tl.arange(0, 1)
            decide(
                tl.zeros((1, BLOCK_J), tl.float32), logits, 0, stride_ln, stride_lk, None, 0,
                tl.load(temperature), tl.load(threshold),
                probs, label, confidence, exits, off_n, off_n < N, K, K, 1,
                False, False, INTERPRETED, 1, BLOCK_J, BLOCK_J >= K, CONFIGS[HEAD][0],
            )  # fmt: skip
    else:
        (
            x, stride_xn, stride_xc, stride_xh, stride_xw, weight, stride_wk, stride_wf, bias, stride_bk,
            temperature, threshold, features, partial, arrived,
            C, H, W, GRID_H, GRID_W, WINDOW_H, WINDOW_W, first_pool, first_tile, first_decision, norm, last,
        ) = head  # fmt: skip
        ROWS: tl.constexpr = CONFIGS[HEAD][18]  # K, or of a head with a hidden layer its features
        pools = N * CONFIGS[HEAD][15]
        number = tl.where((pid >= first_pool) & (pid < first_pool + pools), pid - first_pool, -1)
        if CONFIGS[HEAD][6] > 1:  # tiled
            tiles = tl.cdiv(N, CONFIGS[HEAD][2]) * tl.cdiv(ROWS, CONFIGS[HEAD][7]) * CONFIGS[HEAD][8]
            number = tl.where((pid >= first_tile) & (pid < first_tile + tiles), pools + pid - first_tile, number)
            number = tl.where(
                (pid >= first_decision) & (pid < first_decision + N), pools + tiles + pid - first_decision, number
            )
        if number >= 0:
            decided, pid_n = head_program(
                number, x, stride_xn, stride_xc, stride_xh, stride_xw, weight, stride_wk, stride_wf,
                bias, stride_bk, temperature, threshold, probs, label, confidence, exits, features, partial, arrived,
                N, C, H, W, ROWS, GRID_H, GRID_W, WINDOW_H, WINDOW_W, CONFIGS[HEAD][15],
                CONFIGS[HEAD][0], CONFIGS[HEAD][1], INTERPRETED, True, True,
                CONFIGS[HEAD][2], CONFIGS[HEAD][3], CONFIGS[HEAD][4], CONFIGS[HEAD][5], CONFIGS[HEAD][6],
                CONFIGS[HEAD][7], CONFIGS[HEAD][8], CONFIGS[HEAD][9], CONFIGS[HEAD][10], CONFIGS[HEAD][11],
                CONFIGS[HEAD][12], CONFIGS[HEAD][13], CONFIGS[HEAD][14], CONFIGS[HEAD][16], CONFIGS[HEAD][17],
                CONFIGS[HEAD][20], CONFIGS[HEAD][21], norm, last, K, CONFIGS[HEAD][19],
            )  # fmt: skip
    return decided, pid_n


@triton.jit
def exit_program(
    pid, heads, probs, label, confidence, exits, answer_probs, answer_label, answer_confidence, answer_exit,
    valid, joined, tally, open_samples, requests, condition, tallies, patience, N, K,
    CONFIGS: tl.constexpr, PLACE: tl.constexpr, LAST: tl.constexpr, PATIENT: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Do the work of program ``pid``; see exit_kernel for the arguments."""
    HEADS: tl.constexpr = len(CONFIGS)
    pid_n = 0
    merges = False
    for i in tl.static_range(HEADS):
        decided, sample = place_program(
            pid, heads[i], probs, label, confidence, exits, N, K,
            CONFIGS, i, PLACE + i, INTERPRETED, BLOCK_J,
        )  # fmt: skip
        if decided:
            pid_n = sample
        merges |= decided

    off_n = pid_n + tl.arange(0, 1)
    mask_n = off_n < N
    is_open = mask_n
    if merges:
        # read before waiting for the other heads
        if PLACE == 0:
            is_open = off_n < tl.load(valid)  # padding of the batch is never open
        else:
            is_open = tl.load(answer_exit + off_n, mask=mask_n, other=0) < 0
        tl.debug_barrier()
        if HEADS > 1:
            merges = tl.atomic_add(joined + pid_n, 1, sem="acq_rel", scope="gpu") == HEADS - 1
    if merges:
        if HEADS > 1:
            tl.store(joined + pid_n, 0)
        still_open = merge(
            probs, label, confidence, exits, answer_probs, answer_label, answer_confidence, answer_exit,
            tallies, patience, is_open, off_n, mask_n, N, K, PLACE, HEADS, LAST, PATIENT, BLOCK_J,
        )  # fmt: skip
        if open_samples is not None or condition is not None:
            # one number counts merged samples (above) and open ones (below), so that the last program knows both
            tl.debug_barrier()
            if N == 1:
                before = tl.zeros((), tl.int64)
            else:
                before = tl.atomic_add(tally, still_open + (1 << 32), sem="acq_rel", scope="gpu")
            if (before >> 32) == N - 1:
                if N != 1:
                    tl.store(tally, tl.zeros((), tl.int64))
                total = (before & 0xFFFFFFFF) + still_open
                if open_samples is not None:
                    request = tl.load(requests)
                    if PLACE == 0:
                        request += 1
                        tl.store(requests, request)
                    tl.debug_barrier()
                    publish(open_samples, (request << 32) + total, INTERPRETED)
                if condition is not None:
                    handle = tl.load(condition)
                    if handle != 0:  # it is 0 until the graph with the node exists
                        set_condition(handle, (total > 0).to(tl.int32))


@triton.jit
def exit_kernel(
    heads,  # a tuple a place: tensors and sizes for head_program, first program of each stage; or logits and a rule
    probs, label, confidence, exits,  # outputs of the places: [PLACES, N, K] or None, [PLACES, N]
    answer_probs, answer_label, answer_confidence, answer_exit,  # the network's answer: [N, K] or None, [N]
    valid,  # [1] int32: the first samples of the batch, which are no padding
    joined,  # [N] int32, 0 before and after
    tally,  # [1] int64, 0 before and after
    tickets,  # [1] int32, 0 before and after
    open_samples,  # [1] int64 in pinned memory, or None
    requests,  # [1] int64: requests so far
    condition,  # [1] int64: handle of a conditional node, or None
    tallies,  # [PLACES, TALLY_BINS] int64: answers of each place so far, by their confidence, or None
    patience,  # if PATIENT a tuple: by head the threshold [1] if it exits under patience, else None
    total,  # pieces of work, one a program; if BOUNDED there are fewer programs, which go on until all is done
    residency,  # [total, 3] int64: see ``residency``, or None
    N, K: tl.constexpr,
    CONFIGS: tl.constexpr,
    PLACE: tl.constexpr, LAST: tl.constexpr, PATIENT: tl.constexpr, BOUNDED: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Run the heads of a launch and merge; see the module's docstring and ExitLaunch, which sizes all."""
    if residency is not None:
        start = clock(INTERPRETED)
    if BOUNDED:
        last_ticket = tl.num_programs(0) - 1 + total
        pid = draw_ticket(tickets, last_ticket)
        while pid < total:
            exit_program(
                pid, heads, probs, label, confidence, exits, answer_probs, answer_label, answer_confidence, answer_exit,
                valid, joined, tally, open_samples, requests, condition, tallies, patience, N, K,
                CONFIGS, PLACE, LAST, PATIENT, INTERPRETED, BLOCK_J,
            )  # fmt: skip
            if residency is not None:
                start = record_turn(residency, pid, start, INTERPRETED)
            pid = draw_ticket(tickets, last_ticket)
    else:
        pid = tl.program_id(0)
        exit_program(
            pid, heads, probs, label, confidence, exits, answer_probs, answer_label, answer_confidence, answer_exit,
            valid, joined, tally, open_samples, requests, condition, tallies, patience, N, K,
            CONFIGS, PLACE, LAST, PATIENT, INTERPRETED, BLOCK_J,
        )  # fmt: skip
        if residency is not None:
            record_turn(residency, pid, start, INTERPRETED)
