"""What processes say to each other, by conversation: closed unions of frozen, tagged values.

A rank and its agent share an inherited socket pair; an agent and the coordinator share one TCP
connection, a link (`muster.links`). `muster.contracts.messages.wire` encodes a message. An unknown
tag or field is an error, except in a hello: both ends run the same version and protocol. The tags
and the encoded field names are the wire format and stay when a Python name changes.
"""
