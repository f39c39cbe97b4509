"""MLA attention requirements."""
