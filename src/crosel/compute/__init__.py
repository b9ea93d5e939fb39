"""How a step is computed fast, and by several ranks as by one. What it computes is in `nets` and `methods`.

* `casts`: weights in bfloat16, cast once a step; the `Conv2d` and `Linear` that ask for them.
* `fused`: batch norm and ReLU in one (its Triton kernels: `fused_kernels`).
* `lanes`: networks side by side on one card.
* `recording`: work that is recorded once and replayed (CUDA graphs); `forward`: passes without gradient, so replayed.
* `synchronised`: batch norm over the rows of all ranks.
"""
