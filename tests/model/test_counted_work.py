"""``counted_work``: FLOPs by hand, the same on every device, in every dtype and where layers are compiled."""

import copy

import pytest
import torch
from auxhead.model.attaching.counted_work import counted_work
from auxhead.model.attaching.placement import place_taps
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
    shares = counted_work(model, ["0", "1", "2", "3", "4"], torch.randn(5, 3, 8, 8))
    assert shares == [13_824 / 17_408, 13_824 / 17_408, 14_848 / 17_408, 14_848 / 17_408, 1.0]
    assert all(module.training for module in model.modules()) and not any(m._forward_hooks for m in model.modules())


def test_attention_is_counted_however_it_is_computed():
    # a token: projections in and out of 16 * 48 and 16 * 16, and scores and values of 2 * 16 * 6 tokens, twice
    layers, tokens = ["first", "attention"], torch.randn(3, 6, 16)
    products = [16 * 16, 16 * 48 + 2 * 16 * 6 + 16 * 16, 2 * 16 * 6]
    wanted = [products[0] / sum(products), sum(products[:2]) / sum(products)]
    model = InTurn()
    assert counted_work(model, layers, tokens) == wanted
    assert counted_work(copy.deepcopy(model).bfloat16(), layers, tokens.bfloat16()) == wanted
    assert counted_work(copy.deepcopy(model).to("meta"), layers, tokens.to("meta")) == wanted
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert counted_work(model, layers, tokens) == wanted


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
    assert counted_work(model, ["first"], torch.empty(2, 6, 32, device=where)) == [products[0] / sum(products)]


def test_the_device_does_not_matter(device):
    model = InTurn().to(device)
    here = counted_work(model, ["first", "attention"], torch.randn(2, 6, 16, device=device))
    assert here == counted_work(model.cpu(), ["first", "attention"], torch.randn(2, 6, 16))


def test_compiled_layers_are_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 4))
    plain = counted_work(model, ["0", "1"], torch.randn(2, 4))
    assert plain == [16 / 80, 48 / 80]
    model[1].compile(fullgraph=True)
    assert counted_work(model, ["0", "1"], torch.randn(2, 4)) == plain
    model.compile()
    assert counted_work(model, ["0", "1"], torch.randn(2, 4)) == plain


def test_of_a_model_without_products_operators_count():
    model = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Flatten(), nn.Softplus())
    assert counted_work(model, ["0", "1", "2"], torch.randn(2, 4)) == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_a_batch_that_the_model_changes_is_left_as_it_is():
    x = torch.randn(2, 4)
    before = x.clone()
    counted_work(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), ["0"], x)
    assert torch.equal(x, before)


def test_of_layers_behind_the_same_work_the_last_gets_the_head():
    work = {"conv": 0.25, "relu": 0.25, "pool": 0.25, "second": 0.6, "third": 1.0}
    assert place_taps(list(work), work) == ["pool", "second"]
