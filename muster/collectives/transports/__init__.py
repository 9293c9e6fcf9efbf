"""How messages reach other ranks.

tcp.py              ranks of any machines: rendezvous.py, handshake.py, pending_peers.py
shared_memory.py    ranks of one host: unix_rendezvous.py, arena.py, flags.py
message_backend.py  moves messages over one channel for each peer
channel.py          frames: the messages of one peer, of all groups and operations
streams.py          what carries frames: a socket; rings.py: shared memory; sealed.py: encrypted
"""
