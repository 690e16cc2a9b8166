"""What every test can rely on, however the tests were started."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_a_process_that_a_test_starts_hears_ctrl_c():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGINT


def test_it_does_so_where_the_tests_are_a_background_job_of_a_script():
    this = f"{__file__}::{test_a_process_that_a_test_starts_hears_ctrl_c.__name__}"
    done = subprocess.run(
        ["sh", "-c", '"$@" & wait $!', "sh", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", this],
        cwd=Path(__file__).parents[1],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
