"""Workloads: how one sample of each arm of a case is made and checked."""

from harness.backends.base import Backend
from harness.case import Case
from harness.errors import Skip, UsageError
from harness.group import Alone, Group
from harness.profiles import Profile
from harness.workloads.base import Workload


def build(case: Case, profile: Profile, backend: Backend, group: Group | None = None) -> Workload:
    """The workload of `case` on `backend`; Skip if it has no meaning there, UsageError if it does not fit.

    group: the processes that measure it together, for a family of such cases.
    """
    if case.family.name == "h2d":
        from harness.workloads.h2d import H2DWorkload

        return H2DWorkload(case, profile, backend, group=group or Alone())
    if case.family.name == "ddp":
        import torch.distributed

        if not torch.distributed.is_available():
            raise Skip("this torch has no torch.distributed")
        from harness.workloads.ddp import DDPWorkload

        return DDPWorkload(case, profile, backend, group or Alone())
    if case.family.name == "feed":
        from harness.workloads.feed import FeedWorkload

        return FeedWorkload(case, profile, backend)
    raise UsageError(f"case: family {case.family.name!r} has no workload")
