"""Triton function ``late_warps``: a delay within kernels, for mutants and for what they were before the change."""

import triton
import triton.language as tl


@triton.jit
def late_warps():
    """Let all warps but the first sleep some 20 us, in half of the programs, which are others in each launch."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred late, odd;
        .reg .b32 value, block;
        mov.u32 value, %globaltimer_lo;
        shr.b32 value, value, 10;
        mov.u32 block, %ctaid.x;
        add.u32 value, value, block;
        and.b32 value, value, 1;
        setp.eq.u32 odd, value, 1;
        mov.u32 value, %tid.x;
        setp.ge.and.u32 late, value, 32, odd;
        @late nanosleep.u32 20000;
        mov.u32 $0, 0;
        }""",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
