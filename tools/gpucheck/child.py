"""One section in a process of its own: ``python -m hicache.tools.gpucheck.child NAME DEVICE``."""

import os
import sys

from hicache.tools.gpucheck.running import ToldReport, run_here, tell

if __name__ == "__main__":
    tell(run_here(sys.argv[1], sys.argv[2], ToldReport))
    sys.stderr.flush()
    # A thread that hangs in a driver must not keep the report from those who wait for it.
    os._exit(0)
