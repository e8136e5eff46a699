"""A rank that fails, dies, hangs or is unlike the others: all end within seconds, with the cause named."""

import pytest
import torch.distributed as dist
from support.launched_ranks import launch

pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.mark.parametrize(
    "function, cause",
    [
        ("dies", "rank 1 of 2 has died"),
        ("hangs_in_a_layer", "stage 1 of 2: a micro-batch took longer than 2 s"),
        ("other_parameters", "network: heads.0.linear.bias: rank 0 has torch.float32 [5]"),
        ("no_such_device", "device: got cuda:7, but torch sees 0 CUDA devices here"),
        ("cannot_be_traced", "network: torch.export cannot trace its backbone"),
        ("other_heads", "stage 1 of 2: heads['0']: its linear was given other hooks since the runner was made"),
        ("raises_while_another_waits_elsewhere", "of the user's"),
        ("ends_before_the_others", "this runner is closed on the first rank"),
    ],
)
def test_all_end_with_the_cause(tmp_path, function, cause):
    waits = function == "raises_while_another_waits_elsewhere"
    faults = dict.fromkeys(range(2) if waits else (), "leaves_after_2_seconds")
    ended = launch([tmp_path] * 2, [], faults=faults, main=f"support.pipeline_ranks:{function}")
    for rank, one in enumerate(ended):
        assert one.status != 0 and not one.output, f"rank {rank}: {one}"
        if one.status > 0:
            assert cause in " ".join(one.errors.split()), f"rank {rank}: {one}"
    killed = [rank for rank, one in enumerate(ended) if one.status < 0]
    assert killed == ([1] if function == "dies" else []), ended
