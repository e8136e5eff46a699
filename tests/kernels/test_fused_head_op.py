"""fused_head.py, the operator: fake tensors, torch.compile, export, gradients, and no Triton."""

import importlib

import pytest
import torch
from auxhead.kernels import CRITERIA, fused_head, runs_triton
from support.compiler_process import printed
from support.head_cases import DTYPES, exact_logits, head_logits, make_head
from support.tolerance import assert_as_accurate_as_pytorch
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS = {
    "map": ((2, 6, 5, 4), {}),
    "grid of maxima": ((3, 2, 5, 4), {"pool": "max", "pool_size": (2, 3)}),
    "flattened": ((2, 2, 3, 3), {"pool": "none"}),
    "tokens": ((2, 4, 9), {"pool": "avg"}),
    "first token": ((2, 4, 9), {"pool": "first"}),
    "vectors": ((5, 9), {}),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "head, return_probs, by_tensors", [("map", True, True), ("map", False, False), ("vectors", True, False)]
)
def test_opcheck(head, return_probs, by_tensors, requires_grad, device):
    shape, pooling = HEADS[head]
    x, weight, bias = (tensor.requires_grad_(requires_grad) for tensor in make_head(shape, 5, device=device, **pooling))
    rule = [torch.tensor(number, device=device) if by_tensors else None for number in (1.0, 0.5)]
    arguments = (x, weight, bias, *rule, 1.5, 0.5, "avg", (1, 1), "max_prob", return_probs)
    torch.library.opcheck(torch.ops.auxhead.fused_head.default, arguments)


@pytest.mark.parametrize("shape, pooling", HEADS.values(), ids=HEADS)
def test_fake_tensors_have_the_form_of_real_ones(shape, pooling, device):
    for return_probs in (True, False):
        head = make_head(shape, 7, device=device, **pooling)
        real = fused_head(*head, **pooling, return_probs=return_probs)
        with FakeTensorMode() as mode:
            fake = fused_head(*(mode.from_tensor(tensor) for tensor in head), **pooling, return_probs=return_probs)
        meta = fused_head(*(tensor.to("meta") for tensor in head), **pooling, return_probs=return_probs)
        for one, *others in zip(real, fake, meta, strict=True):
            for other in others:
                assert (one is None) == (other is None)
                assert one is None or (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert fake.label.device == real.label.device


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_fake_tensors_are_checked_too(name):
    tensors = dict(zip(("x", "weight", "bias"), make_head((3, 4, 5, 5), 7), strict=True))
    tensors[name] = torch.zeros(3, 3) if name == "weight" else torch.zeros(3)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=f"^{name}: got"):
        fused_head(**{key: mode.from_tensor(tensor) for key, tensor in tensors.items()})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_graph_breaks(dynamic, device):
    def confident(x, weight, bias, threshold):
        out = fused_head(torch.relu(x), weight, bias, pool_size=2, threshold=threshold)
        return out.probs + 1, out.label, out.confidence, out.exit

    compiled = torch.compile(confident, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for samples in (3, 5) if dynamic else (3,):
        head = make_head((samples, 4, 5, 6), 7, pool_size=2, device=device)
        limit = torch.tensor(0.4, device=device)
        for one, other in zip(confident(*head, limit), compiled(*head, limit), strict=True):
            assert torch.equal(one, other)


def test_compiled_training_step(device):
    head = make_head((3, 4, 5, 5), 7, device=device)

    def loss(x, weight, bias):
        out = fused_head(x, weight, bias)
        return -out.probs[:, 2].log().sum() - out.confidence.sum()

    grads = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.clone().requires_grad_() for tensor in head]
        call(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def gradients(function, tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


@pytest.mark.parametrize("uses", ["probs", "confidence", "both"])
@pytest.mark.parametrize(
    "shape, pooling, dtype",
    [(*head, dtype) for head, dtype in zip(HEADS.values(), 2 * [*DTYPES.values()], strict=True)],
)
def test_gradients(shape, pooling, uses, dtype, device):
    classes, temperature = 7, 1.5
    head = make_head(shape, classes, dtype=dtype, device=device, **pooling)
    weights = torch.linspace(-1, 2, classes, device=device)

    def loss_of(probs, confidence):
        terms = {"probs": (probs * weights.to(probs.dtype)).sum(), "confidence": (confidence**2).sum()}
        return terms["probs"] + terms["confidence"] if uses == "both" else terms[uses]

    def fused(*leaves):
        out = fused_head(*leaves, temperature=torch.tensor(temperature, device=device), **pooling)
        return loss_of(out.probs, out.confidence)

    def modules(logits_of):
        def loss(*leaves):
            probs = (logits_of(*leaves, **pooling) / temperature).softmax(-1)
            return loss_of(probs, probs.amax(-1))

        return loss

    actual = gradients(fused, head)
    exact = gradients(modules(exact_logits), [tensor.double() for tensor in head])
    pytorch = gradients(modules(head_logits), head)
    for name, one, two, three, tensor in zip(("x", "weight", "bias"), actual, exact, pytorch, head, strict=True):
        assert one.dtype == tensor.dtype and one.shape == tensor.shape
        # the gradient is rounded to the dtype of its tensor, and sums what cancels: a few times 1 / 7 here
        assert_as_accurate_as_pytorch(one, two, three, magnitude=8, what=f"gradient of {name}")


def test_gradients_of_what_asks_for_them(device):
    x, weight, bias = make_head((3, 4, 5, 5), 7, device=device)
    weight.requires_grad_()
    fused_head(x, weight, bias).probs[:, 1].sum().backward()
    assert weight.grad.abs().sum() > 0 and x.grad is None and bias.grad is None
    assert fused_head(x, weight, None).confidence.requires_grad
    out = fused_head(x, weight, bias)
    assert not out.label.requires_grad and not out.exit.requires_grad
    with torch.no_grad():
        assert not fused_head(x, weight, bias).probs.requires_grad
    weight.grad = None
    fused_head(x, weight, bias, return_probs=False).confidence.sum().backward()
    assert weight.grad.abs().sum() > 0


def test_gradients_of_no_samples(device):
    x = torch.zeros(0, 4, 5, 5, device=device, requires_grad=True)
    weight = torch.ones(7, 4, device=device, requires_grad=True)
    out = fused_head(x, weight)
    (out.probs.sum() + out.confidence.sum()).backward()
    assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros_like(weight))


def test_runs_triton_says_what_happens(device, monkeypatch):
    module = importlib.import_module("auxhead.kernels.fused_head")
    head = make_head((3, 4, 5, 5), 7, device=device)
    ran = []
    for name in ("fused_head_reference", "launch_fused_head"):
        original = getattr(module, name)

        def spy(*args, _original=original, _name=name, **kwargs):
            ran.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    fused_head(*head)
    assert ran == ["launch_fused_head" if runs_triton(head[0]) else "fused_head_reference"]
    assert not runs_triton(head[0].to("meta"))


WITHOUT_INTERPRETER = """
import json
import torch
from auxhead.kernels import fused_head, runs_triton
x = torch.arange(24.0).reshape(2, 3, 2, 2)
assert runs_triton(x) is False
out = fused_head(x, torch.eye(3), threshold=0.9)
assert not torch.is_grad_enabled() or not out.probs.requires_grad
print(json.dumps([out.label.tolist(), out.exit.tolist()]))
"""


def test_a_process_without_the_interpreter(tmp_path):
    """On CPU tensors the reference runs, and nothing asks for a GPU."""
    (tmp_path / "script.py").write_text(WITHOUT_INTERPRETER)
    assert printed(tmp_path / "script.py", tmp_path) == [[2, 2], [True, True]]


def test_opcheck_and_second_derivatives_in_float64():
    head = [one.requires_grad_() for one in make_head((2, 3, 2, 2), 3, dtype=torch.float64)]
    arguments = (*head, None, None, 1.5, 0.5, "avg", (1, 1), "max_prob", True)
    torch.library.opcheck(torch.ops.auxhead.fused_head.default, arguments)
    assert torch.autograd.gradgradcheck(lambda *tensors: fused_head(*tensors).probs, head)


def test_second_derivatives_of_a_loss_that_is_not_linear():
    """What comes back to the outputs then depends on the inputs, too, and is given all the same."""
    head = [one.requires_grad_() for one in make_head((3, 6), 5)]

    def second(answer):
        loss = answer(*head)
        first = torch.autograd.grad(loss, head, create_graph=True)
        return *first, *torch.autograd.grad(sum(one.square().sum() for one in first), head)

    def plain(x, weight, bias):
        probs = torch.softmax(x @ weight.t() + (0 if bias is None else bias), -1)
        return probs.square().sum() + probs.amax(-1).square().sum()

    def fused(*head):
        out = fused_head(*head)
        return out.probs.square().sum() + out.confidence.square().sum()

    torch.testing.assert_close(second(fused), second(plain), rtol=1e-3, atol=1e-5)
    tied = torch.randn(4, 4, requires_grad=True)
    answers = (fused, plain)
    one, other = (torch.autograd.grad(answer(tied @ tied, tied, None), tied, create_graph=True) for answer in answers)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_gradients_in_float64(criterion):
    for name in ("map", "grid of maxima", "tokens", "vectors"):
        shape, pooling = HEADS[name]
        head = [one.requires_grad_() for one in make_head(shape, 4, dtype=torch.float64, **pooling)]

        def answer(*tensors, pooling=pooling):
            out = fused_head(*tensors, **pooling, criterion=criterion, temperature=1.5)
            return out.probs, out.confidence

        assert torch.autograd.gradcheck(answer, head)
