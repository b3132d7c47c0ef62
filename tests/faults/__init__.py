"""Faults: the worker, either server, and the network between them are killed."""
