"""Machine code of compiled kernels as text."""

import subprocess
from typing import Any

import triton


def written(kernel: Any) -> str:
    """Write a kernel's machine code to a file of the working directory, and return its path."""
    path = f"{kernel.hash}.cubin"
    with open(path, "wb") as file:
        file.write(kernel.asm["cubin"])
    return path


def disassembled(kernel: Any) -> str:
    """Return machine code as text, which takes a third of a second: without the analysis of data flow, a quarter."""
    listing = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", written(kernel)]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout
