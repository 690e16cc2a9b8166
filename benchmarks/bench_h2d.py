"""Host-to-device copies beside the GEMMs that read them (family h2d of harness/families.py)."""

from harness.asv_suite import H2D

__all__ = ["H2D"]
