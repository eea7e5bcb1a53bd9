"""What serves a device and a dtype, and what is said where the compiled kernels cannot."""

from __future__ import annotations

import pytest
import torch

from loramux import BackendUnavailable, backend
from loramux.collect_env import collect_env

CPU = torch.device("cpu")
DEFAULT = "80-real;90a-real;100-real;120"  # CMakeLists.txt


def test_the_kernels_serve_the_cpu():
    for dtype in backend.NATIVE_DTYPES:
        assert backend.resolve_backend("auto", CPU, dtype) == "native"
    assert backend.resolve_backend("torch", CPU, torch.bfloat16) == "torch"


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ("cpu", torch.float64, "not torch.float64"),
        ("meta", torch.float32, "no kernel for the device 'meta'"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused_or_logged(device, dtype, said, caplog):
    backend._log_fallback.cache_clear()
    device = torch.device(device)
    with pytest.raises(BackendUnavailable, match=f"{said}.*; use 'auto' or 'torch'"):
        backend.resolve_backend("native", device, dtype)
    for _ in range(2):
        assert backend.resolve_backend("auto", device, dtype) == "torch"
    (message,) = caplog.messages
    assert said in message


@pytest.mark.parametrize(
    ("architectures", "capability", "is_served"),
    [
        (DEFAULT, (8, 0), True),
        (DEFAULT, (8, 9), True),
        (DEFAULT, (9, 0), True),
        (DEFAULT, (10, 3), True),
        (DEFAULT, (12, 1), True),
        (DEFAULT, (13, 0), True),  # from the PTX of 120
        (DEFAULT, (7, 5), False),
        (DEFAULT, (11, 0), False),
        ("90a-real", (8, 0), False),
        ("90a-real", (10, 0), False),
        ("90a-virtual", (10, 0), False),
        ("89-real", (8, 6), False),
        ("80-virtual", (9, 0), True),
        ("native", (8, 0), True),
        ("90a-real", None, True),
    ],
)
def test_a_device_without_code_for_it_is_known_ahead_of_a_launch(
    architectures, capability, is_served, monkeypatch
):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
    monkeypatch.setattr(backend, "build_facts", lambda: {"CUDA kernels for": architectures})
    reason = backend.why_no_cuda(capability)
    assert (reason is None) == is_served
    assert is_served or f"built for {architectures}" in reason


def test_a_build_without_cuda_kernels_says_so(monkeypatch):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    assert backend.why_no_cuda((9, 0)) == "this loramux was built without CUDA kernels"


def test_a_report_says_what_was_built_and_what_serves_the_cpu():
    facts = collect_env()
    assert facts["CPU"] == "native"
    assert {"C++ compiler", "CUDA compiler", "CUDA kernels for"} <= facts.keys()
