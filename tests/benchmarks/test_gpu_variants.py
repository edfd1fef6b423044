"""benchmarks.gpu.variants: kernels that are compiled in other ways."""

import json

import pytest

from benchmarks.gpu import variants

pytestmark = pytest.mark.parametrize("device", ["lazy"], indirect=True)


def text():
    from bagua_comm.kernels import device

    return device.source("minmax.cu")


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_each_variant_changes_the_kernels(device, name):
    assert (variants.changed(text(), variants.VARIANTS[name]) == text()) is (name == "as it is")


def test_words_that_the_kernels_no_longer_have_are_named(device):
    with pytest.raises(ValueError, match=r"minmax\.cu has no 'a former word' any more"):
        variants.changed(text(), [("a former word", "")])


@pytest.mark.slow
def test_each_call_of_a_variant_is_timed_beside_a_copy(device, monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "VARIANTS", {"as it is": ()})
    monkeypatch.setattr(variants, "DTYPES", ("float32",))
    variants.main(["--out", str(tmp_path / "out.json"), "--shrink", "1024", "--iterations", "1"])
    found = json.loads((tmp_path / "out.json").read_text())["results"]["float32"]
    calls = [f"{verb}: as it is" for verb in ("encode", "decode", "combine 2", "combine 4", "combine 8")]
    assert [*found] == ["copy", *calls]
    assert min(row["us"] for row in found.values()) > 0
