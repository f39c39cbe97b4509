"""GGUF: files written, mutated and fuzzed, and what the GGUF conformance tests share."""
