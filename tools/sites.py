"""Whose failure it is when a site of the open web gives no page: the site's, or the network's."""

import threading

from graphpo_agent.net.failures import CallFailed

__all__ = ["SiteFailed", "Sites"]

_MANY = 4


class SiteFailed(CallFailed):
    """A site gave no page for a reason that may pass.

    Attributes:
        again: whether the same call may ask once more; a site that counts requests is left alone.
    """

    def __init__(self, cause: CallFailed, outage: bool) -> None:
        super().__init__("transient" if outage else "no_result", str(cause))
        self.again = cause.kind == "transient"


class Sites:
    """Tells sites that are down from a network that is; safe to use from several threads.

    On any day some sites are down, slow or overloaded, and an agent has to do without their pages,
    as without those that do not exist: no result. It is an outage where nothing else can be reached
    either: no site has answered yet, or several have failed since one did.

    Example::

        sites.failed("oak.example", CallFailed("transient", "oak.example: status 503")).kind
        # "no_result" after sites.answered(), else "transient"
    """

    def __init__(self) -> None:
        """Nothing is known of the network yet."""
        self._answered = False
        self._silent: set[str] = set()
        self._lock = threading.Lock()

    def answered(self) -> None:
        """Some site replied, whatever it said."""
        with self._lock:
            self._answered = True
            self._silent.clear()

    def failed(self, host: str, cause: CallFailed) -> SiteFailed:
        """What to raise for a page of a host that failed for a passing reason."""
        with self._lock:
            self._silent.add(host)
            outage = not self._answered or len(self._silent) > _MANY
        return SiteFailed(cause, outage)
