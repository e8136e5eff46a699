"""check_arguments.py, fused_head.py: bad input raises, naming argument, value and wish, and nothing is launched."""

import importlib
import re

import pytest
import torch
from auxhead.kernels import HiddenLayers, fused_head, runs_triton
from auxhead.kernels.launch.check_arguments import MOST_WINDOWS, check_input, check_pool, head_dtypes_in_words
from auxhead.kernels.reference.criteria import check_temperature, check_threshold

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
    "one logit": ({"weight": (1, 4)}, {}, "weight", "one logit", "wants two"),
    "no dimension": ({"x": ()}, {}, "x", "rank 0"),
    "five dimensions": ({"x": (2, 4, 3, 3, 1)}, {}, "x", "rank 5", "[2, 4, 3, 3, 1]"),
    "empty height": ({"x": (2, 4, 0, 3)}, {}, "x", "[2, 4, 0, 3]"),
    "no samples of an empty map": ({"x": (0, 4, 0, 3)}, {}, "x", "[0, 4, 0, 3]"),
    "no tokens": ({"x": (2, 0, 4)}, {}, "x", "[2, 0, 4]"),
    "empty vectors": ({"x": (2, 0)}, {}, "x", "[2, 0]"),
    "channels": ({"x": (2, 3, 3, 3)}, {}, "weight", "[5, 4]", "[2, 3, 3, 3]", "3 features"),
    "channels without samples": ({"x": (0, 3, 3, 3)}, {}, "weight", "[5, 4]"),
    "width of tokens": ({"x": (2, 4, 3)}, {}, "weight", "[5, 4]", "3 features"),
    "features of a grid": ({}, {"pool_size": 2}, "weight", "[5, 4]", "16 features"),
    "all elements": ({"x": (2, 3, 4)}, {"pool": "none"}, "weight", "[5, 4]", "12 features"),
    "weight of rank 3": ({"weight": (5, 4, 1)}, {}, "weight", "[5, 4, 1]"),
    "transposed weight": ({"weight": (4, 5)}, {}, "weight", "[4, 5]", "4 features"),
    "no classes": ({"weight": (0, 4), "bias": (0,)}, {}, "weight", "[0, 4]"),
    "bias of another length": ({"bias": (4,)}, {}, "bias", "[4]", "[5]"),
    "bias of rank 2": ({"bias": (5, 1)}, {}, "bias", "[5, 1]", "[5]"),
    "scalar bias": ({"bias": ()}, {}, "bias", "[]", "[5]"),
    "two temperatures": ({"temperature": (2,)}, {}, "temperature", "[2]", "one element"),
    "no threshold": ({"threshold": (0,)}, {}, "threshold", "[0]", "one element"),
    "first token of a map": ({}, {"pool": "first"}, "pool", "'first'", "[2, 4, 3, 3]"),
    "a grid of tokens": ({"x": (2, 3, 4)}, {"pool_size": 2}, "pool_size", "2"),
    "a grid of vectors": ({"x": (2, 4)}, {"pool_size": 2}, "pool_size", "2"),
    "a grid without a pool": ({}, {"pool": "none", "pool_size": 2}, "pool_size", "2"),
    "unknown pool": ({}, {"pool": "AVG"}, "pool", "'AVG'", "avg", "max"),
    "unknown criterion": ({}, {"criterion": "Entropy"}, "criterion", "'Entropy'", "one of ['energy', 'entropy'"),
    "margin's range": ({}, {"criterion": "margin", "threshold": 2.0}, "threshold", "2.0", "[0.0, 1.0]", "'margin'"),
    **{
        f"size {size}": ({}, {"pool_size": size}, "pool_size", repr(size)) for size in (0, (1, -2), (1,), (2, 1.0), "2")
    },
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_shapes_and_options(case, device):
    shapes, options, name, *facts = case
    changes = {key: torch.zeros(shape, device=device) for key, shape in shapes.items()}
    refused(lambda: fused_head(**arguments(device, **changes), **options), ValueError, name, *facts)


def test_checks_by_themselves():
    float32 = torch.finfo(torch.float32)
    for value in (1, 0.5, 1e-6, float32.smallest_normal, float32.max):
        check_temperature(value)
    for value in (0, 0.5, 1.0):
        check_threshold("max_prob", value)
    refused(lambda: check_temperature(True), TypeError, "temperature", "True", "a number")
    refused(lambda: check_threshold("max_prob", True), TypeError, "threshold", "True", "a number")
    refused(lambda: check_temperature(0), ValueError, "temperature", "0")
    refused(lambda: check_threshold("max_prob", 2), ValueError, "threshold", "2")
    refused(lambda: check_pool("mean", 1), ValueError, "pool", "'mean'")
    refused(lambda: check_pool("avg", True), ValueError, "pool_size", "True")
    refused(lambda: check_pool("avg", (1, MOST_WINDOWS + 1)), ValueError, "pool_size", "46341", "46340")
    refused(lambda: check_input(torch.zeros(2, 4, 3, 3), "first", (1, 1)), ValueError, "pool", "'first'")


@pytest.mark.parametrize("options, classes", [({"pool": "none"}, 2), ({}, 5)], ids=["features", "elements"])
def test_more_than_int32_counts(options, classes, device):
    """Too many for a kernel to count, and no memory behind them: rows with gaps, which it cannot take for one."""
    x = torch.zeros(2**16, 1, device=device).expand(2**16, 2**15)[None, None]
    if not runs_triton(x):
        pytest.skip("the reference counts in int64")
    weight = torch.zeros(1, 1, device=device).expand(classes, 2**31 if options else 1)
    refused(lambda: fused_head(x, weight, **options), ValueError, "x", "[1, 1, 65536, 32768]", 2**31)


def test_more_tokens_than_int32_counts(device):
    """Pooled tokens are a channel's elements, and were answered wrongly."""
    x = torch.zeros(1, 1, 1, device=device).expand(1, 2**31 - 1, 1)
    if not runs_triton(x):
        pytest.skip("the reference counts in int64")
    weight = torch.zeros(2, 1, device=device)
    refused(lambda: fused_head(x, weight, pool="avg"), ValueError, "x", "[1, 2147483647, 1]", 2**31 - 1, "a channel")


@pytest.mark.parametrize("name, value", [("temperature", NAN), ("threshold", 1.5)])
@pytest.mark.parametrize("around", [torch.vmap, torch.func.jacrev], ids=["vmap", "jacrev"])
def test_numbers_within_transforms(around, name, value, device):
    weight = torch.zeros(5, 4, device=device)
    call = around(lambda x: fused_head(x[None], weight, **{name: value}).probs)
    x = torch.zeros(2, 4, 3, 3, device=device)[0 if around is torch.func.jacrev else slice(None)]
    refused(lambda: call(x), ValueError, name, value)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "all"])
def test_dtypes(name, device):
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.float64):
        changes = arguments(device)
        for key in changes if name == "all" else [name]:
            changes[key] = changes[key].to(dtype)
        works = dtype == torch.float16 or (dtype == torch.float64 and device.type == "cpu")
        if name == "all" and works:
            with pytest.raises(pytest.fail.Exception, match="the head ran"):
                fused_head(**changes)
            continue
        whose = "weight" if name == "x" and works else "x" if name == "all" else name
        refused(lambda changes=changes: fused_head(**changes), TypeError, whose, dtype, "torch.float32")


def test_float64_on_a_device_of_kernels_is_told_where_it_works():
    """Of the dtype alone, so that it is tested where there is no such device."""
    wanted = "one of torch.float32, torch.float16, torch.bfloat16; torch.float64 works on the CPU alone"
    assert head_dtypes_in_words(torch.device("cuda")) == wanted
    assert head_dtypes_in_words(torch.device("cpu")).endswith(", torch.float64")


@pytest.mark.parametrize("name", ["weight", "bias", "temperature", "threshold"])
def test_devices(name, device):
    one = torch.tensor(1.0, device=device)
    changes = arguments(device, temperature=one, threshold=one)
    for other in ["meta"] if device.type == "cpu" else ["meta", "cpu"]:
        moved = changes | {name: changes[name].to(other)}
        refused(lambda moved=moved: fused_head(**moved), ValueError, name, other, device)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "temperature", "threshold"])
def test_types(name, device):
    for value in ([[1.0] * 4], "1.0", object(), 1j, *([None] if name != "bias" else [])):
        call = lambda value=value: fused_head(**arguments(device, **{name: value}))  # noqa: E731
        refused(call, TypeError, name, type(value).__name__, "Tensor")


def test_more_classes_than_programs_can_decide_about(device):
    weight = torch.zeros(1, 4, device=device).expand(2**26 + 1, 4)
    refused(lambda: fused_head(**arguments(device, weight=weight, bias=None)), ValueError, "weight", 2**26 + 1, 2**26)


def test_an_infinite_number_is_named_as_it_is(device):
    for name in ("temperature", "threshold"):
        refused(lambda name=name: fused_head(**arguments(device, **{name: float("inf")})), ValueError, name, "got inf")


@pytest.mark.parametrize("name", ["x", "weight", "bias", "temperature", "threshold"])
def test_tensors_without_strides(name, device):
    good = arguments(device, x=torch.zeros(2, 4, device=device))
    changes = good | {name: good.get(name, torch.ones(1, device=device)).to_sparse()}
    refused(lambda: fused_head(**changes), TypeError, name, "torch.sparse_coo", "strided")
    if name == "x":
        parts = [torch.zeros(3, 4, device=device), torch.zeros(2, 4, device=device)]
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(parts, layout=layout)
            refused(lambda one=nested: fused_head(**good | {"x": one}), TypeError, name, "nested")


def test_what_the_operator_would_refuse_in_words_of_its_own(device):
    for criterion in (None, 1, ["max_prob"]):
        refused(
            lambda one=criterion: fused_head(**arguments(device), criterion=one), ValueError, "criterion", criterion
        )
    for given in ("no", None, 0, torch.tensor(False)):
        call = lambda given=given: fused_head(**arguments(device), return_probs=given)  # noqa: E731
        refused(call, TypeError, "return_probs", type(given).__name__, "a bool")
    for name in ("temperature", "threshold"):
        for value in (10**400, -(10**400)):
            refused(lambda n=name, v=value: fused_head(**arguments(device), **{n: v}), ValueError, name)
    for huge in (HiddenLayers(eps=10**400), HiddenLayers(eps=-(10**400))):
        call = lambda huge=huge: fused_head(**arguments(device), hidden=huge)  # noqa: E731
        refused(call, TypeError, "hidden.eps", "int", "a float or None")


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("name, fact", [("temperature", "greater than 0"), ("threshold", "max_prob")])
def test_numbers(name, fact, samples, as_tensor, device):
    if as_tensor and device.type != "cpu":
        pytest.skip("the host does not read a tensor on an accelerator")
    of_both = {"temperature": (0.0, -0.0, -1.0), "threshold": (-0.001, 1.001, 90.0)}[name]
    for value in (*of_both, NAN, INF, -INF):
        given = torch.tensor(value, device=device) if as_tensor else value
        changes = arguments(device, x=torch.zeros(samples, 4, 3, 3, device=device), **{name: given})
        refused(lambda changes=changes: fused_head(**changes), ValueError, name, fact)
    if name == "temperature" and not as_tensor:  # the kernel divides by a float32, in which these are 0 and infinite
        for value in (1e-50, 1e300):
            refused(lambda value=value: fused_head(**arguments(device), temperature=value), ValueError, name, value)


@pytest.mark.parametrize("name", ["temperature", "threshold"])
def test_dtypes_of_rules(name, device):
    refused(lambda: fused_head(**{**arguments(device), name: True}), TypeError, name, "bool", "a float")
    for dtype in (torch.float64, torch.float16, torch.int64, torch.bool):
        changes = arguments(device, **{name: torch.ones((), dtype=dtype, device=device)})
        refused(lambda changes=changes: fused_head(**changes), TypeError, name, dtype, "torch.float32")
