"""Tracks the models that a server has, and the pending changes to models that are still in use."""

from headrace.fleet.model_host import ModelHost
from headrace.text.model_names import Aliases, Models


class Roster:
    """The served models, the models to remove, and the hosts that will replace current hosts.

    A change waits until no request uses the model. Then `apply_change` makes the change.
    """

    def __init__(self, hosts: tuple[ModelHost, ...], aliases: Aliases | None = None) -> None:
        self._aliases = aliases
        self.hosts = Models(hosts, aliases)
        # The models to remove. The keys are the names of the models.
        self.leaving: dict[str, ModelHost] = {}
        self._successors: dict[str, ModelHost] = {}
        # Names of models that will be removed, or loaded again with other settings.
        self.changing: tuple[str, ...] = ()

    def all(self) -> tuple[ModelHost, ...]:
        return (*self.hosts.all(), *self.leaving.values())

    def get(self, name: str) -> ModelHost:
        """Return the host of a model, even if the model will be removed.

        Raises RequestError if no model has this name.
        """
        return self.leaving.get(name) or self.hosts.exact(name)

    def become(self, hosts: tuple[ModelHost, ...], within_s: float) -> None:
        """Set the models to serve.

        A model that is served already keeps its host while the host is in use. If the settings
        differ, a new host replaces the old host afterwards (see `apply_change`). A changed number
        of replicas takes effect immediately; streams of removed replicas have `within_s` seconds
        to end.
        """
        known = {host.name: host for host in self.all()}
        for host in hosts:
            if host.name in known:
                known[host.name].resize(host.config, within_s)
        current = tuple(known.get(host.name, host) for host in hosts)
        self.hosts = Models(current, self._aliases)
        self._successors = {
            host.name: host
            for host in hosts
            if host.name in known and known[host.name].config != host.config
        }
        wanted = {host.name for host in hosts}
        self.leaving = {name: host for name, host in known.items() if name not in wanted}
        self.changing = (*self.leaving, *self._successors)

    def apply_change(self, name: str) -> tuple[ModelHost, ModelHost | None]:
        """Make the pending change of a model; return the old host, and the new host or None."""
        self.changing = tuple(one for one in self.changing if one != name)
        if (gone := self.leaving.pop(name, None)) is not None:
            return gone, None
        gone, new = self.hosts.exact(name), self._successors.pop(name)
        current = tuple(new if host is gone else host for host in self.hosts.all())
        self.hosts = Models(current, self._aliases)
        return gone, new
