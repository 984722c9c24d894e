"""An SGLang plug-in that makes a CPU server take the way of a CUDA server: SGLang's Triton backend as this package
extends it, and Triton kernels for what is copied, all in the interpreter.

The process must run with TRITON_INTERPRET=1 from before triton is first imported. Put this folder on PYTHONPATH of the
server under test, and nowhere else.
"""

from __future__ import annotations


def register():
    import triton

    from sglang_blockreuse.kernels import cpu_rotate_copy, dispatch
    from sglang_blockreuse.layers import backend

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("blockreuse_rehearsal: set TRITON_INTERPRET=1 before triton is imported")
    backend.base_of = lambda kernels, machine: "triton"
    cpu_rotate_copy.covers = cpu_rotate_copy.covers_table = lambda tensor: False
    dispatch.refusal_of_triton = lambda operands: None
