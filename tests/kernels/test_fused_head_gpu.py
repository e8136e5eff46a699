"""fused_head.py on a GPU: one kernel a call, sizes too slow elsewhere, offsets beyond int32, rules on the device."""

import dataclasses

import pytest
import torch
from auxhead.kernels import fused_head
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.noted import noting
from support.gpu_work import work_on_the_gpu
from support.head_cases import (
    DTYPES,
    assert_output_form,
    assert_same_bits,
    check_head,
    make_head,
    make_input,
    make_linear,
    readable,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS = {
    "nchw": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slice": lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, ::2, ::2],
}


def assert_one_kernel(head, tmp_path, **options):
    """The call is right, and one kernel's, or two where one packs the features."""
    with noting() as launches:
        check_head(*head, **options)
    packs = ["pack_kernel"] * (len(launches) - 1)
    assert work_on_the_gpu(lambda: fused_head(*head, **options), tmp_path) == [*packs, "exit_kernel"]


def rules(kind):
    if kind == "floats":
        return {"temperature": 1.5, "threshold": 0.25}
    return {"temperature": torch.tensor(1.5, device="cuda"), "threshold": torch.tensor(0.25, device="cuda")}


#: Map, tokens and vectors; groups of samples; more classes than a block.
ONE_KERNEL = [((2, 64, 14, 14), 10), ((60, 512, 7, 7), 1000), ((16, 50, 192), 2), ((32, 100), 32000)]


@pytest.mark.parametrize("kind", ["floats", "tensors"])
@pytest.mark.parametrize("shape, classes", ONE_KERNEL, ids=readable)
def test_one_kernel(shape, classes, kind, tmp_path):
    for dtype in DTYPES.values():
        assert_one_kernel(make_head(shape, classes, dtype=dtype, device="cuda"), tmp_path, **rules(kind))


@pytest.mark.parametrize("pool, size", [("avg", 3), ("max", (2, 3)), ("none", 1)])
def test_one_kernel_for_a_slice(pool, size, tmp_path):
    x, *head = make_head((2, 64, 14, 14), 10, pool=pool, pool_size=size, device="cuda")
    assert_one_kernel((LAYOUTS["slice"](x), *head), tmp_path, pool=pool, pool_size=size)


@pytest.mark.parametrize("options", [{"return_probs": False}, {"bias": None}], ids=["no_probs", "no_bias"])
def test_one_kernel_for_a_head_with_less(options, tmp_path):
    x, weight, bias = make_head((8, 64, 14, 14), 10, device="cuda")
    options = {"bias": bias, **options}
    assert work_on_the_gpu(lambda: fused_head(x, weight, **options), tmp_path) == ["exit_kernel"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("samples", [1, 32])
def test_200704_features(samples, layout):
    """The first block of ResNet-18, flattened."""
    for dtype in DTYPES.values():
        x, weight, bias = make_head((samples, 64, 56, 56), 10, pool="none", dtype=dtype, device="cuda")
        out = check_head(layout(x), weight, bias, pool="none")
        assert_same_bits(out, fused_head(layout(x), weight, bias, pool="none", threshold=0.5))


@pytest.mark.parametrize("tap", [(64, 56), (128, 28), (256, 14), (512, 7)], ids=readable)
@pytest.mark.parametrize("samples", [1, 8, 32, 128])
def test_taps_of_resnet18(samples, tap):
    for dtype in DTYPES.values():
        channels, side = tap
        for classes in (10, 1000):
            x, weight, bias = make_head((samples, channels, side, side), classes, dtype=dtype, device="cuda")
            check_head(x, weight, bias)
            check_head(LAYOUTS["channels_last"](x), weight, bias)


@pytest.mark.parametrize("classes", [3, 200])
def test_70000_vectors(classes):
    check_head(*make_head((70_000, 16), classes, dtype=torch.float16, device="cuda"))


def test_offsets_beyond_int32_in_x():
    """Samples 2**31 elements apart."""
    memory = torch.empty(2**31 + 2000, dtype=torch.float16, device="cuda")
    memory.fill_(float("nan"))
    x = memory.as_strided((2, 20, 5, 7), (2**31, 70, 14, 2))
    x.copy_(make_input((2, 20, 5, 7), device="cuda"))
    for pool, size, features in (("avg", 1, 20), ("max", 3, 180), ("none", 1, 700)):
        check_head(x, *make_linear(features, 10, dtype=torch.float16, device="cuda"), pool=pool, pool_size=size)


@pytest.mark.usefixtures("tiles_from_7")
@pytest.mark.parametrize("samples", [2, 16])
def test_offsets_beyond_int32_in_weight(samples):
    """Rows of the weight 2**30 elements apart, and columns as far in another one."""
    x, weight, bias = make_head((samples, 40), 3, dtype=torch.float16, device="cuda")
    memory = torch.full((2**31 + 2000,), float("nan"), dtype=torch.float16, device="cuda")
    rows = memory.as_strided((3, 40), (2**30, 1))
    rows.copy_(weight)
    check_head(x, rows, bias)
    x, weight, bias = make_head((samples, 3), 40, dtype=torch.float16, device="cuda")
    memory.fill_(float("nan"))
    columns = memory.as_strided((40, 3), (1, 2**30))
    columns.copy_(weight)
    check_head(x, columns, bias)


def test_a_long_map_flattened_in_strides():
    """Window bounds are products of a position and a size, which for 50,000 columns leave int32."""
    columns = 50_000
    x, weight, bias = make_head((1, 2, 1, columns + 1), 2, pool="none", device="cuda")
    weight = weight.reshape(2, 2, columns + 1)[..., :columns].reshape(2, 2 * columns)
    check_head(x[..., :columns], weight, bias, pool="none")


DETERMINISM = {
    "map": ((8, 64, 56, 56), 1000, {}),
    "groups": ((64, 512, 7, 7), 1000, {}),
    "flattened": ((2, 64, 56, 56), 10, {"pool": "none"}),
    "grid": ((8, 256, 14, 14), 100, {"pool": "max", "pool_size": 3}),
    "many classes": ((4, 512, 7, 7), 32000, {}),
}


@pytest.mark.parametrize("shape, classes, pooling", DETERMINISM.values(), ids=DETERMINISM)
def test_fifty_runs_are_the_same_bit_for_bit(shape, classes, pooling):
    for dtype in DTYPES.values():
        head = make_head(shape, classes, dtype=dtype, device="cuda", **pooling)
        first = check_head(*head, **pooling)
        for _ in range(50):
            assert_same_bits(first, fused_head(*head, threshold=0.5, **pooling))


@pytest.mark.usefixtures("tiles_from_7")
@pytest.mark.parametrize("samples", [2, 17])
@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, float("nan"), -float("inf")])
def test_no_sample_exits_under_a_temperature_that_is_not_positive(temperature, samples):
    """The host does not read a tensor on the GPU, and so cannot refuse it."""
    head = make_head((samples, 40), 10, device="cuda")
    out = fused_head(*head, temperature=torch.tensor(temperature, device="cuda"), threshold=0.0)
    assert_output_form(out, samples, 10, head[0].device)
    assert not out.exit.any()


def test_no_sample_exits_at_a_threshold_that_is_nan():
    head = make_head((5, 40), 10, device="cuda")
    assert not fused_head(*head, threshold=torch.tensor(float("nan"), device="cuda")).exit.any()


FEW_PROGRAMS = {
    "split": LaunchConfig(1, 32, 1, 64, 1, 256, 8, 1024, 1, stages=1, num_warps=8),
    "tiles of a sample": LaunchConfig(1, 16, 1, 64, 512, 16, 1, 1024, 1, stages=1, num_warps=8),
    "tiles that share the features": LaunchConfig(1, 16, 1, 32, 128, 32, 4, 1024, 2, stages=1, num_warps=4),
    "tiles of 16 samples": LaunchConfig(16, 64, 1, 64, 128, 64, 2, 1024, 1, stages=1, num_warps=4),
    "weight in shared memory": LaunchConfig(16, 64, 1, 64, 64, 64, 2, 1024, 1, stages=1, num_warps=4, weight_buffers=3),
}


@pytest.mark.parametrize("samples", [1, 2, 20])
@pytest.mark.parametrize("programs", [4, 16, 50])
@pytest.mark.parametrize("way", FEW_PROGRAMS)
def test_few_programs_do_the_work_of_many(way, programs, samples):
    """They take turns: a warp that came apart while one took its turn never ended."""
    from auxhead.kernels.fused_head import launch_fused_head

    x, weight, bias = make_head((samples, 2048, 7, 7), 1000, dtype=torch.float16, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
    config = dataclasses.replace(FEW_PROGRAMS[way], max_programs=programs)

    def launch():
        return launch_fused_head(
            x, view, weight, bias, 1.0, 0.5, pool_max=False, return_probs=True, config=config
        )  # fmt: skip

    first = launch()
    check_head(x, weight, bias, threshold=0.5, out=first)
    for _ in range(20):
        assert_same_bits(first, launch())


def test_the_host_does_not_wait():
    """Nothing in a call makes the host wait for the GPU."""
    head = make_head((5, 40), 10, device="cuda")
    options = rules("tensors")
    fused_head(*head, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_head(*head, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
