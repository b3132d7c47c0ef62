"""The tasks: launcher, apply workers, table synchronization workers. The only room that starts any."""
