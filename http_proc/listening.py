"""The socket that HTTP listens at."""

import errno
import ipaddress
import socket

from runtime.errors import ConfigError
from runtime.options import HttpOptions

USUAL_PORT = 8000
BACKLOG = 4096
"""Connections that may wait to be accepted: thousands of clients may start at once."""


def bound_socket(options: HttpOptions) -> socket.socket:
    """A socket at the configured address, to which nobody can connect yet: the port is taken, or
    the error is told, before anything loads for long.
    """
    if options.http_port is not None:
        return _bound(options.http_host, options.http_port)
    try:
        return _bound(options.http_host, USUAL_PORT)
    except _InUse:
        return _bound(options.http_host, 0)


def url_of(bound: socket.socket) -> str:
    """Where clients connect."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class _InUse(ConfigError):
    """Somebody else listens there."""


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise ConfigError(f"http_host is {host!r}, which is no address: {e.strerror}") from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as e:
        made.close()
        error = _InUse if e.errno == errno.EADDRINUSE else ConfigError
        raise error(
            f"can't listen at {host} port {port}: {e.strerror}; choose another --http-port (0 for"
            " any free one) or --http-host, or --no-http"
        ) from None
    return made
