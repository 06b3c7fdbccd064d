"""What a frame costs: every part by type and rows, and sums that fit."""

from pathlib import Path

from bench.harness.results import read
from bench.steps.cpu import main
from stretto.testing.qwen3_tts import write_tiny


def test_every_part_is_timed(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out.json"
    write_tiny(model)
    assert (
        main(
            [
                "--model",
                str(model),
                "--dtypes",
                "float32",
                "--rows",
                "1",
                "2",
                "--frames",
                "2",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    found = read(out)
    assert [(line["dtype"], line["rows"]) for line in found["table"]] == [
        ("float32", 1),
        ("float32", 2),
    ]
    assert len(found["samples"]) == 3 * 2 * 2
    assert {sample[1] for sample in found["samples"]} == {"frame", "predictor", "vocoder"}
    assert all(line["predictor_ms"] > 0 and line["vocoder_ms"] > 0 for line in found["table"])
