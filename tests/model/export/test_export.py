"""Heads and networks outside of PyTorch's eager mode: torch.export, files of it, AOTInductor, ONNX."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule, FusedAuxHead, HeadOutput
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Logits(nn.Module):
    """The logits of all exits as one forward, which is what exporters take."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.network.logits(x)


LAYERS = {"linear": {}, "hidden": {"hidden_features": 9, "activation": "gelu", "norm": True, "rectifies": True}}


@pytest.fixture(params=LAYERS)
def layers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of heads."""
    return LAYERS[request.param]


def head(device: torch.device, layers: dict[str, Any]) -> FusedAuxHead:
    return FusedAuxHead(6, 5, rule=ExitRule(0.3, temperature=1.5), **layers).to(device).eval()


def network(device: torch.device, layers: dict[str, Any]) -> EarlyExitNetwork:
    heads = plain_heads()
    heads["block1"] = FusedAuxHead(12, 5, **layers)
    net = EarlyExitNetwork(SmallNet(), heads).to(device).eval()
    net.check_taps(torch.randn(2, 3, 8, 8, device=device))
    return net


@pytest.mark.parametrize("kind", [HeadOutput, ExitResult])
def test_answers_are_tree_nodes_with_a_name(kind: type) -> None:
    answer = kind(*(torch.zeros(1) for _ in kind._fields))
    leaves, spec = pytree.tree_flatten(answer)
    assert len(leaves) == 4 and pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert type(pytree.tree_unflatten(leaves, spec)) is kind


def test_an_exported_head_is_saved_and_loaded(device: torch.device, layers: dict[str, Any]) -> None:
    module, x = head(device, layers), torch.randn(3, 6, 4, 4, device=device)
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    out = loaded(x)
    assert isinstance(out, HeadOutput)
    assert all(torch.equal(a, b) for a, b in zip(out, module(x), strict=True))


def test_a_module_with_a_head_is_exported_for_any_batch(device: torch.device, layers: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), head(device, layers)).to(device).eval()
    x = torch.randn(4, 3, 8, 8, device=device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},))
    assert any(node.target is torch.ops.auxhead.fused_head.default for node in program.graph.nodes)
    other = torch.randn(7, 3, 8, 8, device=device)
    for found, wanted in zip(program.module()(other), module(other), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_logits_of_a_network_are_exported_for_any_batch(device: torch.device, layers: dict[str, Any]) -> None:
    module, x = Logits(network(device, layers)).eval(), torch.randn(4, 3, 8, 8, device=device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},))
    other = torch.randn(7, 3, 8, 8, device=device)
    for found, wanted in zip(program.module()(other), module(other), strict=True):
        torch.testing.assert_close(found, wanted)


class Both(nn.Module):
    """A head of each kind of layers, which are compiled at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head(device, layers) for layers in LAYERS.values())

    def forward(self, x: Tensor) -> list[HeadOutput]:
        return [head(x) for head in self.heads]


#: Inductor tries instructions out, compiles its headers beforehand and optimizes: 20 CPU seconds, for what runs once.
CHEAPLY = {
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


def test_aot_inductor_packages_heads(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # where Inductor refuses operators that have a decomposition, too
    module, x = Both(device).eval(), torch.randn(3, 6, 4, 4, device=device)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, (x,)), package_path=str(tmp_path / "heads.pt2"), inductor_configs=CHEAPLY
    )
    if device.type == "cuda":
        return  # where this was tried (torch 2.11, H200) loading even the package of an nn.Linear ends the process
    answers = torch._inductor.aoti_load_package(path)(x)
    for out, wanted in zip(answers, module(x), strict=True):
        assert isinstance(out, HeadOutput)
        for found, one in zip(out, wanted, strict=True):
            torch.testing.assert_close(found, one)


@pytest.mark.parametrize("what", ["head", "logits"])
def test_onnx_computes_the_same(what: str, device: torch.device, layers: dict[str, Any]) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    module = head(device, layers) if what == "head" else Logits(network(device, layers)).eval()
    x = torch.randn(3, 6, 4, 4, device=device) if what == "head" else torch.randn(3, 3, 8, 8, device=device)
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert program is not None
    found = reference.ReferenceEvaluator(program.model_proto).run(
        None, {program.model_proto.graph.input[0].name: x.cpu().numpy()}
    )
    for one, wanted in zip(found, module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), wanted.detach().cpu())
