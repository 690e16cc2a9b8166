"""Overlap harness: do copies, compute and collectives really run at the same time, and did it get worse?

The way of the data, low layers first (tests/test_layering.py holds every module to it)::

    case, families, suites, profiles            what to measure; no torch
    backends, workloads                         how one sample is made; torch lives here
    measure, controls, worker                   one launch: rounds of samples in one fresh process
    supervise                                   the parent: starts launches, keeps the record
    record, statistics, theory, metrics         what was measured and what it means; no torch
    machine, telemetry                          on what it was measured
    tables, figures, report, asv_store          sinks; they only render records
    cli                                         the one place that parses, prints and exits
"""

__version__ = "0.1.0"

# Part of what makes two numbers comparable: raise it whenever a change of method moves a number.
METHOD_VERSION = 1
