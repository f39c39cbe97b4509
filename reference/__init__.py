"""The oracle: Multi-head Latent Attention in plain PyTorch, for float64 and free of any kernel code."""
