"""`python -m sqla_jobs`: the same as `sqla-jobs`."""

import sys

from sqla_jobs.cli import main

sys.exit(main())
