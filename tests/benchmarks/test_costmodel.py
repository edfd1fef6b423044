"""The benchmark of the cost model, on rows that a model with other rates made up."""

import dataclasses
import json

import pytest

from bagua_comm import ByteGrad, DiLoCo, GradientAllReduce, LowPrecisionOnePeer
from bagua_comm.__main__ import main as bagua
from bagua_comm.planning.costmodel import Cluster, Job, Rates, TorchDDP, predict
from bagua_comm.planning.models import MODELS
from benchmarks.training import costmodel

TRUE = dataclasses.replace(Rates(), direct=0.7, ring=0.9, network_s_per_byte=1e-9)
COMPUTE = {"forward_s": 1.0, "backward_s": 2.0, "optimizer_s": 0.5}
MEASURED = {
    "exact": GradientAllReduce(),
    "bytegrad": ByteGrad(),
    "low-precision-one-peer": LowPrecisionOnePeer(),
    "ddp": TorchDDP(),
    "diloco-8": DiLoCo(local_steps=8),
}


def record_of(rate_mbit):
    """What benchmarks.training writes of VGG16 at one rate; steps have a slow one among them."""
    nbytes = sum(layer.nbytes for layer in MODELS["vgg16"])
    job = Job(nbytes, **COMPUTE, layers=MODELS["vgg16"])
    cluster = Cluster(4, bandwidth_gbit=rate_mbit / 1e3, latency_s=100e-6, cores_per_rank=0.5)
    about = {
        "model": "vgg16",
        "model_bytes": nbytes,
        "hosts": 4,
        "ranks_per_host": 1,
        "rate_mbit": rate_mbit,
        "batch": 1,
    }
    rows = [{**about, "algorithm": "alone", "settings": "no communication", "compute": COMPUTE, "median_s": 3.5}]
    for name, method in MEASURED.items():
        step = predict(method, job, cluster, TRUE)
        rows.append(
            {
                **about,
                "algorithm": name,
                "settings": repr(method),
                "compute": None,
                "median_s": 3.5 if name == "diloco-8" else step.step_s,
                "seconds": [*7 * [3.5], 8 * step.step_s - 7 * 3.5],
                "wire_bytes": None if name == "ddp" else step.wire_bytes,
            }
        )
    return {"machine": {"cores": 2}, "arguments": {}, "results": rows}


@pytest.fixture
def files(tmp_path):
    paths = []
    for rate in (500, 1000, 10000):
        paths.append(tmp_path / f"{rate}.json")
        paths[-1].write_text(json.dumps(record_of(rate)))
    return paths


@pytest.mark.needs("matplotlib")
def test_it_calibrates_on_a_few_rows_and_predicts_the_others(files, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--out", str(out / "costmodel"), "--algorithms", "exact,bytegrad,ddp"]
    assert costmodel.main([*map(str, files), *options]) == 0
    record = json.loads((out / "costmodel.json").read_text())
    rows = record["results"]
    assert len(rows) == 15
    marked = [(row["rate_mbit"], row["algorithm"]) for row in rows if row["calibrated"]]
    assert marked == [(rate, name) for rate in (1000, 10000) for name in ("exact", "bytegrad", "ddp")]
    assert record["summary"]["predicted"] == record["summary"]["within"] == 9
    assert record["summary"]["worst"] < 0.1
    assert record["rates"]["direct"] == pytest.approx(0.7, rel=0.1)
    assert all(row["wire_bytes"] in (None, row["predicted_wire_bytes"]) for row in rows)

    report = (out / "costmodel.md").read_text()
    assert "9 of the 9 others are predicted within 20%" in report
    assert report.count("| * |") == 6
    assert "| vgg16 | 4 x 1, 500 Mbit/s | exact | 3.500 |" in report
    assert (out / "costmodel.png").stat().st_size > 10_000
    assert capsys.readouterr().out.strip() == report.strip()

    options = [
        "--nodes",
        "4",
        "--bandwidth",
        "1gbit",
        "--model",
        "vgg16",
        "--step-time",
        "3.5s",
        "--device",
        "cpu",
    ]
    assert bagua(["advise", *options, "--rates", str(out / "costmodel.json")]) == 0


def test_missing_results_are_named(files, tmp_path, capsys):
    def error(*options):
        assert costmodel.main([*map(str, options), "--out", str(tmp_path / "costmodel")]) == 2
        return capsys.readouterr().err

    assert "vgg16 at 2000 Mbit/s has no row bytegrad, exact; there is vgg16 at 1000" in error(
        files[1], "--rates", 2000
    )
    assert "no_such_file" in error("no_such_file")

    files[0].write_text("{}")
    assert "one has no 'results'" in error(files[0])

    record = record_of(1000)
    record["results"][1]["settings"] = "print('hello')"
    files[0].write_text(json.dumps(record))
    assert "exact: \"print('hello')\" is not an algorithm" in error(files[0])

    files[0].write_text(json.dumps({**record, "results": record["results"][1:]}))
    assert "there is no row 'alone' for vgg16" in error(files[0])


def test_where_nothing_is_left_to_predict_nothing_is_said(files, tmp_path):
    record = record_of(1000)
    record["results"] = record["results"][:3]
    files[0].write_text(json.dumps(record))
    assert costmodel.main([str(files[0]), "--out", str(tmp_path / "costmodel"), "--rates", "1000"]) == 0
    assert "others" not in (tmp_path / "costmodel.md").read_text()
