"""Triton kernels on a CPU: import this before any kernel, in the test files that run them."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from triton.runtime import interpreter


def _allow_numpy_2_4() -> None:
    """Triton 3.6 turns one-element arrays into loop bounds in a way numpy >= 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_allow_numpy_2_4()
