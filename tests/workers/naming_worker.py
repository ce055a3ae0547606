"""A worker that answers each job with the job's owner."""

import socket
import sys

from headrace.workers.process import receive, reply
from headrace_common.worker_jobs import decode_job

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    receive(connection)
    reply(connection, b"")
    while (asked := receive(connection)) is not None:
        reply(connection, decode_job(asked[0]).owner.encode())
