"""The benchmark's choice of variants, and ratios to their baselines."""

from auxhead.autotune.bench.measure import paired_with
from auxhead.autotune.bench.run import chosen_variants
from auxhead.autotune.bench.variants import Variant, catalogue
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


def test_ratios_are_to_the_same_trunk_of_the_same_run():
    def times(host, device):
        return {"median": host}, {"median": device}

    timed = {
        "graph-bare@cudnn": times(200.0, 190.0), "truncated@cudnn": times(70.0, 60.0),
        "graph-bare@as_is": times(300.0, 290.0), "polled@cudnn": times(75.0, 66.0),
    }  # fmt: skip
    polled = Variant("polled@cudnn", lambda *_: None, "cudnn")
    bare, floor = paired_with(polled, timed)
    assert bare == {
        "role": "bare", "variant": "graph-bare@cudnn", "host_us": 200.0, "host_ratio": 75 / 200, "device_us": 190.0,
        "device_ratio": 66 / 190,
    }  # fmt: skip
    assert floor["variant"] == "truncated@cudnn" and floor["host_us"] == 70.0
    assert paired_with(polled, {"polled@cudnn": times(1.0, 1.0)}) == []
