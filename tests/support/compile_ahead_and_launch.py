"""Script: compiles launches ahead in other processes, then launches, prints the sizes of Triton's cache as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from auxhead.autotune.measuring.compile_ahead import (
    AloneLaunch,
    CompileAhead,
    HeadDescription,
    NetworkLaunches,
    TensorDescription,
)
from auxhead.autotune.measuring.heads_alone import AloneHead, launch_heads
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.compile_only import compile_only
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.model import FusedAuxHead


def kept() -> int:
    """Count what is in Triton's cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def main() -> None:
    """Compile ahead two ways to launch a head alone and one beside another, then launch these and others."""
    x = torch.zeros(16, 64, 7, 7, dtype=torch.float16).to(memory_format=torch.channels_last)
    head = AloneHead(FusedAuxHead(64, 10, dtype=torch.float16), x)
    rule = config_by_rule(head.shape)
    configs = [rule, replace(rule, num_warps=2)]
    alone = [AloneLaunch(HeadDescription.of(head), config) for config in configs]
    logits = torch.zeros(16, 10, dtype=torch.float16)
    beside = {(head.shape, "network"): configs[1]}
    last = frozenset({1, 2})
    network = NetworkLaunches(
        2 * (HeadDescription.of(head),), TensorDescription.of(logits), (0,), last, tuple(beside.items())
    )
    counts = [kept()]
    with CompileAhead(90) as ahead:
        ahead.begin(alone[:1])
        ahead.begin([*alone, network])
        ahead.finish([*alone, network])
        counts.append(kept())
    compile_only(90)
    with overriding(beside):
        # first, as in a sweep's process, though the heads alone were compiled first
        launch_heads([head, head, logits], (0,), last)
        for config in configs:
            head.launch(config)
        counts.append(kept())
        launch_heads([head, head, logits], (0,), {0})
        counts.append(kept())
    head.launch(replace(rule, num_warps=1))
    print(json.dumps([*counts, kept()]))


if __name__ == "__main__":  # the other process imports this module, too
    main()
