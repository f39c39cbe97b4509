"""What a registered operator promises its caller, checked from the outside: see docs/contracts.md."""
