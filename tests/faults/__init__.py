"""Everything is killed here: the worker, either server, the network between them."""
