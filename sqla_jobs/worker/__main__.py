"""`python -m sqla_jobs.worker`: a worker as a program. Its options, signals and exit codes: `program`."""

import sys

from sqla_jobs.worker.signals import end_on_signal

if __name__ == "__main__":
    # before the imports, which take most of a second: a rollout may stop a worker that has just begun
    end_on_signal()
    from sqla_jobs.worker.program import main

    sys.exit(main())
