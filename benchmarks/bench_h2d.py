"""Host-to-device copies beside the GEMMs that read them (family h2d of harness/families.py)."""

from . import common


@common.tracked
class H2D:
    """Family h2d; `track_*` readers are added by `common.tracked`."""

    params = common.cases("h2d", "bench_h2d.H2D")
    param_names = ("case",)
    version = common.VERSION

    # asv shares one run between classes that inherit `setup_cache`, so every family's class has its own.
    def setup_cache(self):
        return common.measure("h2d", "bench_h2d.H2D")

    setup_cache.timeout = common.SETUP_TIMEOUT

    def setup(self, cache, case):
        common.setup(cache, case)
