"""Sharded training (FSDP2) beside PyTorch's own communication: steps, memory, and losses."""
