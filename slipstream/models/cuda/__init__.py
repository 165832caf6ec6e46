"""The dense decoder on an accelerator: Triton kernels and the runner that strings them together."""
