"""Networks, and how their passes are computed fast.

* `networks`: WRN, ResNet-18, a small CNN, an MLP, and networks of your own; batch norm over the rows of all ranks.
* `casts`: weights in bfloat16, cast once a step. `fused`: batch norm and ReLU in one (Triton: `fused_kernels`).
* `convolution`: convolutions, with kernels of our own where cuDNN chooses badly (Triton: `convolution_kernels`).
* `fine_tuning`: a pretrained backbone that goes on learning; `frozen_norm`: its kernels (`frozen_norm_kernels`).
* `cuda`: networks side by side on one card, CUDA graphs.
"""
