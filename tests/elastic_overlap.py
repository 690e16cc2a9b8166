"""`overlap` with the ranks of tests/faulty_ranks.py: `python elastic_overlap.py FAULTS ARGUMENTS...`."""

import sys

import faulty_ranks

from harness import child
from harness.cli import main

child.module = faulty_ranks.stand_in(sys.argv.pop(1))
main()
