"""The asv suite: one class per family, one param `case`. Cases come from harness/suites.py."""
