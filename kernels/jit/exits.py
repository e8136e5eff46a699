"""Triton kernel of a network's exits: one launch runs successive heads and merges their answers per sample.

A place is an exit index: the heads from 0, and last the network's own classifier. A launch covers successive places.
Each of its heads writes its output for every sample; the last program of a sample to finish then gives the sample the
answer of the first place that is sure, unless an earlier launch has answered already. The last program of all knows
how many samples stay open, and can tell the host (a number in pinned memory) or the graph (a conditional node).
"""

import triton
import triton.language as tl
from triton.language import core

from .criteria import TALLY_BINS
from .decide import decide
from .hand_over import INTERPRETED
from .head import head_program, read_rule
from .residency import clock, record_turn


@core.extern
def set_condition(handle, value, _semantic=None):
    """Set the value of a conditional node of the running CUDA graph (cudaGraphSetConditional, device runtime)."""
    symbols = {(core.dtype("int64"), core.dtype("int32")): ("cudaGraphSetConditional", core.dtype("int32"))}
    return core.extern_elementwise("", "", [handle, value], symbols, is_pure=False, _semantic=_semantic)


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


@triton.jit
def heads_in_a_row(count, before, label, confidence):
    """Count one more head: how many in a row, ending with it, gave its label, and that; see reference/merge.py."""
    said = tl.where(confidence == confidence, label, -1)
    return tl.where(said == before, count + 1.0, 1.0), said


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
                sure = place_confidence > tl.load(patience[i])
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
    open_samples, requests, condition = told
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
def place_program(pid, place, output, N, i: tl.constexpr, LAUNCH: tl.constexpr):
    """Do the work of program ``pid`` if it is of this place; returns whether it decided about a sample, and which."""
    CONFIG: tl.constexpr = LAUNCH.places[i]
    PLACE: tl.constexpr = LAUNCH.first + i
    K: tl.constexpr = LAUNCH.classes
    probs, label, confidence, exits = output
    label += PLACE * N
    confidence += PLACE * N
    exits += PLACE * N
    if probs is not None:
        probs += tl.cast(PLACE, tl.int64) * N * K
    output = (probs, label, confidence, exits)
    pid_n = 0
    decided = False
    if CONFIG.is_fused and len(LAUNCH.places) == 1:  # all programs are its own
        decided, pid_n = head_program(pid, place, output, N, CONFIG)
    elif CONFIG.is_fused:
        number = number_in_head(pid, place[6], N, CONFIG)
        if number >= 0:
            decided, pid_n = head_program(number, place, output, N, CONFIG)
    else:
        given, rule, start = place
        logits, stride_ln, stride_lk = given
        if (pid >= start) & (pid < start + N):
            pid_n = pid - start
            decided = True
            decide(
                None, (logits, 0, stride_ln, stride_lk, K, 1), (None, 0), read_rule(rule), output,
                pid_n + tl.arange(0, 1), N, K, CONFIG.criterion, False, 1, LAUNCH.block_j,
            )  # fmt: skip
    return decided, pid_n


@triton.jit
def number_in_head(pid, starts, N, CONFIG: tl.constexpr):
    """Return which program of a head ``pid`` is, or -1; ``starts``: the launch's first programs of its stages."""
    first_pool, first_tile, first_decision = starts
    pools = N * CONFIG.splits
    number = tl.where((pid >= first_pool) & (pid < first_pool + pools), pid - first_pool, -1)
    if CONFIG.tiled:
        tiles = tl.cdiv(N, CONFIG.block_n) * CONFIG.tiles
        number = tl.where((pid >= first_tile) & (pid < first_tile + tiles), pools + pid - first_tile, number)
        number = tl.where(
            (pid >= first_decision) & (pid < first_decision + N), pools + tiles + pid - first_decision, number
        )  # fmt: skip
    return number


@triton.jit
def exit_program(
    pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH: tl.constexpr
):  # fmt: skip
    """Do the work of program ``pid``; see exit_kernel for the arguments."""
    HEADS: tl.constexpr = len(LAUNCH.places)
    pid_n = 0
    merges = False
    for i in tl.static_range(HEADS):
        decided, sample = place_program(pid, places[i], output, N, i, LAUNCH)
        if decided:
            pid_n = sample
        merges |= decided
    if LAUNCH.merges:
        merge_sample(pid_n, merges, output, answer, valid, counters, told, tallies, patience, N, LAUNCH)


@triton.jit
def merge_sample(
    pid_n, merges, output, answer, valid, counters, told, tallies, patience, N, LAUNCH: tl.constexpr
):  # fmt: skip
    """Merge the answers for sample ``pid_n``, if this program decided about it and is the last one that did."""
    HEADS: tl.constexpr = len(LAUNCH.places)
    joined, tally, _ = counters
    open_samples, _, condition = told
    off_n = pid_n + tl.arange(0, 1)
    mask_n = off_n < N
    is_open = mask_n
    if merges:
        # read before waiting for the other heads
        if LAUNCH.first == 0:
            is_open = off_n < tl.load(valid)  # padding of the batch is never open
        else:
            is_open = tl.load(answer[3] + off_n, mask=mask_n, other=0) < 0
        tl.debug_barrier()
        if HEADS > 1:
            merges = tl.atomic_add(joined + pid_n, 1, sem="acq_rel", scope="gpu") == HEADS - 1
    if merges:
        if HEADS > 1:
            tl.store(joined + pid_n, 0)
        still_open = merge(output, answer, tallies, patience, is_open, off_n, N, LAUNCH)
        if open_samples is not None or condition is not None:
            tl.debug_barrier()
            tell(still_open, tally, told, N, LAUNCH)


@triton.jit
def draw_ticket(tickets, last):
    """Return the next piece of work that nobody has begun; ``tickets`` is 0 before, and after ticket ``last``."""
    ticket = tl.atomic_add(tickets, 1)
    # No branch: before one, ptxas 12.8 may leave the thread that drew behind the others of its warp, for good. What a
    # warp does as one is then done twice, such as counting the turns of a loop, of which half are missing.
    tl.store(tickets, 0, mask=ticket == last)
    return ticket


@triton.jit
def exit_kernel(
    places,  # a tuple a place: HeadArguments, or logits and strides, temperature and threshold or None, first program
    output,  # of the places: probabilities [PLACES, N, K] or None; label, confidence, exits [PLACES, N]
    answer,  # the network's: probabilities [N, K] or None, label, confidence, exit [N]; here and below None unless
    # LAUNCH.merges
    valid,  # [1] int32: the first samples of the batch, which are no padding
    counters,  # joined [N] int32, tally [1] int64 of merged and open samples; tickets [1] int32; 0 before and after
    told,  # open samples [1] int64 in pinned memory or None, requests so far [1] int64, handle of a condition or None
    tallies,  # [PLACES, TALLY_BINS] int64: answers of each place so far, by their confidence, or None
    patience,  # if LAUNCH.patient by head the threshold [1] if it exits under patience, else None
    total,  # pieces of work, one a program; if bounded there are fewer programs, which go on until all is done
    residency,  # [total, 3] int64: see ``residency``, or None
    N,
    LAUNCH: tl.constexpr,  # LaunchConstants
):
    """Run the heads of a launch and merge; see the module's docstring and ExitLaunch, which sizes all."""
    if residency is not None:
        start = clock()
    if LAUNCH.bounded:
        tickets = counters[2]
        last_ticket = tl.num_programs(0) - 1 + total
        pid = draw_ticket(tickets, last_ticket)
        while pid < total:
            exit_program(pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH)
            if residency is not None:
                start = record_turn(residency, pid, start)
            pid = draw_ticket(tickets, last_ticket)
    else:
        pid = tl.program_id(0)
        exit_program(pid, places, output, answer, valid, counters, told, tallies, patience, N, LAUNCH)
        if residency is not None:
            record_turn(residency, pid, start)
