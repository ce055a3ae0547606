"""The models that a server has, and how they follow the models that it should have."""

from headrace.fleet.model_host import ModelHost
from headrace.text.model_names import Aliases, Models


class Roster:
    """The models there are, those to be removed, and the hosts that take another's place.

    Changes wait until nobody uses a model; then `settle` makes them.
    """

    def __init__(self, hosts: tuple[ModelHost, ...], aliases: Aliases | None = None) -> None:
        self._aliases = aliases
        self.hosts = Models(hosts, aliases)
        self.leaving: dict[str, ModelHost] = {}  # by name
        self._successors: dict[str, ModelHost] = {}

    def all(self) -> tuple[ModelHost, ...]:
        return (*self.hosts.all(), *self.leaving.values())

    def get(self, name: str) -> ModelHost:
        """The host of a name, also of one that is to leave; RequestError if there is none."""
        return self.leaving.get(name) or self.hosts.exact(name)

    def changing(self) -> tuple[str, ...]:
        """The models to be removed, or loaded anew with other settings."""
        return (*self.leaving, *self._successors)

    def become(self, hosts: tuple[ModelHost, ...], within_s: float) -> None:
        """Sets the models; a host whose settings are those of one that there is stays unused.

        Another number of engines is taken at once, and streams of those that leave have `within_s`.
        """
        there = {host.name: host for host in self.all()}
        for host in hosts:
            if host.name in there:
                there[host.name].resize(host.config, within_s)
        those = tuple(there.get(host.name, host) for host in hosts)
        self.hosts = Models(those, self._aliases)
        self._successors = {
            host.name: host
            for host in hosts
            if host.name in there and there[host.name].config != host.config
        }
        wanted = {host.name for host in hosts}
        self.leaving = {name: host for name, host in there.items() if name not in wanted}

    def settle(self, name: str) -> tuple[ModelHost, ModelHost | None]:
        """Makes the change of a model; the host that is gone, and the one in its place."""
        if (gone := self.leaving.pop(name, None)) is not None:
            return gone, None
        gone, new = self.hosts.exact(name), self._successors.pop(name)
        those = tuple(new if host is gone else host for host in self.hosts.all())
        self.hosts = Models(those, self._aliases)
        return gone, new
