"""Compiles launches ahead in another process, then launches them here, and prints what that finds as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import os
from pathlib import Path

import torch
from auxhead.autotune.alone_head import AloneHead
from auxhead.autotune.compile_ahead import CompileAhead
from auxhead.kernels.compile_only import compile_only
from auxhead.model import FusedAuxHead


def kept() -> int:
    """Count what is in Triton's cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def main() -> None:
    """Compile two configurations ahead, and launch these and a third one."""
    x = torch.zeros(16, 64, 7, 7, dtype=torch.float16).to(memory_format=torch.channels_last)
    head = AloneHead(FusedAuxHead(64, 10, dtype=torch.float16), x)
    rule = head.shape.by_rule()
    configs = [rule, type(rule)(**{**vars(rule), "num_warps": 2})]
    counts = [kept()]
    with CompileAhead(90, 132) as ahead:
        ahead.begin(head, configs[:1])
        ahead.begin(head, configs)
        ahead.finish(head, configs)
        counts.append(kept())
    compile_only(90, 132)
    for config in (*configs, type(rule)(**{**vars(rule), "num_warps": 1})):
        head.launch(config)
        counts.append(kept())
    print(json.dumps(counts))


if __name__ == "__main__":  # the other process imports this module, too
    main()
