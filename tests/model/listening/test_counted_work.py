"""``Flow.work_at``: FLOPs by hand, the same on every device, in every dtype and where layers are compiled."""

import copy

import pytest
import torch
from auxhead.model.attach import place_taps
from auxhead.model.listening.dry_run import Flow
from torch import nn


class InTurn(nn.Module):
    """Calls torch's attention on the tokens, by itself or in PyTorch's layer."""

    def __init__(self):
        super().__init__()
        self.first, self.attention, self.last = (
            nn.Linear(16, 16),
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Mish(),
        )

    def forward(self, x):
        x = self.first(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(nn.functional.scaled_dot_product_attention(x, x, x)).mean(1)


def test_flops_are_those_of_products_and_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(128, 10)
    ).train()  # 2 * 64 * (27 * 4) = 13,824, 2 * 64 * (4 * 2) = 1,024, 2 * 1,280 = 2,560
    shares = Flow(model, torch.randn(5, 3, 8, 8)).work_at(["0", "1", "2", "3", "4"])
    assert shares == [13_824 / 17_408, 13_824 / 17_408, 14_848 / 17_408, 14_848 / 17_408, 1.0]
    assert all(module.training for module in model.modules()) and not any(m._forward_hooks for m in model.modules())


def test_attention_is_counted_however_it_is_computed():
    # a token: projections in and out of 16 * 48 and 16 * 16, and scores and values of 2 * 16 * 6 tokens, twice
    layers, tokens = ["first", "attention"], torch.randn(3, 6, 16)
    products = [16 * 16, 16 * 48 + 2 * 16 * 6 + 16 * 16, 2 * 16 * 6]
    wanted = [products[0] / sum(products), sum(products[:2]) / sum(products)]
    model = InTurn()
    assert Flow(model, tokens).work_at(layers) == wanted
    assert Flow(copy.deepcopy(model).bfloat16(), tokens.bfloat16()).work_at(layers) == wanted
    assert Flow(copy.deepcopy(model).to("meta"), tokens.to("meta")).work_at(layers) == wanted
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert Flow(model, tokens).work_at(layers) == wanted


class SharedKeys(nn.Module):
    """Four heads of queries, of which two each share keys and values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        query = self.first(x).unflatten(2, (4, 8)).transpose(1, 2)
        key = query[:, ::2]
        return nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_heads_that_share_keys_are_counted(where):
    products = [32 * 32, 2 * 32 * 6]
    model = SharedKeys().to(where)
    assert Flow(model, torch.empty(2, 6, 32, device=where)).work_at(["first"]) == [products[0] / sum(products)]


def test_the_device_does_not_matter(device):
    model = InTurn().to(device)
    here = Flow(model, torch.randn(2, 6, 16, device=device)).work_at(["first", "attention"])
    assert here == Flow(model.cpu(), torch.randn(2, 6, 16)).work_at(["first", "attention"])


def test_compiled_layers_are_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 4))
    plain = Flow(model, torch.randn(2, 4)).work_at(["0", "1"])
    assert plain == [16 / 80, 48 / 80]
    model[1].compile(fullgraph=True)
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1"]) == plain
    model.compile()
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1"]) == plain


def test_of_a_model_without_products_operators_count():
    model = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Flatten(), nn.Softplus())
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1", "2"]) == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_a_batch_that_the_model_changes_is_left_as_it_is():
    x = torch.randn(2, 4)
    before = x.clone()
    Flow(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), x).work_at(["0"])
    assert torch.equal(x, before)


def test_of_layers_behind_the_same_work_the_last_gets_the_head():
    work = {"conv": 0.25, "relu": 0.25, "pool": 0.25, "second": 0.6, "third": 1.0}
    assert place_taps(list(work), work) == ["pool", "second"]
