"""benchmarks.gpu.variants: kernels that are compiled in other ways."""

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
