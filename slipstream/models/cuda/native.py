"""Kernels in CUDA C++, compiled where they run and launched early.

For the two places where Triton's code leaves a quarter of the bandwidth idle (docs/log.md). They
need NVIDIA's compiler as a library (NVRTC) and the package cuda-bindings; where these are missing,
kernels in Triton or the stock ones serve, and `slipstream doctor` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cuda.launch import is_hopper

Argument = Tensor | int | float | Any
"""A tensor's address, a 32-bit number, or an object of the driver's that knows its own address."""


@cache
def available(device: torch.device) -> bool:
    """Whether this device can run such kernels and this Python can compile them."""
    return is_hopper(device) and torch.cuda.get_device_capability(device)[0] == 9 and can_compile()


@cache
def can_compile() -> bool:
    """Whether compiler and bindings are there and answer."""
    try:
        from cuda.bindings import driver, nvrtc

        return not int(nvrtc.nvrtcVersion()[0]) and not int(driver.cuDriverGetVersion()[0])
    except (ImportError, RuntimeError, OSError):
        return False


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function. `room`: bytes of dynamic shared memory a program has."""

    function: Any
    threads: int
    room: int

    def launch(self, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        """Launch on the current stream; the kernel itself waits for the one in front of it."""
        from cuda.bindings import driver

        early = driver.CUlaunchAttribute()
        kinds = driver.CUlaunchAttributeID
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.room
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [early], 1
        held = [_held(a) for a in arguments]
        addresses = (ctypes.c_void_p * len(held))(*(address for _, address in held))
        check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(addresses), 0))


def _held(argument: Argument) -> tuple[Any, int]:
    """Something that keeps an argument's value alive, and the address of that value."""
    if hasattr(argument, "getPtr"):
        return argument, argument.getPtr()
    if isinstance(argument, Tensor):
        value: Any = ctypes.c_void_p(argument.data_ptr())
    else:
        value = ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)
    return value, ctypes.addressof(value)


@cache
def compiled(
    name: str,
    device: torch.device,
    defined: tuple[tuple[str, int], ...],
    *,
    threads: int,
    room: int,
    head: str = "",
) -> Kernel:
    """The kernel `name` of `name.cu` beside this module, for `device`.

    `defined`: what the source leaves to its caller; `head`: text put in front of it. Raises
    `RuntimeError` with the compiler's words.
    """
    from cuda.bindings import driver

    source = head + resources.files(__package__).joinpath(f"{name}.cu").read_text()
    image = binary(name, source, [f"-D{key}={value}" for key, value in defined])
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # now there is a context
        module = check(driver.cuModuleLoadData(image))
    function = check(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, most, room))
    return Kernel(function, threads, room)


def binary(name: str, source: str, options: Sequence[str]) -> bytes:
    """Machine code for compute capability 9.0."""
    from cuda.bindings import nvrtc

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    flags = [o.encode() for o in ("--gpu-architecture=sm_90a", "-std=c++17", *options)]
    error = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    if int(error):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name}.cu does not compile: {log.decode()}")
    image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def check(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver or the compiler gave, or an error that names its code."""
    if int(answer[0]):
        raise RuntimeError(f"CUDA: {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None
