"""The bodies of REST responses, declared once: the API encodes them, the client decodes them.

A client ignores fields it does not know. A field that is added later has a default: servers of the
release before do not send it.
"""
