"""Overlap harness: do copies, compute and collectives really run at the same time, and did it get worse?

The way of the data, low layers first (tests/test_layering.py holds every module to it)::

    errors, sizes, files, host, torchrun        what every layer may use
    case, families, profiles, suites, plans     what to measure; no torch
    schema, sense, record                       what was measured, as a file
    statistics, modality, theory, buckets       numbers without units
    spreads, evidence, contrast, legs           launches against launches: what differs, and what could not be seen
    doubts, registry, metrics                   what the samples of a record mean
    telemetry, sampler, nvml_sampler, validity  NVML beside the samples; pynvml lives in telemetry
    devices, machine, source, comparable        on what, and of which commit
    group                                       the processes that measure a case together
    backends, workloads                         how one sample is made and checked; torch lives here
    measure, ceilings, controls                 the rounds of a case, the device alone, work of known answer
    protocol, serving, worker                   one launch: one fresh process, case by case
    child, supervise, runs                      the parent: starts launches, keeps the record; no torch
    elastic, board                              many hosts: rank 0 says what is next, where all ranks can read it
    ranks, launching, following                 one launch by many ranks: one rank, those of a machine, of other hosts
    calibration                                 the sizes of a new profile
    store, points, steps, history               a case over the commits of a store
    budgets, sides, differences                 base and head: what they are, and whether they can be compared
    comparison, gate                            case by case, and whether that is fine
    noise, trees, duel, trial                   how nights differ; base and head measured in turns by their own code
    labels, views, exposure                     a record in words
    together                                    the same of ranks that copy from one host at once
    feeding, feeding_words                      the same of loaders: input-bound or not, workers, storage, waste
    findings                                    all of it in sentences
    terms, threshold, best_bucket               tokens per GPU where overlap stops and why; the best bucket cap
    threshold_words                             the same in words
    claims, myths, experiments                  what people believe of copies, put to the test; a child does it
    progress                                    a run in words, while it lasts
    tables, summary, figures                    sinks: they render records and measure nothing
    exposure_figure, loader_figure              figures of collectives, and of loaders
    report                                      all of them on one page
    timeline, history_figure, contest           a history in words and drawn; a comparison in words
    asv_store, doctor, checkup                  a record for asv; the machine in words, read and measured
    pytest_feed                                 a record for pytest-benchmark
    asv_suite, asv_plugin                       asv loads them, nothing here does
    cli, __main__                               the one place that parses, prints and exits
"""

__version__ = "0.1.0"

# Part of what makes two numbers comparable: raise it whenever a change of method moves a number.
METHOD_VERSION = 1
