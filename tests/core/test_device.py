"""Descriptions of devices: the table, the generic device, and the devices that torch and JAX see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onlinesoftmax.core.device import (
    KNOWN,
    MULTIPROCESSORS,
    SMALLEST,
    UNKNOWN_BANDWIDTH,
    UNKNOWN_L2,
    Device,
    generic,
    known,
    model_of,
)

FACTS = (
    "name", "kind", "compute_capability", "multiprocessors", "shared_memory", "registers", "threads", "l2",
    "bandwidth", "source",
)  # fmt: skip


def multiprocessor_of(device: Device) -> tuple[int, int, int]:
    return device.shared_memory, device.registers, device.threads


def test_names_are_forgiving() -> None:
    assert known("RTX 4090") is known("rtx-4090") is KNOWN["rtx4090"]
    with pytest.raises(
        ValueError, match=r"unknown device 'h300'; known devices: h200, h100.*`onlinesoftmax tune` meas"
    ):
        known("h300")


@pytest.mark.parametrize("name", KNOWN)
def test_every_entry_is_complete(name: str) -> None:
    entry = KNOWN[name]
    assert entry.source
    assert entry.bandwidth > 0
    assert tuple(vars(entry)) == FACTS
    if entry.kind == "cuda":
        assert entry.multiprocessors > 0
        assert multiprocessor_of(entry) == MULTIPROCESSORS[entry.compute_capability]
        assert entry.arch == f"sm_{entry.compute_capability[0]}{entry.compute_capability[1]}"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", None),
        ("NVIDIA H20", None),
    ],
)
def test_models_by_the_name_of_the_driver(name: str, model: str | None) -> None:
    assert model_of(name) is (None if model is None else KNOWN[model])


def test_a_gpu_of_an_unknown_model_has_the_multiprocessor_of_its_compute_capability() -> None:
    device = generic("NVIDIA L40S", (8, 9), 142)
    assert (device.name, device.arch, device.multiprocessors) == ("NVIDIA L40S", "sm_89", 142)
    assert multiprocessor_of(device) == multiprocessor_of(KNOWN["l4"])
    assert (device.l2, device.bandwidth) == (UNKNOWN_L2, UNKNOWN_BANDWIDTH)
    assert "assumed" in device.source


def test_a_gpu_of_an_unknown_compute_capability_has_the_smallest_multiprocessor() -> None:
    device = generic("NVIDIA X900", (13, 0), 200)
    assert multiprocessor_of(device) == SMALLEST
    assert "least of any GPU" in device.source
    for each in MULTIPROCESSORS.values():
        assert all(least <= number for least, number in zip(SMALLEST, each, strict=True))


def test_a_gpu_of_a_known_model_has_its_bandwidth_and_cache() -> None:
    device = generic("NVIDIA H100 80GB HBM3", (9, 0), 132)
    assert (device.l2, device.bandwidth) == (KNOWN["h100"].l2, KNOWN["h100"].bandwidth)
    assert KNOWN["h100"].source in device.source


# torch


def test_the_device_of_a_cpu_tensor() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from onlinesoftmax.torch.device import from_torch, here

    assert from_torch("cpu") is from_torch("mps") is KNOWN["cpu"]
    assert here().kind in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("name", "clock_mhz", "bus_bits", "bandwidth"),
    [
        ("NVIDIA H200", 3201, 6144, KNOWN["h200"].bandwidth),
        ("NVIDIA H200", 0, 0, KNOWN["h200"].bandwidth),
        ("NVIDIA H100 80GB HBM3", 2619, 5120, KNOWN["h100"].bandwidth),
        ("NVIDIA H100 PCIe", 1593, 5120, 0.9 * 2039),
        ("NVIDIA A100-SXM4-80GB", 1593, 5120, KNOWN["a100"].bandwidth),
        ("NVIDIA A100-PCIE-40GB", 1215, 5120, 0.9 * 1555),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 9001, 256, 0.9 * 576),
        ("NVIDIA H20", 0, 0, UNKNOWN_BANDWIDTH),
    ],
)
def test_a_driver_s_bandwidth_comes_before_that_of_another_card_of_the_model(
    monkeypatch: pytest.MonkeyPatch, name: str, clock_mhz: int, bus_bits: int, bandwidth: float
) -> None:
    """The clocks and widths give the bandwidths of the datasheets; they are 0 where torch lacks them."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from onlinesoftmax.torch.device import from_torch

    properties = SimpleNamespace(
        name=name, major=9, minor=0, multi_processor_count=100, shared_memory_per_block_optin=1, L2_cache_size=1,
        regs_per_multiprocessor=1, max_threads_per_multi_processor=1, memory_clock_rate=1000 * clock_mhz,
        memory_bus_width=bus_bits,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert from_torch.__wrapped__("cuda").bandwidth == pytest.approx(bandwidth, rel=1e-3)


@pytest.mark.gpu
def test_the_driver_agrees_with_the_table() -> None:
    import torch

    from onlinesoftmax.torch.device import from_torch

    device = from_torch("cuda")
    properties = torch.cuda.get_device_properties(0)
    assert (device.name, device.multiprocessors) == (properties.name, properties.multi_processor_count)
    if device.compute_capability in MULTIPROCESSORS:
        assert multiprocessor_of(device) == MULTIPROCESSORS[device.compute_capability]
    if "H200" in device.name:
        for fact in ("compute_capability", "multiprocessors", "shared_memory", "registers", "threads", "bandwidth"):
            assert getattr(device, fact) == getattr(KNOWN["h200"], fact), fact


# JAX


@pytest.fixture
def jax_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test, without devices that it has cached."""
    pytest.importorskip("jaxlib", reason="jax is not installed")
    from onlinesoftmax.jax import device

    device.from_jax.cache_clear()
    device._gpu.cache_clear()
    yield device
    device.from_jax.cache_clear()
    device._gpu.cache_clear()


def jax_has(monkeypatch: pytest.MonkeyPatch, *gpus: Any) -> None:
    import jax

    def devices(platform: str) -> tuple[Any, ...]:
        if not gpus:
            raise RuntimeError(f"no {platform}")
        return gpus

    monkeypatch.setattr(jax, "devices", devices)


def test_without_a_gpu_jax_is_on_the_cpu(jax_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jax_has(monkeypatch)
    assert jax_device.from_jax() is KNOWN["cpu"]
    unnamed = jax_device.to_lower_for()
    assert unnamed is jax_device.UNNAMED_GPU
    assert (unnamed.compute_capability, unnamed.shared_memory) == ((9, 0), 227 << 10)
    assert "not named" in unnamed.name


def test_a_gpu_that_jax_has(jax_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jax_has(monkeypatch, SimpleNamespace(device_kind="NVIDIA L40S", compute_capability="8.9", core_count=142))
    assert jax_device.from_jax() is jax_device.to_lower_for()
    assert jax_device.from_jax() == generic("NVIDIA L40S", (8, 9), 142)


def test_a_mesh_names_the_gpu_to_lower_for(jax_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    if not hasattr(jax.sharding, "AbstractDevice"):
        pytest.skip("this version of JAX has no abstract devices")
    jax_has(monkeypatch)

    def named(kind: str) -> Any:
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax_device.to_lower_for()

    assert named("NVIDIA H200") is KNOWN["h200"]
    assert named("NVIDIA X900") is named("cpu") is jax_device.UNNAMED_GPU
