"""``python -m loramux.collect_env``: what a report of a fault needs to say about the machine."""

from __future__ import annotations

import platform

import torch

from . import __version__
from .backend import build_facts, resolve_backend
from .errors import BackendUnavailable


def collect_env() -> dict[str, str]:
    """Versions, what is compiled in, and which devices the kernels serve here."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "loramux": __version__,
        **build_facts(),
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        **{_name(device): _backend(device) for device in devices},
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _backend(device: torch.device) -> str:
    try:
        return resolve_backend("native", device, torch.bfloat16)
    except BackendUnavailable as error:
        return f"torch ({error})"


if __name__ == "__main__":
    for key, value in collect_env().items():
        print(f"{key + ':':20} {value}")
