"""Triton function ``late_warps``: a delay within kernels, for mutants and for what they were before the change."""

import triton
import triton.language as tl


@triton.jit
def late_warps():
    """Let the first warp sleep some 10 us, or all others some 300, or none; that is drawn in each program anew.

    Others sleep longer, lest their program's part of an answer be there before the last program's first warp wakes.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred late, first, drawn;
        .reg .b32 thread, draw, block, time;
        mov.u32 draw, %globaltimer_lo;
        shr.b32 draw, draw, 10;
        mov.u32 block, %ctaid.x;
        add.u32 draw, draw, block;
        and.b32 draw, draw, 3;
        mov.u32 thread, %tid.x;
        setp.lt.u32 first, thread, 32;
        setp.eq.u32 drawn, draw, 1;
        and.pred late, first, drawn;
        setp.eq.u32 drawn, draw, 2;
        not.pred first, first;
        and.pred drawn, drawn, first;
        or.pred late, late, drawn;
        selp.u32 time, 300000, 10000, first;
        @late nanosleep.u32 time;
        mov.u32 $0, 0;
        }""",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
