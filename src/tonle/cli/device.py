"""Whether there can be such a device here, told before a model is fetched and torch takes seconds to load.

Does: refuse what is certainly not there. Does not: guarantee the rest; the engine asks torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

from tonle.errors import ConfigError

# NVIDIA's driver, the same under WSL, AMD's driver (torch calls its GPUs cuda, too).
_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_BUILT_FOR = re.compile(r"^(?:cuda|hip)\b[^=]*=\s*['\"]", re.MULTILINE)  # in torch/version.py; else `= None`


def check_device(name: str) -> None:
    """Raises `ConfigError`."""
    if not name.startswith("cuda"):
        return
    if not _torch_has_gpus():
        why = "this torch is built for CPUs only"
    elif not _machine_may_have_gpus():
        why = "this machine shows no GPU"
    else:
        return
    raise ConfigError(f"there is no device {name}: {why}. Use --device cpu, or auto", param="device")


def _torch_has_gpus() -> bool:
    """True where it cannot be told. Reads torch's own note, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    note = Path(spec.origin).with_name("version.py")
    return not note.is_file() or bool(_BUILT_FOR.search(note.read_text(encoding="utf-8")))


def _machine_may_have_gpus() -> bool:
    """A driver's file or library is enough: a refusal must be certain."""
    if sys.platform != "linux" or any(Path(node).exists() for node in _NODES):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
