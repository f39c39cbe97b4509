"""Tests of the PTX emulator, instruction by instruction, against exact arithmetic on Python integers and fractions."""
