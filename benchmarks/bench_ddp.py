"""Gradients all-reduced in buckets beside the backward that makes them (family ddp of harness/families.py)."""

from harness.asv_suite import DDP

__all__ = ["DDP"]
