"""Another user of this machine, for tests of what such a user cannot do."""

import ctypes
import os
import socket

import pytest

STRANGER = 60_000
"""A user id; any unused one will do."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def socket_of(user: int) -> socket.socket:
    """Make a socket that belongs to `user`, where this process may do so."""
    libc = ctypes.CDLL(None)
    if os.geteuid() != 0:
        return socket.socket()
    libc.setfsuid(user)
    try:
        return socket.socket()
    finally:
        libc.setfsuid(os.geteuid())
