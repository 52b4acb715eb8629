"""The llama.cpp runtime in the table of runtimes: it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.option import declared
from samkv_integrations.options import LlamaCppOptions
from samkv_integrations.runtimes.base import Runtime, RuntimeKind
from samkv_integrations.runtimes.llama_cpp.library.binding import installed


def _load(
    name: str, *, device: str | None = None, n_gpu_layers: int | None = None, **options: Any
) -> Runtime:
    """See `load_model`. Raises MissingExtra without a package that brings llama.cpp.

    device: ``cpu`` is ``n_gpu_layers=0``, and others are for transformers.
    """
    if device is not None:
        if device != "cpu":
            raise InvalidOption(
                Given("device", device),
                "; llama.cpp takes 'auto' or 'cpu', and the number of layers on a graphics card as "
                "n_gpu_layers (-1 for all), with main_gpu and tensor_split",
            )
        if n_gpu_layers:
            raise InvalidOption(
                Given("n_gpu_layers", n_gpu_layers), " with ", Given("device", device),
                "; leave out either",
            )  # fmt: skip
        n_gpu_layers = 0
    from samkv_integrations.runtimes.llama_cpp.loading import load_model

    return load_model(name, n_gpu_layers=n_gpu_layers, **options)


LLAMA_CPP = RuntimeKind(
    name="llama_cpp",
    load=_load,
    options=("device", "n_threads", *declared(LlamaCppOptions)),
    is_installed=lambda: installed() is not None,
)
