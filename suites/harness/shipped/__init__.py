"""GGUF code as shipped, callable without a GPU, a server or other processes: vLLM's plugin, and vLLM 0.16.0's own."""
