"""Workers: launcher, supervisors, apply workers, table synchronization workers, the archiver and mirrors."""
