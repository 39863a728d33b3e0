"""The command: ``python -m hicache.tools.gpucheck [--section NAME] [--device cpu] [--json FILE]``.

Results on stdout, messages on stderr; 0 all is right, 1 something is wrong or died, 2 could not
run. Imports nothing at first but the standard library: a plain CUDA image lacks some of what
HiCache depends on, and ``standins`` must come before whoever imports that.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hicache.tools.gpucheck import running
from hicache.tools.gpucheck.findings import table, to_json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections asked for; return the exit code."""
    options = _parser().parse_args(argv)
    if (why := running.why_not(options.device)) is not None:
        print(f"gpucheck: {why}", file=sys.stderr)
        return 2
    names = options.section or list(running.SECTIONS)
    if options.in_process:
        reports = [running.run_here(name, options.device) for name in names]
    else:
        reports = [running.run_apart(name, options.device) for name in names]
    print(table(reports))
    if options.json is not None:
        options.json.write_text(to_json(reports, options.device))
    return 0 if all(report.is_fine for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hicache.tools.gpucheck", description=__doc__)
    parser.add_argument(
        "--section",
        action="append",
        choices=list(running.SECTIONS),
        help="only this one; may be given several times",
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, …; cpu is a dry run at small sizes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--in-process", action="store_true", help="no process for each section: for debuggers"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
