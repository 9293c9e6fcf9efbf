"""Secured connections between two processes, of one host or of two.

session.py     what both ends say, and when: pure, without I/O
identity.py    what they prove to each other
sealing.py     keys and ciphers; imported only where a connection leaves its host
frames.py      payloads behind their length
blocking.py    drivers of a session, one for each style of I/O: for a thread that waits,
selecting.py   for a loop that never waits, with a selector,
serving.py     and for an event loop that accepts connections
reconnect.py   how often to try again, and what to say meanwhile
"""
