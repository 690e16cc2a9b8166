"""Batches made by DataLoader workers beside the steps that use them (family feed of harness/families.py)."""

from harness.asv_suite import FEED

__all__ = ["FEED"]
