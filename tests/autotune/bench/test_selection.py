"""The benchmark's choice of variants, with the baselines of their ratios."""

from auxhead.autotune.bench.run import chosen_variants
from auxhead.autotune.bench.variants import catalogue
from auxhead.autotune.measuring.cells import resnet_cell


def test_chosen_variants_bring_their_baselines():
    cell = resnet_cell("resnet18", "float16", 8, 10, "stages")
    names = [variant.name for variant in chosen_variants(cell, "layer2", ["polled@cudnn"])]
    assert names == ["graph-bare@cudnn", "truncated@cudnn", "polled@cudnn"]
    assert chosen_variants(cell, "layer2", ["compile-*"]) == []
    everything = [variant.name for variant in chosen_variants(cell, "never", [])]
    assert "compile-naive-reduce-overhead@as_is" in everything and "gated@cudnn" in everything
    assert not [name for name in everything if "max-autotune" in name or name.endswith("@inductor")]
    names = [variant.name for variant in catalogue(resnet_cell("resnet18", "float16", 32, 10, "stages"))]
    assert "compile-bare-max-autotune@as_is" in names and len(set(names)) == len(names)
