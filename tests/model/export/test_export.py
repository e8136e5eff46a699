"""Heads outside of PyTorch's eager mode: torch.export, files of it, AOTInductor, ONNX."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from auxhead.model import ExitRule, FusedAuxHead, HeadOutput
from torch import Tensor, nn

HIDDEN = {"hidden_features": 9, "activation": "gelu", "norm": True, "rectifies": True}


class Both(nn.Module):
    """A head of one linear layer, and one with a hidden layer and a norm."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        rule = ExitRule(0.3, temperature=1.5)
        self.heads = nn.ModuleList(FusedAuxHead(6, 5, rule=rule, **more) for more in ({}, HIDDEN)).to(device).eval()

    def forward(self, x: Tensor) -> list[HeadOutput]:
        return [head(x) for head in self.heads]


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_with_heads_is_exported_for_any_batch_saved_and_loaded(device: torch.device) -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), Both(device)).to(device).eval()
    x = torch.randn(4, 3, 8, 8, device=device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},))
    assert any(node.target is torch.ops.auxhead.fused_head.default for node in program.graph.nodes)
    file, other = io.BytesIO(), torch.randn(7, 3, 8, 8, device=device)
    torch.export.save(program, file)
    file.seek(0)
    out = torch.export.load(file).module()(other)
    assert all(isinstance(each, HeadOutput) for each in out)
    assert_same(out, module(other))


#: Inductor tries instructions out, compiles its headers beforehand and optimizes: 20 CPU seconds, for what runs once.
CHEAPLY = {
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


def test_aot_inductor_packages_heads(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # where Inductor refuses operators that have a decomposition, too
    module, x = Both(device), torch.randn(3, 6, 4, 4, device=device)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, (x,)), package_path=str(tmp_path / "heads.pt2"), inductor_configs=CHEAPLY
    )
    if device.type == "cuda":
        return  # where this was tried (torch 2.11, H200) loading even the package of an nn.Linear ends the process
    answers = torch._inductor.aoti_load_package(path)(x)
    assert all(isinstance(out, HeadOutput) for out in answers)
    assert_same(answers, module(x))


def test_onnx_computes_the_same(device: torch.device) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    module, x = Both(device), torch.randn(3, 6, 4, 4, device=device)
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert program is not None
    given = {program.model_proto.graph.input[0].name: x.cpu().numpy()}
    found = reference.ReferenceEvaluator(program.model_proto).run(None, given)
    assert_same([torch.from_numpy(one) for one in found], [one.cpu() for one in pytree.tree_leaves(module(x))])
