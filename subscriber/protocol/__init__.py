"""Messages and their bytes: requests and responses between a subscriber and a publisher.

`copy_data` is the envelope inside CopyData. `decode` and `encode` are the pgoutput messages inside it (`messages`,
`tuple_data`), and `stream_state` is their order. `frontend` and `reader` serve the frontend/backend protocol around
both. Pure: the standard library only, no I/O, no clock. The only error for invalid bytes is ProtocolError.
"""
