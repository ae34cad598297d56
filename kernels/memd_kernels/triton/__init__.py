"""The kernels in Triton, for CUDA; one file for each.

A module has the kernel, its launcher, which has the signature of the function of the same name in
`memd_kernels.reference`, and `compile_cases`, which tells `memd_kernels.compile` for which shapes
the kernel can be compiled without a GPU. No launcher waits for the device, and all may be captured
in CUDA graphs. Importing the modules needs triton; on a CPU that it is not installed on, nothing
imports them.
"""
