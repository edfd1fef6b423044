"""The benchmark of the error of one coding."""

import doctest
import inspect
import json

import numpy as np
import pytest
import torch

import bagua_comm
from bagua_comm import Codec
from benchmarks import codec_quality
from benchmarks.codec_quality import TRAININGS, codec_of, error_of


def test_examples_in_docstrings():
    assert doctest.testmod(codec_quality).failed == 0


def test_all_codecs_are_compared_by_default():
    names = [type(codec).__name__ for codec in codec_quality.parse_arguments([]).codec]
    classes = [value for name in bagua_comm.__all__ if inspect.isclass(value := getattr(bagua_comm, name))]
    assert set(names) == {each.__name__ for each in classes if issubclass(each, Codec) and each is not Codec}


def test_the_error_is_relative_in_the_euclidean_norm():
    x = np.array([3.0, 4.0], np.float32)
    assert error_of(codec_of("Float16()"), x) == 0
    # 7 is the largest code, so that codes are integers: 2.4 becomes 2.
    x = np.array([2.4, 7.0], np.float32)
    assert error_of(codec_of("Int4(rotate=1)"), x) == pytest.approx(0.4 / np.hypot(2.4, 7))


@pytest.mark.parametrize("text", ["Int4", "Int5()", "Int4(rounding='up')", "1 +", "Quantized()"])
def test_an_expression_that_is_no_codec_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        codec_quality.parse_arguments(["--codec", "Float16()", text])
    assert f"{text!r} is no codec" in capsys.readouterr().err


@pytest.fixture
def one_thread():
    """PyTorch's threads wait for each other while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_gradients_are_those_of_all_parameters_and_the_same_in_every_run(one_thread):
    training = TRAININGS["gru"]
    first, second = (list(training.gradients([1, 2])) for _ in range(2))
    assert first[0].size == sum(parameter.numel() for parameter in training.make_model().parameters())
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
    assert first[0].tobytes() != first[1].tobytes()
    assert np.isfinite(first).all()


@pytest.mark.slow
@pytest.mark.needs("sklearn")
def test_the_table_has_what_the_record_has(tmp_path, capsys, one_thread):
    arguments = ["--codec", "MinMaxUInt8(block=64)", "BFloat16()", "--elements", "4096", "--steps", "1", "2"]
    assert codec_quality.main([*arguments, "--out", str(tmp_path / "quality")]) == 0

    results = json.loads((tmp_path / "quality.json").read_text())["results"]
    text = (tmp_path / "quality.md").read_text()
    assert [result["data"] for result in results[::2]] == ["normal", "student", "lognormal", *TRAININGS]
    assert [len(result["errors"]) for result in results[::2]] == [1, 1, 1, 2, 2, 2]
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| `")}
    assert rows["| `MinMaxUInt8(block=64, eps=0.0)`"][1] == f"{8 * (512 + 4096) / 4096:.2f}"
    for i, result in enumerate(results):
        assert result["error"] == np.mean(result["errors"])
        cell = rows[f"| `{result['codec']}`"][2 + i // 2].removesuffix(" |")
        assert float(cell) == pytest.approx(result["error"], rel=5e-3)
        assert 0.001 < result["error"] < 0.11
    assert "--codec 'MinMaxUInt8(block=64, eps=0.0)' 'BFloat16()' --elements 4096 --steps 1 2\n" in text
    assert str(tmp_path) not in text
    assert capsys.readouterr().out.count("BFloat16()") >= 6
