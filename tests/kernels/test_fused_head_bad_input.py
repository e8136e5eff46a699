"""head_arguments.py, fused_head.py: bad input raises, naming argument, value and wish, and nothing is launched."""

import importlib
import re

import pytest
import torch
from auxhead.kernels import check_input, check_pool, check_temperature, check_threshold, fused_head, runs_triton
from auxhead.kernels.launch.head_arguments import head_dtypes_in_words

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Fail where a call gets as far as a launch or the reference."""
    module = importlib.import_module("auxhead.kernels.fused_head")

    def launched(*args, **kwargs):
        pytest.fail("the head ran")

    monkeypatch.setattr(module, "fused_head_reference", launched)
    monkeypatch.setattr(module, "launch_fused_head", launched)


def arguments(device, **changes):
    """Return arguments of a good call, with changes made to them."""
    good = {
        "x": torch.zeros(2, 4, 3, 3, device=device),
        "weight": torch.zeros(5, 4, device=device),
        "bias": torch.zeros(5, device=device),
    }
    return good | changes


def refused(call, error, name, *facts):
    """Assert that ``call`` raises exactly ``error``, with a message ``name: got ... wants ...`` that has the facts."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.match(rf"{name}: got .+wants ", message, re.DOTALL), message
    for fact in facts:
        assert str(fact) in message, f"{fact!r} is not in: {message}"


def test_the_good_call_would_run(device):
    with pytest.raises(pytest.fail.Exception, match="the head ran"):
        fused_head(**arguments(device))


SHAPES = {
    "one logit": ({"weight": (1, 4)}, "weight", "one logit", "wants two"),
    "no dimension": ({"x": ()}, "x", "rank 0"),
    "one dimension": ({"x": (4,)}, "x", "rank 1", "[4]"),
    "five dimensions": ({"x": (2, 4, 3, 3, 1)}, "x", "rank 5", "[2, 4, 3, 3, 1]"),
    "empty height": ({"x": (2, 4, 0, 3)}, "x", "[2, 4, 0, 3]"),
    "empty width": ({"x": (2, 4, 3, 0)}, "x", "[2, 4, 3, 0]"),
    "no channels": ({"x": (2, 0, 3, 3)}, "x", "[2, 0, 3, 3]"),
    "no samples of an empty map": ({"x": (0, 4, 0, 3)}, "x", "[0, 4, 0, 3]"),
    "no tokens": ({"x": (2, 0, 4)}, "x", "[2, 0, 4]"),
    "empty vectors": ({"x": (2, 0)}, "x", "[2, 0]"),
    "channels": ({"x": (2, 3, 3, 3)}, "weight", "[5, 4]", "[2, 3, 3, 3]", "3 features"),
    "channels without samples": ({"x": (0, 3, 3, 3)}, "weight", "[5, 4]"),
    "width of tokens": ({"x": (2, 4, 3)}, "weight", "[5, 4]", "3 features"),
    "weight of rank 1": ({"weight": (4,)}, "weight", "[4]"),
    "weight of rank 3": ({"weight": (5, 4, 1)}, "weight", "[5, 4, 1]"),
    "transposed weight": ({"weight": (4, 5)}, "weight", "[4, 5]", "4 features"),
    "no classes": ({"weight": (0, 4), "bias": (0,)}, "weight", "[0, 4]"),
    "bias of another length": ({"bias": (4,)}, "bias", "[4]", "[5]"),
    "bias of rank 2": ({"bias": (5, 1)}, "bias", "[5, 1]", "[5]"),
    "bias of one": ({"bias": (1,)}, "bias", "[1]", "[5]"),
    "scalar bias": ({"bias": ()}, "bias", "[]", "[5]"),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_shapes(case, device):
    shapes, name, *facts = case
    changes = {key: torch.zeros(shape, device=device) for key, shape in shapes.items()}
    refused(lambda: fused_head(**arguments(device, **changes)), ValueError, name, *facts)


@pytest.mark.parametrize("options, classes", [({"pool": "none"}, 2), ({}, 5)], ids=["features", "elements"])
def test_more_than_int32_counts(options, classes, device):
    """Too many for a kernel to count, and no memory behind them: rows with gaps, which it cannot take for one."""
    x = torch.zeros(2**16, 1, device=device).expand(2**16, 2**15)[None, None]
    if not runs_triton(x):
        pytest.skip("the reference counts in int64")
    features = 2**31 if options else 1
    weight = torch.zeros(1, 1, device=device).expand(classes, features)
    refused(lambda: fused_head(x, weight, **options), ValueError, "x", "[1, 1, 65536, 32768]", 2**31)


@pytest.mark.parametrize("name, value", [("temperature", -1.0), ("temperature", NAN), ("threshold", 1.5)])
@pytest.mark.parametrize("around", [torch.vmap, torch.func.jacrev], ids=["vmap", "jacrev"])
def test_numbers_within_transforms(around, name, value, device):
    weight = torch.zeros(5, 4, device=device)
    call = around(lambda x: fused_head(x[None], weight, **{name: value}).probs)
    refused(
        lambda: call(torch.zeros(2, 4, 3, 3, device=device)[0 if around is torch.func.jacrev else slice(None)]),
        ValueError,
        name,
        value,
    )


@pytest.mark.parametrize(
    "x, options, wanted",
    [((2, 4, 3, 3), {"pool_size": 2}, 16), ((2, 4, 3, 3), {"pool": "none"}, 36), ((2, 3, 4), {"pool": "none"}, 12)],
)
def test_the_feature_count_follows_the_pool(x, options, wanted, device):
    changes = arguments(device, x=torch.zeros(x, device=device))
    refused(lambda: fused_head(**changes, **options), ValueError, "weight", "[5, 4]", f"{wanted} features")


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ["x", "weight", "bias", "all"])
def test_dtypes(name, dtype, device):
    changes = arguments(device)
    for key in changes if name == "all" else [name]:
        changes[key] = changes[key].to(dtype)
    refused(lambda: fused_head(**changes), TypeError, "x" if name == "all" else name, dtype, "torch.float32")


@pytest.mark.parametrize("name", ["weight", "bias", "all"])
def test_float64_is_read_on_the_cpu_alone(name, device):
    changes = arguments(device)
    for key in changes if name == "all" else [name]:
        changes[key] = changes[key].double()
    if name != "all":
        refused(lambda: fused_head(**changes), TypeError, name, "torch.float64", "torch.float32, the dtype of x")
    elif device.type == "cpu":
        with pytest.raises(pytest.fail.Exception, match="the head ran"):
            fused_head(**changes)
    else:
        refused(lambda: fused_head(**changes), TypeError, "x", "torch.float64", "torch.float32", "on the CPU alone")


def test_float64_on_a_device_of_kernels_is_told_where_it_works():
    """Of the dtype alone, so that it is tested where there is no such device."""
    said = head_dtypes_in_words(torch.device("cuda"))
    assert said == "one of torch.float32, torch.float16, torch.bfloat16; torch.float64 works on the CPU alone"
    assert head_dtypes_in_words(torch.device("cpu")).endswith(", torch.float64")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_mixed_dtypes(name, device):
    changes = arguments(device)
    changes[name] = changes[name].half()
    refused(lambda: fused_head(**changes), TypeError, name, "torch.float16", "torch.float32")


@pytest.mark.parametrize("name", ["weight", "bias", "temperature", "threshold"])
def test_devices(name, device):
    changes = arguments(
        device, temperature=torch.tensor(1.0, device=device), threshold=torch.tensor(1.0, device=device)
    )
    for other in ["meta"] if device.type == "cpu" else ["meta", "cpu"]:
        moved = changes | {name: changes[name].to(other)}
        refused(lambda moved=moved: fused_head(**moved), ValueError, name, other, device)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "temperature", "threshold"])
@pytest.mark.parametrize("value", [[[1.0] * 4], "1.0", object(), 1j], ids=["list", "str", "object", "complex"])
def test_types(name, value, device):
    refused(lambda: fused_head(**arguments(device, **{name: value})), TypeError, name, type(value).__name__, "Tensor")


@pytest.mark.parametrize("name", ["x", "weight", "temperature", "threshold"])
def test_none(name, device):
    refused(lambda: fused_head(**arguments(device, **{name: None})), TypeError, name, "NoneType")


@pytest.mark.parametrize("pool", ["mean", "AVG", "", "average"])
def test_unknown_pool(pool, device):
    refused(lambda: fused_head(**arguments(device), pool=pool), ValueError, "pool", repr(pool), "avg", "max")
    refused(lambda: check_pool(pool, 1), ValueError, "pool", repr(pool))


def test_first_token_of_a_map(device):
    refused(lambda: fused_head(**arguments(device), pool="first"), ValueError, "pool", "'first'", "[2, 4, 3, 3]")
    refused(lambda: check_input(torch.zeros(2, 4, 3, 3), "first", (1, 1)), ValueError, "pool", "'first'")


@pytest.mark.parametrize("size", [0, -1, (0, 1), (1, -2), (1, 1, 1), (), (1,), (2, 1.0)], ids=repr)
def test_pool_size_values(size, device):
    refused(lambda: fused_head(**arguments(device), pool_size=size), ValueError, "pool_size", repr(size))


@pytest.mark.parametrize("size", [1.5, 2.0, None, "2"], ids=repr)
def test_pool_size_types(size, device):
    with pytest.raises((TypeError, ValueError), match="^pool_size: got .*wants") as caught:
        fused_head(**arguments(device), pool_size=size)
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize("x, pool", [((2, 3, 4), "avg"), ((2, 4), "avg"), ((2, 3, 4), "first"), ((2, 4, 3, 3), "none")])
def test_pool_size_of_what_has_no_grid(x, pool, device):
    changes = arguments(device, x=torch.zeros(x, device=device))
    refused(lambda: fused_head(**changes, pool=pool, pool_size=2), ValueError, "pool_size", "2")


@pytest.mark.parametrize("criterion", ["maxprob", "Entropy", ""])
def test_unknown_criterion(criterion, device):
    call = lambda: fused_head(**arguments(device), criterion=criterion)  # noqa: E731
    refused(call, ValueError, "criterion", repr(criterion), "max_prob")


def as_float(value, device):
    return value


def as_tensor(value, device):
    return torch.tensor(value, device=device)


@pytest.mark.parametrize("kind", [as_float, as_tensor])
@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, NAN, INF, -INF])
def test_temperature_values(value, samples, kind, device):
    if kind is as_tensor and device.type != "cpu":
        pytest.skip("the host does not read a tensor on an accelerator")
    changes = arguments(device, x=torch.zeros(samples, 4, 3, 3, device=device), temperature=kind(value, device))
    refused(lambda: fused_head(**changes), ValueError, "temperature", value, "greater than 0")


@pytest.mark.parametrize("kind", [as_float, as_tensor])
@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("value", [-0.001, 1.001, 90.0, NAN, INF, -INF])
def test_threshold_values(value, samples, kind, device):
    if kind is as_tensor and device.type != "cpu":
        pytest.skip("the host does not read a tensor on an accelerator")
    changes = arguments(device, x=torch.zeros(samples, 4, 3, 3, device=device), threshold=kind(value, device))
    refused(lambda: fused_head(**changes), ValueError, "threshold", "0.0", "1.0", "max_prob")


@pytest.mark.parametrize("value", [1e-50, 1e300])
def test_temperatures_that_are_no_float32(value, device):
    """The kernel divides by a float32, in which these are 0 and infinite."""
    refused(lambda: fused_head(**arguments(device), temperature=value), ValueError, "temperature", value)


@pytest.mark.parametrize("name", ["temperature", "threshold"])
def test_rule_tensors(name, device):
    for shape in ((2,), (0,), (1, 2)):
        changes = arguments(device, **{name: torch.ones(shape, device=device)})
        refused(lambda changes=changes: fused_head(**changes), ValueError, name, list(shape), "one element")
    for dtype in (torch.float64, torch.float16, torch.int64, torch.bool):
        changes = arguments(device, **{name: torch.ones((), dtype=dtype, device=device)})
        refused(lambda changes=changes: fused_head(**changes), TypeError, name, dtype, "torch.float32")


def test_number_checks_by_themselves():
    float32 = torch.finfo(torch.float32)
    for value in (1, 0.5, 1e-6, 1e6, float32.smallest_normal, float32.max):
        check_temperature(value)
    for value in (0, 0.0, 0.5, 1, 1.0):
        check_threshold("max_prob", value)
    refused(lambda: check_temperature(0), ValueError, "temperature", "0")
    refused(lambda: check_threshold("max_prob", 2), ValueError, "threshold", "2")
