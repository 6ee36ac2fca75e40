"""What figures depend on beside the code: the device, its driver, libraries."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fagen.version import VERSION


def device_name(device: torch.device) -> str:
    """The name of a GPU, or ``emulator``."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "emulator"


def versions() -> Mapping[str, str]:
    """Versions by name."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "fagen": VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(cudnn) if cudnn else "none",
    }
