"""The table of devices, and the one query of the hardware."""

from __future__ import annotations

import pytest
import torch

from onlinesoftmax.core import device


def test_names_are_forgiving() -> None:
    assert device.known("RTX 4090") is device.known("rtx-4090") is device.KNOWN["rtx4090"]
    with pytest.raises(ValueError, match=r"unknown device 'h300'; known devices: h200, h100"):
        device.known("h300")


@pytest.mark.parametrize("name", device.KNOWN)
def test_every_entry_is_whole(name: str) -> None:
    entry = device.KNOWN[name]
    assert entry.source
    assert entry.bandwidth > 0
    if entry.kind == "cuda":
        assert entry.multiprocessors > 0
        assert entry.registers == 65536
        assert 48 << 10 < entry.shared_memory < 256 << 10
        assert entry.arch == f"sm_{entry.compute_capability[0]}{entry.compute_capability[1]}"


def test_a_cpu_tensors_device() -> None:
    assert device.from_torch("cpu") is device.KNOWN["cpu"]
    assert device.here().kind in ("cpu", "cuda")


@pytest.mark.gpu
def test_the_driver_agrees_with_the_table() -> None:
    here = device.from_torch("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert (here.name, here.multiprocessors) == (properties.name, properties.multi_processor_count)
    if "H200" in here.name:
        table = device.KNOWN["h200"]
        for field in ("compute_capability", "multiprocessors", "shared_memory", "registers", "threads", "bandwidth"):
            assert getattr(here, field) == getattr(table, field), field
