"""`python -m harness.experiments FD` reads names from stdin and says the figures of those experiments, one by one."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from harness.backends import get_backend
from harness.backends.base import Backend
from harness.claims import Numbers
from harness.errors import Skip
from harness.experiments import races, times
from harness.experiments.bench import Bench
from harness.myths import Begun, Broke, Found, Opened, Unable
from harness.serving import Say, one_line, serve

# By the names of harness/claims.py.
EXPERIMENTS: Mapping[str, Callable[[Bench], Numbers]] = {
    "read-back": races.read_back,
    "edited-source": races.edited_source,
    "compiled-read": races.compiled_read,
    "list-index": races.list_index,
    "one-stream": times.one_stream,
    "pageable-return": times.pageable_return,
    "two-kernels": times.two_kernels,
    "no-wait": races.no_wait,
    "pinned-size": times.pinned_size,
    "pin-each-time": times.pin_each_time,
    "blocking-to": times.blocking_to,
}


def experiment(names: Sequence[str], backend: Backend, say: Say) -> None:
    """Say what becomes of each; an error ends only its own experiment, unless it took the device with it."""
    bench = Bench(backend)
    for name in names:
        say(Begun(name=name))
        try:
            numbers = EXPERIMENTS[name](bench)
        except Skip as skip:
            say(Unable(name=name, reason=str(skip)))
        except Exception as error:
            backend.synchronize()  # a device that is lost raises here again, and ends this process
            say(Broke(name=name, reason=one_line(error)))
        else:
            say(Found(name=name, numbers={key: round(float(value), 6) for key, value in numbers.items()}))


def main() -> int:
    """Entry of the child process; 0 when every experiment was told."""

    def work(asked: bytes, say: Say) -> None:
        names = msgspec.json.decode(asked, type=list[str])
        # Nothing is gated here, and what loads on first use does so in turns that are thrown away: to load every
        # kernel beforehand would take as long as half of the experiments.
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        backend = get_backend("cuda")
        say(Opened(device=torch.cuda.get_device_name(0), torch=str(torch.__version__)))
        experiment(names, backend, say)
        backend.close()

    return serve(work)


if __name__ == "__main__":
    sys.exit(main())
