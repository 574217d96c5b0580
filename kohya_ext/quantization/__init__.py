"""Linear layers with 8-bit frozen weights: rotation, quantization, products, Triton kernels and the layer."""
