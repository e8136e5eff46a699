"""``attach`` to models of several inputs: masks of padding, by their names, and labels among the inputs."""

import pytest
import torch
from auxhead.model import Extract, attach
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


class Padded(nn.Module):
    """Averages tokens without padding at the end: the mask goes past all blocks."""

    def __init__(self, mask_of_tokens):
        super().__init__()
        self.embed, self.fc, self.mask_of_tokens = nn.Embedding(9, 8), nn.Linear(8, 3), mask_of_tokens
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, tokens, pad_mask=None):
        kept = (tokens != 0 if self.mask_of_tokens else ~pad_mask)[..., None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.fc((x * kept).sum(1) / kept.sum(1))


@pytest.mark.parametrize(
    ("mask_of_tokens", "past"),
    [(False, "what bitwise_not makes of 'pad_mask'"), (True, "what ne makes of 'tokens'")],
    ids=["given", "made"],
)
def test_a_mask_of_another_name_that_goes_past_all_layers_is_named(mask_of_tokens, past):
    batch = {"tokens": torch.randint(1, 9, (4, 5))}
    if not mask_of_tokens:
        batch["pad_mask"] = torch.zeros(4, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"that comes later: {past} is read behind them. .* is called padding_mask"):
        attach(Padded(mask_of_tokens).eval(), example_input=batch)


def test_a_mask_of_another_name_is_refused_until_it_is_said_what_it_tells():
    batch = {"tokens": torch.randint(1, 9, (4, 5)), "pad_mask": torch.zeros(4, 5, dtype=torch.bool)}
    batch["pad_mask"][1, 3:] = True
    model = Padded(mask_of_tokens=False).eval()
    with pytest.raises(
        ValueError, match="^heads\\['blocks.1'\\]: 'pad_mask' may say where padding is, .*'~pad_mask' where"
    ):
        attach(model, ["blocks.1"], example_input=batch)
    named = attach(model, ["blocks.1"], example_input=batch, extract={"blocks.1": Extract(mask="~pad_mask")})
    assert "over the tokens of ~pad_mask" in named.describe()
    without = attach(model, ["blocks.1"], example_input=batch, extract={"blocks.1": Extract(mask=None)})
    assert "padding included" in without.describe()


def test_what_goes_past_is_not_called_a_mask_where_there_is_one():
    class Also(Padded):
        def forward(self, tokens, padding_mask):
            return super().forward(tokens) + tokens.sum(1, keepdim=True)

    batch = {"tokens": torch.randint(1, 9, (4, 5)), "padding_mask": torch.zeros(4, 5, dtype=torch.bool)}
    with pytest.raises(ValueError, match="comes later: .*'tokens'.* read behind them; wants names of layers"):
        attach(Also(mask_of_tokens=True).eval(), example_input=batch)


def test_labels_in_the_example_are_named():
    batch = {"tokens": torch.randint(1, 9, (4, 5)), "labels": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match="unexpected keyword argument 'labels'; wants .*, without labels$"):
        attach(Padded(True).eval(), example_input=batch)
    with pytest.raises(ValueError, match="positional arguments? but .* were given; wants .*, without labels$"):
        attach(nn.Linear(5, 3).eval(), example_input=(torch.zeros(4, 5), batch["labels"]))
