"""The measurement of checkpoints, on a small state: it compares loaded values, and names every way."""

import pytest

from benchmarks import checkpoint


@pytest.mark.slow
def test_every_way_is_measured_and_compared(tmp_path):
    options = checkpoint.parse_arguments(
        ["--megabytes", "0.2", "-n", "2", "--ranks", "2", "--folder", str(tmp_path)]
    )
    results = {result["way"]: result for result in checkpoint.measured(options)}
    assert list(results) == list(checkpoint.WAYS)
    assert results["torch.save"]["of_torch_save"] == results["copy"]["of_copy"] == 1
    for result in results.values():
        assert 0 < result["still_ms"]["median"] <= result["disk_ms"]["median"]
        assert len(checkpoint.TABLE.row(checkpoint.cells(result)).split()) >= 6
    assert list(tmp_path.iterdir()) == []
