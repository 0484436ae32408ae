"""The same functions for CUDA tensors, in Triton: each module mirrors one of `kernels`, launchers and kernels only.
Several of them use `cublas`, plain matrix products, and `split`, float32 numbers in BF16 parts.

`kernels` imports a module of these when it meets its first CUDA tensor, because Triton is installed only where there
is a GPU. Shapes, dtypes, roundings and sources are said once, at the function of `kernels` with the same name. Tile
sizes are constants and not tuned at run time: another tile could sum in another order and give other bits.
"""
