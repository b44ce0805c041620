"""`shoal launch`: submit a run to a cluster's scheduler."""

from __future__ import annotations

import sys

import shoal
from shoal.spec.cluster_job import ClusterJob
from shoal.spec.config import RunConfig


class LaunchOptions(ClusterJob):
    dry_run: bool = False
    """Print what would be submitted, and submit nothing."""


def run(options: LaunchOptions, config: RunConfig) -> int:
    """Submit a run, or print its job; the command that submits it is printed on stderr."""
    job = ClusterJob.model_validate(options.model_dump(exclude={"dry_run"}))
    submission = shoal.submit(config, job, dry_run=options.dry_run)
    if options.dry_run:
        print(submission.text, end="")
    print(f"{'submit with' if options.dry_run else 'submitted by'}: {submission.show()}", file=sys.stderr)
    return 0
