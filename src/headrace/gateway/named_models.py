"""Reads the models that clients name before a worker meets their files.

Workers read a model without the limits on time and memory that apply to the first reading, so
they must not be the first to meet its files.
"""

from headrace.generation.generation import Generation
from headrace.workers.job_line import Body
from headrace_common.jobs import ModelsNamedIn, NameModels


async def read_named_models(
    generation: Generation, body: Body, place: ModelsNamedIn = "body"
) -> None:
    """Read each model that the body names, unless it was read or must be downloaded first.

    RequestError if one of them cannot be read.
    """
    hosts = generation.fleet.hosts
    if all(host.known is not None for host in hosts.all()):
        return
    for name in await generation.work.do(NameModels(place), body):
        host = hosts.get(name)
        if host.known is None and host.is_here:
            await generation.fleet.read(host)
