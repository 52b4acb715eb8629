"""Many answers at once: the scheduler, streams, drafts."""
