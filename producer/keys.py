"""Every Redis key of the product, each spelled once. It knows no connection and no script.

Keys under `prefix` are ours; keys under `rq:` are RQ's own names, so that `rq info` and dashboards see the queue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_PREFIX = "cua:"
DEFAULT_QUEUE = "screenshots"
JOB_ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
QUEUE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PREFIX_PATTERN = re.compile(r"[A-Za-z0-9_.:{}-]{0,64}")


@dataclass(frozen=True)
class Keys:
    """The keys of one queue.

    `prefix` opens every key of ours. Two queues on one server need two names; a prefix alone does not part them,
    because RQ's keys have none.
    """

    prefix: str = DEFAULT_PREFIX
    queue_name: str = DEFAULT_QUEUE

    def __post_init__(self) -> None:
        if not QUEUE_NAME_PATTERN.fullmatch(self.queue_name):
            raise ValueError(f"queue name {self.queue_name!r}: 1-64 letters, digits, '_', '.' or '-' are allowed")
        if not PREFIX_PATTERN.fullmatch(self.prefix):
            raise ValueError(f"key prefix {self.prefix!r}: at most 64 letters, digits or '_.:{{}}-' are allowed")

    def payload(self, job_id: str) -> str:
        """String: the job's msgpack map, until the job has ended."""
        return f"{self.prefix}job:{job_id}"

    def result(self, job_id: str) -> str:
        """Hash: the result, plain text."""
        return f"{self.prefix}result:{job_id}"

    def rq_job(self, job_id: str) -> str:
        """Hash: RQ's record of the job and our bookkeeping, never the payload."""
        return f"rq:job:{job_id}"

    def stream(self, job_id: str) -> str:
        """Stream: one entry when the job has ended; what a waiting client blocks on. RQ reads it too."""
        return f"rq:results:{job_id}"

    def staged(self, nonce: str) -> str:
        """String: a payload inside the transaction that submits it; never seen outside."""
        return f"{self.prefix}staged:{nonce}"

    def taken(self, token: str) -> str:
        """String: a payload while the worker that has just taken its job reads it; no job's id holds a colon."""
        return f"{self.prefix}job:taken:{token}"

    def worker(self, name: str) -> str:
        """Hash: what a worker says about itself."""
        return f"{self.prefix}worker:{name}"

    def rq_worker(self, name: str) -> str:
        """Hash: the same worker as RQ's tools read it."""
        return f"rq:worker:{name}"

    @property
    def queue(self) -> str:
        """List: the ids of waiting jobs, first in, first out."""
        return f"rq:queue:{self.queue_name}"

    @property
    def queues(self) -> str:
        """Set: RQ's index of queues."""
        return "rq:queues"

    @property
    def leases(self) -> str:
        """Sorted set: `<id>:<token>` of every running job, scored by the server's second at which its lease ends."""
        return f"{self.prefix}leases:{self.queue_name}"

    @property
    def wip(self) -> str:
        """Sorted set: RQ's view of the running jobs, a mirror of the leases that never ends by itself.

        RQ's own clean-up takes ended entries out and calls their jobs failed; with the truth in `leases` it cannot.
        """
        return f"rq:wip:{self.queue_name}"

    @property
    def waiting(self) -> str:
        """Hash: id -> payload bytes of every waiting job; bounds are checked against it."""
        return f"{self.prefix}waiting:{self.queue_name}"

    @property
    def wake(self) -> str:
        """List: one id an enqueue; what an idle worker blocks on. Only a hint, the queue decides."""
        return f"{self.prefix}wake:{self.queue_name}"

    @property
    def finished(self) -> str:
        """Sorted set: RQ's registry of finished jobs."""
        return f"rq:finished:{self.queue_name}"

    @property
    def failed(self) -> str:
        """Sorted set: RQ's registry of failed jobs."""
        return f"rq:failed:{self.queue_name}"

    @property
    def rate(self) -> str:
        """Hash: `job_ms`, the smoothed time from taking a job to its end; retry-after is computed from it."""
        return f"{self.prefix}rate:{self.queue_name}"

    @property
    def recent(self) -> str:
        """Sorted set: the ids of the jobs that ended last, scored by the server's microsecond of their end."""
        return f"{self.prefix}recent:{self.queue_name}"

    @property
    def workers(self) -> str:
        """Sorted set: the names of the queue's workers, scored by the server's second of their last beat."""
        return f"{self.prefix}workers:{self.queue_name}"

    @property
    def rq_workers(self) -> str:
        """Set: RQ's index of all workers."""
        return "rq:workers"

    @property
    def rq_queue_workers(self) -> str:
        """Set: RQ's index of the queue's workers."""
        return f"rq:workers:{self.queue_name}"

    @property
    def suspended(self) -> str:
        """String: set by `rq suspend`; no worker takes a job while it stands."""
        return "rq:suspended"
