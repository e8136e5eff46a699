"""Passes numbers between the programs of one launch, through memory that is 0 until one is there; and multiplies.

A launch that begins while the one before it ends waits here for all of that:
https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton for NVIDIA's GPUs
    gdc_wait = gdc_launch_dependents = None

#: Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1 when this module was imported).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(left, right, tile, PRECISION: tl.constexpr):
    """Add the product of two blocks to a tile, on tensor cores; the interpreter multiplies bfloat16 wrongly."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), tile, input_precision="ieee")
    else:
        return tl.dot(left, right, tile, input_precision=PRECISION)


@triton.jit
def send(pointer, value, mask):
    """Store float32 numbers as int32 for a program that waits for them; 0.0 as -0.0, since 0 means absent."""
    bits = value.to(tl.int32, bitcast=True)
    tl.store(pointer, tl.where(bits == 0, -(1 << 31), bits), mask=mask)  # 0.0 becomes -0.0


@triton.constexpr_function
def numbers_a_thread(numel, threads, most):
    """Return how many numbers of a block one thread waits for at a time."""
    return max(1, min(most, numel // threads))


@triton.constexpr_function
def rows_waited_for(rows, numel, threads):
    """Return how many rows of ``numel`` numbers to wait for: ``rows``, or as many as give every thread a number.

    Triton repeats a load of fewer numbers than threads, and the wait with it, for every layout they are used in.
    """
    return max(rows, threads // numel)


@triton.constexpr_function
def waiting_loop(count):
    """Return PTX that loads again, all at the same time, those of ``count`` numbers that are 0, until none is.

    Four that lie side by side and were all absent are loaded as one: a quarter of the traffic, which slows down the
    programs that still send. A number that was not absent may be masked, and must not be loaded.
    """
    # operands: from $0 on results, from ${count} on the numbers as first read, from ${2 count} on their addresses
    numbers, groups = range(count), range(count // 4)
    lines = [
        "{",
        *(f".reg .pred absent{i};" for i in numbers),
        *(f".reg .pred four{group};" for group in groups),
        ".reg .pred some, any;",
        ".reg .b64 next;",
        *(f"mov.b32 ${i}, ${count + i};" for i in numbers),
    ]
    values = [[f"${4 * group + i}" for i in range(4)] for group in groups]
    for group in groups:
        place, four = 2 * count + 4 * group, f"four{group}"
        lines += [f"and.b64 next, ${place}, 15;", f"setp.eq.u64 {four}, next, 0;"]
        for i in (1, 2, 3):
            lines += [f"add.u64 next, ${place}, {4 * i}; setp.eq.and.u64 {four}, next, ${place + i}, {four};"]
        lines += [f"setp.eq.and.b32 {four}, {one}, 0, {four};" for one in values[group]]
    if count >= 4:
        lines += ["fours:", "setp.ne.b32 any, 0, 0;"]
        for group in groups:
            first, *others = values[group]
            lines += [
                f"setp.eq.b32 some, {first}, 0;",
                *(f"setp.eq.or.b32 some, {one}, 0, some;" for one in others),
                f"and.pred some, some, four{group};",
                f"@some ld.relaxed.gpu.global.v4.b32 {{{', '.join(values[group])}}}, [${2 * count + 4 * group}];",
                "or.pred any, any, some;",
            ]
        lines += ["@any bra fours;"]
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
    """Return the constraints of ``waiting_loop``: numbers to return, numbers as first read, and their addresses."""
    return ",".join(["=&r"] * count + ["r"] * count + ["l"] * count)


@triton.jit
def seen(pointer, mask):
    """Read numbers that other programs ``send``: 0 where they are not there yet, for ``awaited``; masked ones are 1."""
    return tl.load(pointer, mask=mask, other=1, volatile=True)


@triton.jit
def as_float(bits, mask):
    """Return the float32 numbers that were sent; 0.0 where masked."""
    return tl.where(mask, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def awaited(bits, pointer, mask):
    """Wait for those of ``bits``, read by ``seen``, that were not there, and return all as float32; 0.0 where masked.

    Each number tells by itself that it has arrived, so that no fence or atomic is needed, which would put two more
    trips to the L2 cache between the first store and the last load. A program that knows that all have read the
    numbers puts the zeros back.
    """
    if not INTERPRETED:  # there, programs run one after the other
        COUNT: tl.constexpr = numbers_a_thread(bits.numel, tl.extra.cuda.num_threads(), 16)
        bits = tl.inline_asm_elementwise(
            waiting_loop(COUNT), waiting_operands(COUNT), [bits, tl.cast(pointer, tl.int64)],
            dtype=tl.int32, is_pure=False, pack=COUNT,
        )  # fmt: skip
    return as_float(bits, mask)


@triton.jit
def awaited_sum(bits, other_bits, pointer, other_pointer, mask):
    """Wait for two blocks at the same time, as ``awaited`` does for one, and return their sum.

    One after the other would take one more trip to the L2 cache: the second block as first read is out of date by then.
    """
    if not INTERPRETED:
        COUNT: tl.constexpr = numbers_a_thread(bits.numel, tl.extra.cuda.num_threads(), 8)
        bits, other_bits = tl.inline_asm_elementwise(
            waiting_loop(2 * COUNT), waiting_operands(2 * COUNT),
            [bits, other_bits, tl.cast(pointer, tl.int64), tl.cast(other_pointer, tl.int64)],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=COUNT,
        )  # fmt: skip
    return as_float(bits, mask) + as_float(other_bits, mask)


@triton.jit
def wait_for_samples(arrived, off_n, mask_n, COUNT: tl.constexpr):
    """Wait until COUNT programs have arrived at each sample; then what they stored before may be read."""
    count = tl.load(arrived + off_n, mask=mask_n, other=COUNT, volatile=True)
    while tl.min(count, axis=0) < COUNT:
        count = tl.load(arrived + off_n, mask=mask_n, other=COUNT, volatile=True)
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,r", [count], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def await_launch_before(EARLY_START: tl.constexpr):
    """Wait until what launches before this one wrote can be read; then let the next launch come as far as this line.

    It stands before the first read and the first write. As the next one waits for all of this launch, which has waited
    for all before it, nothing is read too early, nor overwritten, however many launches follow each other so.
    """
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()
