"""The queues before all models, and whether the server takes requests at all."""

from headrace.config.settings import StreamConfig
from headrace.core.errors import RequestError
from headrace.fleet.fleet import Fleet
from headrace.fleet.model_host import ModelHost
from headrace.generation.admission import Admission, KeyLimits, Place


class Queues:
    """Has one Admission before each model, and opens none while it takes no requests."""

    def __init__(self, config: StreamConfig, fleet: Fleet) -> None:
        self.limits = KeyLimits(config)
        self.is_draining = self.is_ending = False
        self._config = config
        self._fleet = fleet
        self._by_host: dict[ModelHost, Admission] = {}
        fleet.on_gone = lambda host: self._by_host.pop(host, None)

    def stop(self) -> None:
        """Refuses new requests from now on; what is admitted goes on."""
        self.is_draining = True

    def go_on(self) -> None:
        """Takes `stop` back; nothing once the server ends."""
        self.is_draining = self.is_ending

    def end(self) -> None:
        """Refuses new requests for good."""
        self.is_draining = self.is_ending = True

    def find(self, name: str | None) -> tuple[ModelHost, Admission]:
        """The host of that name and its queue; RequestError if it takes no requests."""
        host = self._fleet.hosts.get(name)
        return host, self.of(host)

    def of(self, host: ModelHost) -> Admission:
        """The queue before a host; RequestError if that takes no requests.

        A model is loaded when it is asked for; a pinned one must have been.
        """
        is_pinned = host is self._fleet.pinned
        if self.is_draining and not (is_pinned and host.engine.state == "dead"):
            raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
        if is_pinned and host.engine.state in ("unloaded", "loading"):
            raise RequestError("model_loading", "Loading model", retry_after_s=2)
        if is_pinned and host.engine.state == "dead":
            raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)
        queue = self._of(host)
        queue.set_schedule(host.tenants.eta.schedule, host.tenants.eta.tokens_per_s)
        return queue

    def resume(self, host: ModelHost) -> Place:
        """The place of a stream that was admitted before, whatever the bounds are now."""
        return self._of(host).resume()

    def _of(self, host: ModelHost) -> Admission:
        return self._by_host.setdefault(host, Admission(self._config, self.limits))
