"""How programs of one launch hand numbers to each other: through memory that is 0 until they are there."""

import triton
import triton.language as tl


@triton.jit
def send(pointer, value, mask):
    """Store float32 numbers, as int32, for a program that is waiting for them; none is stored as 0."""
    bits = value.to(tl.int32, bitcast=True)
    tl.store(pointer, tl.where(bits == 0, -(1 << 31), bits), mask=mask)  # 0.0 becomes -0.0


@triton.constexpr_function
def numbers_a_thread(numel, threads):
    """How many numbers of a block one thread waits for at a time."""
    return max(1, min(8, numel // threads))


@triton.constexpr_function
def rows_waited_for(rows, numel, threads):
    """Rows of ``numel`` numbers to wait for at a time, so that no thread is without one, though ``rows`` are needed.

    A load of fewer numbers than there are threads is one that Triton repeats for every layout that the numbers are used
    in, and what waits for them with it.
    """
    return max(rows, threads // numel)


@triton.constexpr_function
def waiting_loop(count):
    """PTX that loads those of ``count`` numbers that are 0 again until none is.

    Four that lie side by side are loaded at once while all are absent: a quarter of the traffic, which slows down those
    who are still to send.
    """
    numbers = range(count)
    lines = [
        "{",
        *(f".reg .pred absent{i};" for i in numbers),
        ".reg .pred some;",
        ".reg .b64 next;",
        *(f"mov.b32 ${i}, ${count + i};" for i in numbers),
    ]
    for first in range(0, count - 3, 4):
        value, place = [f"${first + i}" for i in range(4)], [f"${2 * count + first + i}" for i in range(4)]
        lines += [
            f"and.b64 next, {place[0]}, 15;",
            "setp.eq.u64 some, next, 0;",
            *(f"add.u64 next, {place[0]}, {4 * i}; setp.eq.and.u64 some, next, {place[i]}, some;" for i in (1, 2, 3)),
            *(f"setp.eq.and.b32 some, {one}, 0, some;" for one in value),
            f"@!some bra have{first};",
            f"again{first}:",
            f"ld.relaxed.gpu.global.v4.b32 {{{', '.join(value)}}}, [{place[0]}];",
            f"setp.eq.b32 some, {value[0]}, 0;",
            *(f"setp.eq.or.b32 some, {one}, 0, some;" for one in value[1:]),
            f"@some bra again{first};",
            f"have{first}:",
        ]
    return "\n".join([
        *lines,
        "again:",
        "setp.ne.b32 some, 0, 0;",
        *(f"setp.eq.b32 absent{i}, ${i}, 0;" for i in numbers),
        *(f"@absent{i} ld.relaxed.gpu.global.b32 ${i}, [${2 * count + i}];" for i in numbers),
        *(f"or.pred some, some, absent{i};" for i in numbers),
        "@some bra again;",
        "}",
    ])  # fmt: skip


@triton.constexpr_function
def waiting_operands(count):
    """What ``waiting_loop`` works on: the numbers it returns, as they were, and where they are."""
    return ",".join(["=&r"] * count + ["r"] * count + ["l"] * count)


@triton.jit
def awaited(pointer, mask, INTERPRETED: tl.constexpr):
    """Wait for what other programs ``send`` to zeroed memory, and take it; 0.0 where masked.

    Each number tells by itself that it has arrived, so that nobody needs a fence or an atomic, which would put two
    more trips to the L2 cache between the first store and the last load. Whoever knows that all have taken it puts the
    zeros back.
    """
    bits = tl.load(pointer, mask=mask, other=1, volatile=True)
    if not INTERPRETED:  # there, programs run one after the other
        COUNT: tl.constexpr = numbers_a_thread(bits.numel, tl.extra.cuda.num_threads())
        bits = tl.inline_asm_elementwise(
            waiting_loop(COUNT), waiting_operands(COUNT), [bits, tl.cast(pointer, tl.int64)],
            dtype=tl.int32, is_pure=False, pack=COUNT,
        )  # fmt: skip
    return tl.where(mask, bits.to(tl.float32, bitcast=True), 0.0)
