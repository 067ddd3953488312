"""Schedulers of serving engines, one file each behind one interface (``step_scheduler``)."""
