"""Compiles whole kernels only, in processes that exit afterwards.

Numba normally optimizes each function that a kernel calls, and generates machine code and a
Python wrapper for each function. Then Numba does the same for the kernel, into which all these
functions are linked. In this module, the called functions are only typed, lowered and linked.
Compilation then takes a fifth to a half of the time and produces less code.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target


class _Code(JITCodeLibrary):
    """The code of one function before it is linked into the kernel."""

    # The name of the only kernel that this process compiles.
    kernel = ""

    def _optimize_final_module(self) -> None:
        if self.name == self.kernel:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self.name == self.kernel:
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._finalized = True


class _Context(CPUContext):
    """Numba's CPU context without the wrappers that let Python call the functions of a kernel."""

    def create_cpython_wrapper(self, *args: Any, **options: Any) -> None:
        pass

    def create_cfunc_wrapper(self, library: Any, *args: Any) -> None:
        if library.name == _Code.kernel:
            super().create_cfunc_wrapper(library, *args)

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        # Numba never calls this object. Numba identifies a function by the object, so each function
        # needs a new object.
        return [].append


def prepare() -> None:
    """Do the work that all compilations share, before the compiling processes are forked."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def become_lean(kernel: str) -> None:
    """Let this process compile only the kernel of this name.

    Afterwards the process can no longer run code that Numba compiles.
    """
    context = cpu_target.target_context
    _Code.kernel = kernel
    context.codegen()._library_class = _Code
    context.__class__ = _Context
