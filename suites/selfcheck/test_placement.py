"""Workers spread over the visible GPUs, under an outer CUDA_VISIBLE_DEVICES too."""

from pathlib import Path

import pytest

from mla_conformance.suites.harness import placement


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``nvidia-smi`` that lists four GPUs."""
    listing = "".join(f"GPU {i}: NVIDIA RTX PRO 6000 (UUID: GPU-{i:04d})\\n" for i in range(4))
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\nprintf "{listing}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        (" 3 , 1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("GPU-0001", ["GPU-0001"]),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_the_outer_variable_decides_what_is_visible(chosen: str | None, expected: list[str]) -> None:
    """The list ends at the first entry that names no device, as CUDA reads it."""
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert placement.visible_devices(environ) == expected


def test_no_gpu_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable alone makes no GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert placement.visible_devices({"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_more_workers_than_gpus_share() -> None:
    """Round robin; a number from the visible list, never the worker's own number."""
    devices = [placement.device_of_worker(f"gw{i}", ["5", "7"]) for i in range(5)]
    assert devices == ["5", "7", "5", "7", "5"]
    assert placement.device_of_worker(None, ["5"]) is None
    assert placement.device_of_worker("gw0", []) is None


def test_a_strange_worker_name_is_refused() -> None:
    """The name is in the message."""
    with pytest.raises(ValueError, match="main"):
        placement.device_of_worker("main", ["0"])
