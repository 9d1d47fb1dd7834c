"""The device that a process of a run computes on, looked for before anything is begun."""

import importlib.metadata
import re

from phalanx.errors import ConfigError

_DEVICE = re.compile(r"(cpu|cuda)(:[0-9]{1,3})?", re.ASCII)


def check_build(device: str, where: str) -> None:
    """Refuse a GPU where the installed torch was built without any; imports no torch.

    Args:
        device: "cpu" or "cuda", with or without a number.
    """
    if not device.startswith("cuda"):
        return
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.endswith("+cpu"):
        raise _device_error(
            device, where, f"torch {version} is built for CPUs alone", "install a build of torch with CUDA"
        )


def check_device(device: str, where: str) -> None:
    """Refuse a device that torch does not find on this machine.

    Args:
        device: "cpu" or "cuda", with or without a number; every other name is refused.
    """
    if _DEVICE.fullmatch(device) is None:
        raise _device_error(device, where, "is no device of Phalanx", '"cuda", "cuda:1" ...')
    check_build(device, where)
    if not device.startswith("cuda"):
        return
    import torch  # noqa: PLC0415 - a run on CPUs is checked without it

    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(device.partition(":")[2] or 0)
    if not device_count:
        raise _device_error(
            device, where, f"torch {torch.__version__} finds no CUDA device here", "run where there is one"
        )
    if number >= device_count:
        last = f"cuda:0 to cuda:{device_count - 1}" if device_count > 1 else "cuda:0"
        raise _device_error(device, where, f"torch finds {device_count} here, {last}", "take one of these")


def _device_error(device: str, where: str, found: str, instead: str) -> ConfigError:
    return ConfigError(f'{where} = "{device}": {found}; set {where} = "cpu", or {instead}').with_facts(
        code="PHX-C009", key=where, found=device, expected="cpu", do=instead
    )
