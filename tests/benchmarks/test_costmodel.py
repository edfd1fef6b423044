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


@pytest.mark.needs("matplotlib")
def test_it_calibrates_on_a_few_rows_and_predicts_the_others(tmp_path):
    files, out = [tmp_path / f"{rate}.json" for rate in (500, 1000, 10000)], tmp_path / "out"
    for file in files:
        file.write_text(json.dumps(record_of(int(file.stem))))
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
    options = "advise --nodes 4 --bandwidth 1gbit --model vgg16 --step-time 3.5s --device cpu --rates"
    assert bagua([*options.split(), str(out / "costmodel.json")]) == 0
