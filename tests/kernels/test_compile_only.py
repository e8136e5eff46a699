"""compile_only.py: kernels compile for GPUs that are not here, and their machine code is as wanted."""

import pytest
from support.compiler_process import printed

#: How often a head of each kind waits for what others send.
WAITS = {
    "one program a sample": 0,
    "split, the last to arrive adds up": 0,
    "split, the last one waits": 1,
    "tiles of a sample": 2,
    "tiles of 16 samples": 2,
    "tiles of 16 samples, weight in shared memory": 2,
    "tiles that share the features": 2,
    "few programs for all": 2,
    "tiles of 16 samples, maps in 4 parts": 3,
}


#: Kilobytes of shared memory that a program may have, by compute capability: of A100, B200, RTX 5090 (as of L4 and RTX
#: 4090; CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_KB = {"80": 163, "100": 227, "120": 99}


def test_heads_compile_for_gpus_they_were_not_measured_on(tmp_path):
    """As the rule launches them, which knows an H200 alone."""
    made = printed("compile_by_rule.py", tmp_path, *SHARED_KB)
    assert made.keys() == SHARED_KB.keys()
    for capability, kilobytes in SHARED_KB.items():
        shared = made[capability].values()
        assert len(shared) == 8 and 0 < max(shared) <= 1024 * kilobytes, capability


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return printed("compile_every_way.py", tmp_path_factory.mktemp("cubin"))


@pytest.mark.parametrize("heads", [1, 2])
def test_every_way_to_launch_a_head(kernels, heads):
    """Triton may repeat a wait for each layout that its numbers are used in: right, but several times as slow."""
    for way in WAITS:
        made = kernels[f"{way}, {heads} of them"]
        assert made["waits"] == heads * WAITS[way]
        assert made["REG"] <= 128 and made["STACK"] <= 64, "or no two programs of 8 warps fit on a multiprocessor"


def test_heads_under_patience_compile(kernels):
    assert kernels["under patience"]["REG"] <= 128 and kernels["under patience"]["STACK"] <= 64


@pytest.mark.parametrize("heads", [1, 2])
def test_the_weight_is_read_ahead_into_shared_memory(kernels, heads):
    copies = [
        kernels[f"tiles of 16 samples{more}, {heads} of them"]["copies"] for more in ("", ", weight in shared memory")
    ]
    assert copies[1] >= copies[0] + 3 * heads, "for two steps before the loop and one in it"


@pytest.mark.parametrize("heads", [1, 2])
def test_no_warp_is_left_in_pieces(kernels, heads):
    for way in WAITS:
        assert kernels[f"{way}, {heads} of them"]["torn warps"] == 0


def test_every_way_is_compiled(kernels):
    named = {name for name in kernels if "recorded" not in name and name != "under patience"}
    assert named == {f"{way}, {heads} of them" for way in WAITS for heads in (1, 2)}


def test_only_what_is_recorded_reads_the_clock(kernels):
    """At its start and end, and the multiprocessor: nobody pays for residency who has not asked for it."""
    recorded = {name for name in kernels if "recorded" in name}
    assert len(recorded) == 2
    assert {name: made["clocks"] for name, made in kernels.items()} == {
        name: 3 * (name in recorded) for name in kernels
    }
