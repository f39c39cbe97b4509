"""What an implementation's kernels need of a target: shared memory, registers, instructions."""
